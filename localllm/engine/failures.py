"""What an exception of a step means: memory, a lost device, or a fault; and how a user is told."""

from __future__ import annotations

import torch

from localllm.errors import BadModelFile, InternalError, LocalLLMError, OutOfMemory
from localllm.kernels.token_choice import NotANumber


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this failure is about memory, on the host or on a device."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "out of memory" in text
        or "can't allocate" in text
        or "alloc_failed" in text  # cuBLAS
    )


def is_device_lost(error: BaseException) -> bool:
    """Whether a GPU's context is unusable after this failure: every later call would fail, too."""
    from localllm.kernels.verify.trial import is_device_lost as context_is_lost

    lost = getattr(torch, "AcceleratorError", ())
    return not is_out_of_memory(error) and (isinstance(error, lost) or context_is_lost(error))


def explained(error: Exception) -> LocalLLMError:
    """An error that a user can be shown."""
    if isinstance(error, LocalLLMError):
        return error
    wrapped: LocalLLMError
    if isinstance(error, NotANumber):
        wrapped = BadModelFile(f"what the model computes is not a number ({error}): its weights are damaged")
    elif is_out_of_memory(error):
        wrapped = OutOfMemory("memory ran out during this step", "use a smaller --ctx or fewer requests")
    else:
        wrapped = InternalError(f"the request failed inside the engine: {type(error).__name__}", "see the log")
    wrapped.__cause__ = error
    return wrapped
