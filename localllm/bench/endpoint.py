"""Client that times one streamed completion of an OpenAI-compatible endpoint."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from localllm.errors import ConfigError, LocalLLMError

from .results import peak_rss_bytes

TIMEOUT_S = 600.0  # long enough for a request that waits behind others
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
# fields that some servers reject; after a rejected request, they are dropped one by one
OPTIONAL = ("ignore_eos", "stream_options")


@dataclass(frozen=True, slots=True)
class Sample:
    """Timings and token counts of one request."""

    ttft_s: float
    total_s: float
    prompt_tokens: int  # 0 if the server does not report it
    output_tokens: int

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.output_tokens - 1)


class Endpoint:
    """An OpenAI-compatible server. Thread-safe. Raises ConfigError if it does not answer or serves no model."""

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None) -> None:
        self.base = url.rstrip("/").removesuffix("/v1")
        self.name = urlsplit(self.base).netloc or self.base
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))
        self._left_out: set[str] = set()
        try:
            found = self._client.get(f"{self.base}/v1/models").raise_for_status().json()
            self.models = [str(entry["id"]) for entry in found["data"]]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.base} does not answer /v1/models: {error}", "give the address of an OpenAI-compatible server"
            ) from error
        if not self.models and model is None:
            raise ConfigError(f"{self.base} serves no model", "load one there first")
        self.model = model or self.models[0]

    def close(self) -> None:
        self._client.close()

    def ask(self, prompt: str, count: int) -> Sample:
        """Run one streamed completion of `count` tokens. Raises LocalLLMError if it fails."""
        while True:
            try:
                return self._ask(prompt, count)
            except httpx.HTTPStatusError as error:
                unknown = next((field for field in OPTIONAL if field not in self._left_out), None)
                if error.response.status_code not in (400, 422) or unknown is None:
                    raise self._failed(f"status {error.response.status_code}") from error
                self._left_out.add(unknown)
            except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise self._failed(f"{type(error).__name__}: {error}") from error

    def peak_rss_bytes(self) -> int:
        """Sum of the peak resident memory of the server's processes; 0 if they are not visible from here.

        Child processes count too, because in some servers one of them does the computing.
        """
        import psutil

        address = urlsplit(self.base)
        if address.hostname not in LOCAL_HOSTS:
            return 0
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            sockets = psutil.net_connections(kind="tcp")
        except psutil.Error:
            return 0
        listening = {s.pid for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr.port == port and s.pid}
        family = set(listening)
        for pid in listening:
            with contextlib.suppress(psutil.Error):
                family |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        return sum(peak_rss_bytes(pid) for pid in family)

    def versions(self) -> dict[str, str]:
        """The version that the server reports; {} if it reports none."""
        try:
            said = self._client.get(f"{self.base}/version", timeout=2).json().get("version")
        except (httpx.HTTPError, ValueError, AttributeError):
            return {}
        return {"version": str(said)[:80]} if said else {}

    def _failed(self, why: str) -> LocalLLMError:
        return LocalLLMError(f"{self.base}: a completion failed ({why})", "see the server's log")

    def _ask(self, prompt: str, count: int) -> Sample:
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": count, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        body = {name: value for name, value in body.items() if name not in self._left_out}
        started = time.monotonic()
        first = 0.0
        chunks = 0
        usage: dict[str, Any] = {}
        with self._client.stream("POST", f"{self.base}/v1/completions", json=body) as response:
            if response.is_error:
                response.read()
            response.raise_for_status()
            for event in _events(response):
                if "error" in event:
                    raise ValueError(str(event["error"]))
                usage = event.get("usage") or usage
                if any(choice.get("text") for choice in event.get("choices", ())):
                    first = first or time.monotonic()
                    chunks += 1
        ended = time.monotonic()
        if not first:
            raise ValueError("no text received")
        tokens = int(usage.get("completion_tokens") or chunks)
        return Sample(first - started, ended - started, int(usage.get("prompt_tokens") or 0), tokens)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data and data != "[DONE]":
            yield json.loads(data)
