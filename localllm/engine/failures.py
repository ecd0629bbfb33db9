"""Classifies exceptions of a step (out of memory, lost device, internal error) and turns them into user errors."""

from __future__ import annotations

import torch

from localllm.errors import BadModelFile, DeviceError, InternalError, LocalLLMError, OutOfMemory
from localllm.kernels.token_choice import NotANumber


def is_out_of_memory(error: BaseException) -> bool:
    """True if this error is an out-of-memory error, on the host or on a device."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "out of memory" in text
        or "can't allocate" in text
        or "alloc_failed" in text  # cuBLAS
    )


def is_device_lost(error: BaseException) -> bool:
    """True if the CUDA context is unusable after this error or a rank is gone, so that all later calls would fail."""
    if isinstance(error, DeviceError):
        return True
    from localllm.kernels.verify.trial import is_device_lost as context_is_lost

    return not is_out_of_memory(error) and context_is_lost(error)


# lower-case words of a CUDA error -> cause; the first that is found
CAUSES = {
    "uncorrectable ecc": "its memory has an uncorrectable error",
    "uncorrectable nvlink": "its NVLink has an uncorrectable error",
    "illegal instruction": "a kernel ran an illegal instruction",
    "launch timed out": "the driver stopped a kernel that blocked the display for too long",
    "illegal": "a kernel accessed memory out of bounds",
    "misaligned": "a kernel accessed a misaligned address",
    "assert": "an assertion in a kernel failed",
    **dict.fromkeys(
        ("no cuda-capable", "unknown error", "is lost", "shutting down", "not initialized", "not ready", "destroyed"),
        "the driver lost the GPU or was reset",
    ),
    "busy or unavailable": "another process uses it exclusively",
    "unspecified launch failure": "a kernel failed for a reason that the driver does not state",
}


def device_lost(error: BaseException) -> DeviceError:
    """The error that stops an engine whose device is unusable; raise it from `error`."""
    if isinstance(error, DeviceError):
        return DeviceError(error.message, error.hint)
    said = (str(error).splitlines() or [type(error).__name__])[0]
    cause = next((f": {cause}" for word, cause in CAUSES.items() if word in said.lower()), "")
    return DeviceError(f"the GPU failed{cause} ({said[:200]})", "restart localllm; `localllm doctor` checks the GPU")


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that is kept, and of its causes.

    Their frames hold the activations of a step, the engine and the weights, and may refer to what keeps the error:
    nothing collects such a cycle after `gc.freeze`.
    """
    while error is not None:
        error.with_traceback(None)
        error = error.__cause__ or error.__context__


def explained(error: Exception) -> LocalLLMError:
    """Convert an exception to an error that can be shown to a user."""
    if isinstance(error, LocalLLMError):
        return error
    wrapped: LocalLLMError
    if isinstance(error, NotANumber):
        wrapped = BadModelFile(f"the model's output is not a number ({error}): its weights are damaged")
    elif is_device_lost(error):
        wrapped = device_lost(error)
    elif is_out_of_memory(error):
        wrapped = OutOfMemory("out of memory in this step", "use a smaller --ctx or fewer requests")
    else:
        wrapped = InternalError(f"the request failed inside the engine: {type(error).__name__}", "see the log")
    wrapped.__cause__ = error
    return wrapped
