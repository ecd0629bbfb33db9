"""Batch runner for files in OpenAI's batch format, on the same application that serves HTTP.

Each result is appended to the output as soon as it is ready. A stopped batch can therefore continue: requests whose ids
are in the output are skipped, and an incomplete last line is removed.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import httpx
from pydantic import BaseModel, Field, StrictStr

from localllm.errors import ConfigError
from localllm.server.app import create_app
from localllm.server.body import checked
from localllm.server.errors import ApiError
from localllm.server.middleware import AppOptions
from localllm.server.service import Service

TIMEOUT_S = 24 * 3600.0


@dataclass(slots=True)
class BatchCounts:
    """Progress of a batch."""

    total: int = 0  # requests in the file
    skipped: int = 0  # answered by an earlier run
    failed_before: int = 0  # included in `skipped`: with an error
    done: int = 0
    failed: int = 0  # included in `done`: answered with an error
    prompt_tokens: int = 0
    completion_tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class BatchLine(BaseModel):
    """One request of the file."""

    custom_id: Annotated[StrictStr, Field(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    body: dict[str, Any]


def check(source: Path) -> list[str]:
    """Validate the file and return all request ids in order. Raises ConfigError at the first invalid line."""
    ids: dict[str, int] = {}
    for number, request in _requests(source):
        first = ids.setdefault(request.custom_id, number)
        if first != number:
            twice = f"{source}, line {number}: custom_id {request.custom_id!r:.80} is already used in line {first}"
            raise ConfigError(twice, "make every custom_id unique")
        if request.body.get("stream"):
            raise ConfigError(f"{source}, line {number}: body has stream: true", "remove stream")
    if not ids:
        line = '{"custom_id": "1", "method": "POST", "url": ...}'
        raise ConfigError(f"{source} contains no requests", f"write one request per line: {line}")
    return list(ids)


def _requests(source: Path) -> Iterator[tuple[int, BatchLine]]:
    try:
        with source.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield number, checked(json.loads(line), BatchLine)
                    except ApiError as error:
                        wrong = f"{source}, line {number}: {error.message.rstrip('.')}"
                        raise ConfigError(wrong, "write one request in OpenAI's batch format per line") from None
                    except (ValueError, RecursionError) as error:
                        wrong = f"{source}, line {number}: not JSON: {error}"
                        raise ConfigError(wrong, "write one JSON object per line") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{source} is not UTF-8 text", "save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}", "name a readable file") from None


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(f"another batch is writing to {path}", "wait for it, or choose another -o FILE") from None


class Output:
    """The output file, locked by one process, without an incomplete last line; `-` is stdout, which starts empty."""

    def __init__(self, path: Path, *, again: bool) -> None:
        """`again`: retry requests that ended in an error. Raises ConfigError."""
        self.path = path
        self.answered: set[str] = set()  # ids to skip
        self.failed: set[str] = set()  # those of them that were answered with an error
        if str(path) == "-":
            self._file: IO[bytes] = sys.stdout.buffer
            return
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a regular file", "choose another -o FILE; -o - is stdout")
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", "choose another -o FILE") from None
        try:
            _lock(self._file, path)
            self.answered = self._read(again)
        except BaseException:
            self._file.close()
            raise

    def _read(self, again: bool) -> set[str]:
        self._file.seek(0)
        kept: list[bytes] = []
        answered: set[str] = set()
        changed = False
        for line in self._file:
            try:
                row = json.loads(line)
                custom, ok = row["custom_id"], row["response"]["status_code"] == 200
            except (ValueError, KeyError, TypeError, RecursionError):
                custom, ok = None, False
            whole = line.endswith(b"\n")
            if whole and not isinstance(custom, str):
                raise ConfigError(f"{self.path} contains something other than answers", "choose another -o FILE")
            if not whole or (again and not ok):  # cut off by a kill, or to be retried
                changed = True
                continue
            kept.append(line)
            answered.add(str(custom))
            if not ok:
                self.failed.add(str(custom))
        if changed:
            self._replace(b"".join(kept))
        return answered

    def _replace(self, content: bytes) -> None:
        """Replace the content of the file atomically: a kill leaves the old or the new content."""
        partial = self.path.with_name(self.path.name + ".partial")
        new: IO[bytes] = partial.open("w+b")
        try:
            _lock(new, self.path)
            new.write(content)
            new.flush()
            os.fsync(new.fileno())
            os.replace(partial, self.path)
        except BaseException:
            new.close()
            raise
        self._file.close()
        self._file = new

    def write(self, row: dict[str, Any]) -> None:
        """Write one result and flush it to the file."""
        self._file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        if str(self.path) == "-":
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


async def run_batch(
    service: Service, source: Path, output: Output, counts: BatchCounts, on_change: Callable[[BatchCounts], None]
) -> None:
    """Run every request that has no result yet, several at a time.

    Requests that name no model use the service's default model.
    """
    transport = httpx.ASGITransport(app=create_app(service, AppOptions()), raise_app_exceptions=False)
    slots = asyncio.Semaphore(2 * service.options.parallel)

    async def one(client: httpx.AsyncClient, request: BatchLine) -> None:
        try:
            response = await client.post(request.url, json=request.body)
            _take(request, response, output, counts)
            on_change(counts)
        finally:
            slots.release()

    try:
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=TIMEOUT_S) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _, request in _requests(source):
                if request.custom_id not in output.answered:
                    await slots.acquire()
                    tasks.create_task(one(client, request))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def _take(request: BatchLine, response: httpx.Response, output: Output, counts: BatchCounts) -> None:
    body = response.json()
    ok = response.status_code == 200
    usage = body.get("usage") or {} if ok else {}
    counts.done += 1
    counts.failed += not ok
    counts.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
    counts.completion_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
    answer = {"status_code": response.status_code, "request_id": response.headers.get("x-request-id"), "body": body}
    error = None if ok else {"code": body["error"]["code"], "message": body["error"]["message"]}
    output.write(
        {
            "id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id, "response": answer,
            "error": error,
        }
    )  # fmt: skip
