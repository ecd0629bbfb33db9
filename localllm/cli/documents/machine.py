"""Documents of the commands about this machine, and of failures."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from .words import CheckId, Count, ErrorCode, Fix, RuleId, Variable, Words


class ErrorDetail(TypedDict):
    code: ErrorCode
    exit: int
    message: Words
    why: str
    hint: str
    fixes: list[Fix]
    context: dict[str, Any]
    docs: str


class Error(TypedDict):
    """Output of a command with --json when it fails."""

    error: ErrorDetail


class Setting(TypedDict):
    value: Any
    origin: str


class SettingKey(TypedDict):
    key: str
    default: Any
    takes: str
    meaning: str
    env: Variable


class Config(TypedDict):
    """Output of `localllm config --json`."""

    file: NotRequired[str]
    settings: NotRequired[dict[str, Setting]]
    key: NotRequired[str]
    action: NotRequired[Literal["set", "unset", "path", "schema", "edit"]]
    keys: NotRequired[list[SettingKey]]


class KnownCheck(TypedDict):
    id: str
    group: Literal["hardware", "software", "storage", "terminal"]


class Checks(TypedDict):
    """Output of `localllm doctor --list --json`."""

    checks: list[KnownCheck]


class CheckFix(TypedDict):
    cmd: Words
    needs_root: bool
    safe: bool


class CheckResult(TypedDict):
    id: CheckId
    group: Literal["hardware", "software", "storage", "terminal", "model"]
    status: Literal["ok", "warn", "fail", "skip"]
    title: Words
    detail: str
    fix: CheckFix | None
    data: dict[str, Any]
    ms: float


class Advice(TypedDict):
    id: str
    text: Words
    cmd: str


class KnownRule(TypedDict):
    id: RuleId
    title: str
    confidence: Literal["A", "B", "C"]


class Doctor(TypedDict):
    """Output of `localllm doctor --json`."""

    checks: list[CheckResult]
    summary: dict[str, Count]
    advice: list[Advice]
    machine: dict[str, Any]
    rules: list[KnownRule]
    host: dict[str, Any]


class LogFix(TypedDict):
    do: Words
    why: str
    engine: str | None
    root: bool
    confirmed: bool


class LogMatch(TypedDict):
    id: RuleId
    title: str
    cause: str
    versions: str
    confidence: Literal["A", "B", "C"]
    applies: bool
    doubts: list[str]
    line: int | None
    excerpt: str | None
    sources: list[str]
    fixes: list[LogFix]


class Diagnosis(TypedDict):
    """Output of `localllm doctor --log FILE --json`."""

    source: str
    matches: list[LogMatch]


class LaunchModel(TypedDict):
    name: str
    kind: Literal["dense", "moe"]
    format: Literal["bf16", "fp8", "nvfp4", "mxfp4", "int4", "gguf"]
    method: str
    hybrid: bool
    mtp: bool
    known_from: str


class LaunchRecipe(TypedDict):
    """A command that has been run for this model on these GPUs."""

    model: str
    card: str
    gpus: int
    version: str
    date: str
    source: str


class LaunchMemory(TypedDict):
    have_bytes: int
    need_bytes: int
    ctx: int
    in_ram: int


class LaunchPiece(TypedDict):
    text: Words
    why: str
    confidence: Literal["A", "B", "C"]
    source: str | None


class LaunchHeard(TypedDict):
    claim: str
    truth: str
    source: str


class LaunchRule(TypedDict):
    id: str
    title: str


class Launch(TypedDict):
    """Output of `localllm doctor --for ENGINE --json`."""

    engine: str
    engine_version: NotRequired[str]
    device: str
    model: LaunchModel
    recipe: LaunchRecipe | None
    memory: LaunchMemory | None
    notes: list[str]
    shell: list[str]
    command: str
    env: list[LaunchPiece]
    flags: list[LaunchPiece]
    build: NotRequired[list[LaunchPiece]]
    file: NotRequired[str | None]
    unconfirmed: list[LaunchPiece]
    heard: list[LaunchHeard]
    rules: list[LaunchRule]


class RepairStep(TypedDict):
    check: str
    title: str
    command: Words
    kind: Literal["setting", "command", "root", "shell", "step"]


class RepairDone(TypedDict):
    check: str
    command: str
    code: int


class Repair(TypedDict):
    """Output of `localllm doctor --apply --json`."""

    dry_run: bool
    actions: list[RepairStep]
    diff: list[str]
    done: list[RepairDone]


class Kernel(TypedDict):
    op: Annotated[str, Field(description="op and shape class")]
    capability: int
    impl: str
    reason: Annotated[str, Field(description="why no kernel, or why not an earlier one; else empty")]
    shared_bytes: int
    registers: int
    spill_bytes: int
    mma: Annotated[str, Field(description="matrix instructions in the PTX")]


class Kernels(TypedDict):
    """Output of `localllm doctor --kernels --json`."""

    capability: NotRequired[Annotated[int, Field(description="compute capability, such as 90; 0 for this CPU")]]
    kernels: list[Kernel]


class TunedShape(TypedDict):
    op: str
    key: list[int | str]
    tile: dict[str, int]
    us: Annotated[float, Field(description="microseconds per launch with the fastest tile")]
    first_us: Annotated[float, Field(description="microseconds per launch with the default tile")]
    failed: list[str]


class Tune(TypedDict):
    """Output of `localllm tune --json`."""

    device: str
    seconds: float
    waiting: Annotated[int, Field(description="shapes not timed yet")]
    tuned: list[TunedShape]
