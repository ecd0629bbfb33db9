"""Documents of `run`, `logs` and the commands around a server."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from .words import Count


class TokenCounts(TypedDict):
    prompt: Count
    cached: Count
    completion: Count
    reasoning: Count


class Speeds(TypedDict):
    ttft_ms: float
    prefill_tps: float
    decode_tps: float
    total_s: float
    draft_tokens: Count
    accepted_tokens: Count


class RunTiming(Speeds):
    load_s: float


class ToolCall(TypedDict):
    name: str
    arguments: str
    result: str | None
    failed: bool


class Output(TypedDict):
    text: str
    reasoning: str
    tool_calls: list[ToolCall]
    stop: Literal["stop", "length", "abort", "error"]


class Params(TypedDict):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    max_tokens: int | None
    stop: list[str]
    ctx: Count


class Run(TypedDict):
    """Output of `localllm run --json`."""

    model: str
    revision: str | None
    quant: str | None
    device: str
    output: list[Output]
    usage: TokenCounts
    timing: RunTiming
    params: Params


class Event(TypedDict):
    t: Annotated[float, Field(ge=0, description="seconds since the start")]


class EventResolve(Event):
    event: Literal["resolve"]
    model: str


class EventDownload(Event):
    event: Literal["download"]
    done: Count
    total: Count
    rate: float
    eta_s: NotRequired[float]
    file: NotRequired[str]


class EventPaused(Event):
    event: Literal["paused"]
    done: Count
    total: Count


class EventLoad(Event):
    event: Literal["load"]
    phase: str
    done: Count
    total: Count


class EventReady(Event):
    event: Literal["ready"]
    detail: str
    device: NotRequired[str]
    ctx: NotRequired[int]


class EventPrefill(Event):
    event: Literal["prefill"]
    done: Count
    total: Count
    index: NotRequired[Count]


class EventToken(Event):
    event: Literal["token"]
    kind: Literal["content", "reasoning", "tool_call"]
    text: str
    index: Count


class EventToolResult(Event):
    event: Literal["tool_result"]
    id: str
    name: str
    arguments: str
    result: str
    failed: bool


class EventDone(Event):
    event: Literal["done"]
    stop: str
    usage: TokenCounts
    timing: Speeds
    index: Count


class EventNote(Event):
    event: Literal["note", "warning"]
    message: str


class EventError(Event):
    event: Literal["error"]
    code: str
    exit: Count
    message: str
    why: str
    hint: str
    fixes: list[dict[str, str]]
    docs: str
    context: dict[str, Any]


EventLine = (
    EventNote
    | EventError
    | EventResolve
    | EventDownload
    | EventPaused
    | EventLoad
    | EventReady
    | EventPrefill
    | EventToken
    | EventToolResult
    | EventDone
)


class ChatRow(TypedDict):
    id: str
    title: str
    model: str
    created: str
    updated: str
    messages: Count


class SearchHit(TypedDict):
    chat_id: str
    title: str
    role: Literal["user", "assistant", "system"]
    snippet: str
    created: str


class WholeChat(TypedDict):
    messages: list[dict[str, Any]]


class Logs(TypedDict):
    """Output of `localllm logs --json`."""

    chats: NotRequired[list[ChatRow]]
    query: NotRequired[str]
    hits: NotRequired[list[SearchHit]]
    chat: NotRequired[WholeChat]
    output: NotRequired[str]
    imported: NotRequired[Count]
    removed: NotRequired[list[str]]


class Batch(TypedDict):
    """Output of `localllm batch --json`."""

    output: str
    total: Count
    skipped: Count
    answered: Count
    failed: Count
    failed_before: NotRequired[Count]
    prompt_tokens: NotRequired[Count]
    completion_tokens: NotRequired[Count]
    seconds: float
    finished: NotRequired[Count]


class Connect(TypedDict):
    """Output of `localllm connect --json`."""

    apps: NotRequired[dict[str, str]]
    app: NotRequired[str]
    file: NotRequired[str | None]
    snippet: NotRequired[str]
    note: NotRequired[str | None]
    url: NotRequired[str]
    model: NotRequired[str]
    models: NotRequired[Annotated[list[str], Field(description="all that the server offers")]]


class Process(TypedDict):
    pid: Count
    kind: Literal["serve", "chat"]
    url: str | None
    up_s: float
    model: str
    state: str
    device: NotRequired[str]
    ctx: NotRequired[Count]
    parallel: NotRequired[Count]
    bytes: NotRequired[Count]
    running: NotRequired[Count]
    waiting: NotRequired[Count]
    users: NotRequired[Count]
    pinned: NotRequired[bool]
    expires_in_s: NotRequired[float | None]
    decode_tps: NotRequired[float | None]
    truth_line: NotRequired[str]
    warnings: NotRequired[list[str]]


class GpuProcess(TypedDict):
    gpu: Count
    pid: Count
    name: str
    bytes: Count


class Ps(TypedDict):
    """Output of `localllm ps --json`."""

    processes: list[Process]
    gpu_processes: list[GpuProcess]
    kv_store_bytes: Count


class Serve(TypedDict):
    """Output of `localllm serve --json`, when the server is ready."""

    url: Annotated[str, Field(description="http://HOST:PORT or unix:PATH")]
    pid: Count
    models: Annotated[list[str], Field(description="ids of the offered models")]


class Service(TypedDict):
    """Output of `localllm service --json`."""

    # waiting: the server starts on the first connection
    state: Literal["not installed", "waiting", "running"]
    kind: Literal["systemd", "process", None]
    url: str | None
    pid: int | None
    models: Annotated[list[str], Field(description="currently loaded")]
    units: Annotated[list[str], Field(description="systemd unit files")]


class StoppedServer(TypedDict):
    pid: Count
    url: str
    model: NotRequired[str]


class Stop(TypedDict):
    """Output of `localllm stop --json`."""

    stopped: list[StoppedServer]
    unloaded: list[StoppedServer]
