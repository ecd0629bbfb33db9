"""What an exception of a step means: memory, a lost device, or a fault; and how a user is told."""

from __future__ import annotations

import torch

from localllm.errors import BadModelFile, DeviceError, InternalError, LocalLLMError, OutOfMemory
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
    """Whether a GPU's context is unusable after this failure, or a rank is gone: every later call would fail, too."""
    if isinstance(error, DeviceError):
        return True
    from localllm.kernels.verify.trial import is_device_lost as context_is_lost

    lost = getattr(torch, "AcceleratorError", ())
    return not is_out_of_memory(error) and (isinstance(error, lost) or context_is_lost(error))


# words of CUDA in lower case -> what they mean
CAUSES = {
    "uncorrectable ecc": "its memory failed, and what it held is wrong",
    "launch timed out": "the driver stopped a kernel that kept its screen waiting",
    "illegal": "a kernel left its memory",
    "misaligned": "a kernel left its memory",
    "assert": "a kernel found numbers that cannot be",
    **dict.fromkeys(
        ("no cuda-capable", "unknown error", "is lost", "shutting down", "not initialized", "not ready", "destroyed"),
        "the driver has lost the card, or was reset",
    ),
    "busy or unavailable": "another process holds it alone",
}


def device_lost(error: BaseException) -> DeviceError:
    """The error that ends an engine whose device is unusable, to be raised from `error`."""
    if isinstance(error, DeviceError):
        return DeviceError(error.message, error.hint)
    said = (str(error).splitlines() or [type(error).__name__])[0]
    cause = next((f": {cause}" for word, cause in CAUSES.items() if word in said.lower()), "")
    return DeviceError(f"the GPU failed{cause} ({said[:200]})", "restart localllm; `localllm doctor` checks the card")


def explained(error: Exception) -> LocalLLMError:
    """An error that a user can be shown."""
    if isinstance(error, LocalLLMError):
        return error
    wrapped: LocalLLMError
    if isinstance(error, NotANumber):
        wrapped = BadModelFile(f"what the model computes is not a number ({error}): its weights are damaged")
    elif is_device_lost(error):
        wrapped = device_lost(error)
    elif is_out_of_memory(error):
        wrapped = OutOfMemory("memory ran out during this step", "use a smaller --ctx or fewer requests")
    else:
        wrapped = InternalError(f"the request failed inside the engine: {type(error).__name__}", "see the log")
    wrapped.__cause__ = error
    return wrapped
