"""Process of a rank other than 0: `python -m localllm.boot.follower FD`, started and directed by `boot.ranks`."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import traceback

from localllm.boot.ranks import RAN_OUT, RAN_OUT_HINT, identity_of, leave, meet, receive, send, versions
from localllm.engine.failures import device_lost, is_device_lost, is_out_of_memory
from localllm.errors import ConfigError, DeviceError, LocalLLMError, OutOfMemory
from localllm.models.parallel import Message


def end_with(lead: socket.socket) -> None:
    """Exit this process when rank 0 is gone, even if it is blocked."""
    poll = select.poll()
    poll.register(lead, getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    os._exit(1)


def run(lead: socket.socket) -> None:
    """Load this rank's part, then follow rank 0 step by step."""
    job = receive(lead)
    import torch

    from localllm.boot.boot import first_use
    from localllm.boot.claim import claim_card, serve_torch, set_threads
    from localllm.boot.memory_meter import peak_of
    from localllm.device import machine
    from localllm.models.architectures import open_model
    from localllm.models.architectures.sharding import Share
    from localllm.models.loader import LoadOptions, load_model
    from localllm.models.parallel import Follower, ParallelModel
    from localllm.models.ranks import Ranks

    if job["versions"] != versions():
        raise ConfigError(
            f"this rank runs localllm {' with torch '.join(versions())}, but rank 0 runs"
            f" {' with torch '.join(job['versions'])}",
            "install a single version and start again",
        )
    share = Share(**job["share"] | {"span": tuple(job["share"]["span"])})
    device, here = job["device"], machine()
    set_threads(job["threads"])
    if device != "cpu":
        claim_card(device, here)
    options = LoadOptions(
        **job["options"],
        device=device,
        selftest=first_use(device, here),
        ranks=Ranks(share, ordered=job["options"]["deterministic"]),
    )
    with open_model(job["path"], job["mmproj"]) as checkpoint:
        if identity_of(checkpoint) != job["files"]:
            raise ConfigError(
                f"{checkpoint.path.name} changed while the model was loading",
                "start again once nothing writes to the model's files",
            )
        model = load_model(checkpoint, options)
    assert isinstance(model, ParallelModel)
    serve_torch(model.kernels, job["threads"])
    send(lead, {"ready": share.rank, "weight_bytes": model.weight_bytes})
    if receive(lead)["do"] != "meet":
        return
    meet(share, job["store"], device)

    def answer(message: Message) -> None:
        send(lead, {"answer": message})

    Follower(model, torch.device(device), lambda: receive(lead), answer, peak_of).run()
    leave()


def _known(error: BaseException) -> LocalLLMError:
    if isinstance(error, LocalLLMError):
        return error
    if is_out_of_memory(error):
        return OutOfMemory(RAN_OUT, RAN_OUT_HINT)
    if is_device_lost(error):
        return device_lost(error)
    return DeviceError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", "see the log")


def main(descriptor: int) -> None:
    """Run the process; an error that ends it is sent to rank 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lead = socket.socket(fileno=descriptor)
    threading.Thread(target=end_with, args=(lead,), daemon=True).start()
    try:
        run(lead)
    except EOFError:
        os._exit(1)
    except BaseException as error:
        known = _known(error)
        send(lead, {"error": type(known).__name__, "message": known.message, "hint": known.hint or ""})
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # nothing needs cleanup


if __name__ == "__main__":
    main(int(sys.argv[1]))
