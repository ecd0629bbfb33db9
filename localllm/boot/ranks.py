"""Rank 0 of a divided model: starts the other ranks' processes, talks to them and stops them.

Rank 0 shares a socket with each other rank, for length-prefixed JSON messages. If a rank dies, a thread here notices at
once, kills the other ranks, and fails every request with an error that names the rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from localllm import errors
from localllm._version import __version__
from localllm.boot.claim import confined
from localllm.engine.failures import is_out_of_memory
from localllm.errors import ConfigError, DeviceError, LocalLLMError
from localllm.models.architectures import OpenModel
from localllm.models.architectures.sharding import Share
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model
from localllm.models.parallel import Message, ParallelModel
from localllm.models.ranks import Ranks
from localllm.plan.plan import Plan

LENGTH_BYTES = 4
MEET_S = 120.0  # time for all ranks to connect once each has loaded its weights
DYING_S = 3.0  # time to wait for a dying rank's last message and exit code
CLOSING_S = 5.0  # time for ranks to exit on their own
HINT = "start again; `localllm doctor` checks the GPUs"
RAN_OUT = "out of memory in a step of all ranks, which cannot be retried with a smaller batch"
RAN_OUT_HINT = "start again with a smaller --ctx or --parallel, or close other programs that use the memory"
# the fields of `LoadOptions` that all ranks share
ALIKE = ("dtype", "kv_format", "page_size", "context", "exact", "deterministic", "activations", "weights", "predictor")


def send(to: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message. Raises OSError if the other side is gone."""
    data = json.dumps(message, separators=(",", ":")).encode()
    to.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def receive(source: socket.socket) -> Message:
    """Receive the next message. Raises EOFError if the other side is gone."""
    data = _read(source, int.from_bytes(_read(source, LENGTH_BYTES), "little"))
    message: Message = json.loads(data)
    return message


def _read(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def meet(share: Share, store: str, device: str) -> None:
    """Join the process group of all ranks: Gloo over the loopback interface on the CPU, NCCL on GPUs."""
    if device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    # on a collective that never ends torch would end this process; `_fail` ends the collective instead
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    backend = "gloo" if device == "cpu" else "nccl"
    places = dist.FileStore(store, share.world)
    limits = timedelta(seconds=MEET_S)
    dist.init_process_group(backend, store=places, rank=share.rank, world_size=share.world, timeout=limits)


def leave(abort: bool = False) -> None:
    """Leave the process group, with NCCL all ranks together; `abort` ends collectives that wait for a dead one."""
    end = None
    if abort and dist.get_backend() == "nccl":
        end = getattr(dist.distributed_c10d, "_abort_process_group", None)

    def run() -> None:
        with contextlib.suppress(Exception):
            (end or dist.destroy_process_group)()

    thread = threading.Thread(target=run, name="leave", daemon=True)
    thread.start()
    thread.join(CLOSING_S)


def identity_of(checkpoint: OpenModel) -> dict[str, list[int]]:
    """Size, mtime and inode of the model's files, to detect changes; the vision tower is included after `facts`."""
    assert checkpoint.facts
    found = {path: os.stat(path) for path in checkpoint.files}
    return {str(path): [stat.st_size, stat.st_mtime_ns, stat.st_ino] for path, stat in found.items()}


def versions() -> list[str]:
    """The versions that all ranks must share."""
    return [__version__, torch.__version__]


def load(checkpoint: OpenModel, options: LoadOptions, plan: Plan) -> Model:
    """Load the model according to the plan: all of it in one process, or rank 0's part with the other ranks started."""
    if len(plan.ranks) < 2:
        with confined(plan):
            return load_model(checkpoint, options)
    if dist.is_initialized():
        raise ConfigError(
            "another model of this process is already split over ranks", "unload it first, or use one device per model"
        )
    processes = RankProcesses(checkpoint, options, plan)
    try:
        ranks = Ranks(processes.share(0), ordered=plan.deterministic)
        model = load_model(checkpoint, replace(options, ranks=ranks, progress=processes.watched(options.progress)))
        assert isinstance(model, ParallelModel)
        processes.join(model)
    except BaseException:
        processes.close()
        raise
    return model


class RankProcesses:
    """The processes of all ranks except rank 0, which load at the same time."""

    def __init__(self, checkpoint: OpenModel, options: LoadOptions, plan: Plan) -> None:
        self._plan = plan
        self._folder = tempfile.TemporaryDirectory(prefix="localllm-ranks-")
        self._store = str(Path(self._folder.name) / "store")
        self._closing = False
        self._ended = threading.Event()  # a rank has died
        self._failure: LocalLLMError | None = None
        self._lock = threading.Lock()
        self._model: ParallelModel | None = None
        self._sockets: list[socket.socket] = []
        self._ready: list[threading.Event] = []
        self._answers: list[SimpleQueue[Message | None]] = []  # None: no more answers will come
        self.processes: list[subprocess.Popen[bytes]] = []
        job = {
            "path": str(checkpoint.path),
            "mmproj": checkpoint.mmproj,
            "files": identity_of(checkpoint),
            "versions": versions(),
            "store": self._store,
            "threads": plan.threads,
            "options": {f.name: getattr(options, f.name) for f in fields(options) if f.name in ALIKE},
        }
        for rank in range(1, len(plan.ranks)):
            self._start(rank, job | {"share": _as_json(self.share(rank)), "device": plan.ranks[rank].device})

    def share(self, rank: int) -> Share:
        plan = self._plan
        return Share(rank, len(plan.ranks), plan.split, plan.ranks[rank].span)

    def _start(self, rank: int, job: Message) -> None:
        ours, theirs = socket.socketpair()
        log = open(Path(self._folder.name) / f"rank{rank}.log", "wb")  # noqa: SIM115 - the process keeps it
        with theirs, log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "localllm.boot.follower", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl+C is for rank 0, which ends the others
            )
        self._sockets.append(ours)
        self.processes.append(process)
        self._ready.append(threading.Event())
        self._answers.append(SimpleQueue())
        threading.Thread(target=self._read_messages, args=(rank, process), name=f"rank {rank}", daemon=True).start()
        with contextlib.suppress(OSError):  # the process has died; `_read_messages` reports it
            send(ours, job)

    # --- loading ------------------------------------------------------------------------------------------------------

    def watched(self, progress: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
        """A wrapper of `progress` that aborts rank 0's load if another rank has failed."""

        def told(done: int, of: int) -> None:
            if self._ended.is_set():
                raise self._error()
            if progress is not None:
                progress(done, of)

        return told

    def join(self, model: ParallelModel) -> None:
        """Wait until the other ranks are loaded, then connect to them. Raises the error of a rank that failed."""
        for is_ready in self._ready:
            while not is_ready.wait(0.05):
                if self._ended.is_set():
                    raise self._error()
        for source in self._sockets:
            self._send(source, {"do": "meet"})
        try:
            meet(self.share(0), self._store, self._plan.ranks[0].device)
        except RuntimeError as error:
            raise self.lost(error) from error
        model.lead, self._model = self, model

    # --- `models.parallel.Lead` ---------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        for source in self._sockets:
            self._send(source, message)

    def ask(self, message: Message) -> list[Message]:
        self.tell(message)
        if self._ended.is_set():
            raise self._error()
        return [self._answer_of(rank) for rank in range(1, len(self._plan.ranks))]

    def _answer_of(self, rank: int) -> Message:
        found = self._answers[rank - 1].get()
        if found is None:
            raise self._error()
        return found

    def _send(self, source: socket.socket, message: Message) -> None:
        try:
            send(source, message)
        except OSError as error:
            raise self.lost(error) from error

    def lost(self, error: Exception) -> LocalLLMError:
        if isinstance(error, LocalLLMError) and error is self._failure:
            return error
        self._ended.wait(DYING_S if isinstance(error, (OSError, RuntimeError)) else 0)
        if self._failure is None and is_out_of_memory(error):
            self._fail(DeviceError(f"rank 0: {RAN_OUT}", RAN_OUT_HINT))
        elif self._failure is None:
            said = (str(error).splitlines() or [type(error).__name__])[0][:200]
            self._fail(DeviceError(f"rank 0 failed in a step: {type(error).__name__}: {said}", HINT))
        return self._error()

    def close(self) -> None:
        """Stop all ranks; safe to call twice."""
        self._closing = True
        for source in self._sockets:
            with contextlib.suppress(OSError):
                send(source, {"do": "close"})
        if self._model is not None and dist.is_initialized():
            self._model = None
            leave(abort=self._failure is not None)
        ends = time.monotonic() + CLOSING_S * (self._failure is None)
        for process in self.processes:
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for source in self._sockets:
            with contextlib.suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)  # unblocks the thread that reads from it
            source.close()
        self._folder.cleanup()

    # --- a rank that dies ---------------------------------------------------------------------------------------------

    def _read_messages(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Handle a rank's messages until its process ends."""
        said: Message = {}
        with contextlib.suppress(EOFError, OSError):
            while True:
                said = receive(self._sockets[rank - 1])
                if "ready" in said:
                    self._ready[rank - 1].set()
                if "answer" in said:
                    self._answers[rank - 1].put(said["answer"])
                if "error" in said and not self._closing:  # not once it has ended: that takes a GPU process seconds
                    kind = DeviceError if self._model is not None else getattr(errors, said["error"], DeviceError)
                    self._fail(kind(f"rank {rank}: {said['message']}", said["hint"] or HINT))
        code = process.wait()
        if not self._closing and "error" not in said:
            self._fail(self._exit_error(rank, process.pid, code))

    def _exit_error(self, rank: int, pid: int, code: int) -> LocalLLMError:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        with contextlib.suppress(OSError):
            said = (Path(self._folder.name) / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()
            how += f": {said[-1][:200]}" if said else ""
        place = self._plan.ranks[rank].device
        return DeviceError(f"rank {rank} of {len(self._plan.ranks)} ({place}, process {pid}) {how}", HINT)

    def _fail(self, error: LocalLLMError) -> None:
        """Record the first failure, kill all other ranks and wake up everything that waits for them."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
        self._ended.set()
        for answers in self._answers:
            answers.put(None)
        for process in self.processes:
            process.kill()
        if self._model is not None and self._model.on_lost is not None:
            self._model.on_lost(error)
        if self._model is not None and dist.is_initialized() and dist.get_backend() == "nccl":
            leave(abort=True)  # the engine's thread waits for a step that the dead rank will never join

    def _error(self) -> LocalLLMError:
        self._ended.wait(DYING_S)
        return self._failure or DeviceError("a rank exited while the model was loading", HINT)


def _as_json(share: Share) -> dict[str, Any]:
    return {f.name: getattr(share, f.name) for f in fields(share)}
