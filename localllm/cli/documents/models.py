"""Documents of the commands about models."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from localllm.quality.evaluate import Quality

from .words import Count, Fix


class Fits(TypedDict):
    ok: bool
    max_ctx: Count


class Speed(TypedDict):
    tps: float
    basis: Literal["estimate", "measured"]


class ModelRow(TypedDict):
    id: str
    revision: str | None
    format: Literal["gguf", "safetensors"]
    dtype: str | None
    architecture: str | None
    params: Count
    size_bytes: Count
    max_ctx: Count
    chat: bool
    supported: bool
    broken: bool
    reason: str | None
    fits: Fits
    speed: Speed | None
    last_used: str | None
    source: Literal["hub", "index", "folder", "ollama", "lmstudio", "llama.cpp", "hf"]
    path: str


class Ls(TypedDict):
    """Output of `localllm ls --json`."""

    cache: str
    free_bytes: Count
    packed_bytes: Count
    models: list[ModelRow]


class RepoFile(TypedDict):
    name: str
    size: Count
    will_download: bool


class Pulled(TypedDict):
    name: str
    repo: NotRequired[str]
    source: NotRequired[Literal["path", "hub", "index", "foreign"]]
    revision: NotRequired[str | None]
    quant: NotRequired[str | None]
    licence: NotRequired[str | None]
    bytes: NotRequired[Count]
    download_bytes: NotRequired[Count]
    seconds: NotRequired[float]
    path: str | None
    fits: NotRequired[bool | None]
    chat: NotRequired[bool | None]
    files: NotRequired[list[RepoFile]]
    checked: NotRequired[Count]
    repaired: NotRequired[list[str]]


class Pull(Pulled):
    """Output of `localllm pull --json`: the first model's fields, and all of them in `models`."""

    models: list[Pulled]


class Rm(TypedDict):
    """Output of `localllm rm --json`."""

    removed: bool
    models: list[str]
    bytes: Count
    paths: list[str]


class Fit(TypedDict):
    fits: bool


class Capabilities(TypedDict):
    chat: bool
    tools: str
    thinking: bool
    vision: bool


class Show(TypedDict):
    """Output of `localllm show --json`."""

    id: str
    path: str
    format: Literal["gguf", "safetensors"]
    stored_format: str
    architecture: str
    source_architecture: str
    name: str
    params: Count
    size_bytes: Count
    max_ctx: Count
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab: Count
    kv_bytes_per_token: Count
    kv_fixed_bytes: Count
    template: bool
    licence: str | None
    drafter: str | None
    revision: str | None
    sampling_defaults: dict[str, Any]
    sampling_sources: dict[str, str]
    tensors: Count
    files: list[str]
    plan: Fit
    capabilities: Capabilities


class Template(TypedDict):
    """Output of `localllm show MODEL --template --json`."""

    id: str
    template: str


class Quantize(TypedDict):
    """Output of `localllm quantize --json`."""

    path: str
    source: str
    target: str
    group_size: int
    bytes_before: int
    bytes_after: int
    quantised: int
    kept: list[dict[str, Any]]
    errors: dict[str, float]
    mean_error: float
    calibration_tokens: int
    seconds: float
    quality: list[Quality]


class Eval(TypedDict):
    """Output of `localllm eval --json`."""

    rows: list[Quality]


class DecodeSpeed(TypedDict):
    value: float
    at_full_ctx: float
    basis: Literal["estimate", "measured"]
    eta: NotRequired[float]


class HostExperts(TypedDict):
    host_experts: Count
    host_bytes: Count
    host_read_bytes: Count
    stream_rows: Count


class Rank(TypedDict):
    """The memory of one of several GPUs."""

    device: str
    weight_bytes: Count
    kv_bytes: Count
    work_bytes: Count
    margin_bytes: Count
    have_bytes: Count
    span: list[Count]


class PlanRow(TypedDict):
    model: str
    quant: str
    device: NotRequired[str]
    ctx: int | str
    kv: NotRequired[str]
    batch: NotRequired[Count]
    need_bytes: NotRequired[Count]
    have_bytes: NotRequired[Count]
    parts: NotRequired[dict[str, Count]]
    fits: bool
    max_ctx: NotRequired[Count]
    decode_tps: NotRequired[DecodeSpeed]
    reason: str | None
    reasons: NotRequired[list[str]]
    terms: NotRequired[dict[str, Count]]
    converted: NotRequired[str | None]
    least_bytes: NotRequired[Count]
    pool_bytes: NotRequired[Count]
    host: NotRequired[HostExperts | None]
    ranks: NotRequired[list[Rank] | None]
    needs: NotRequired[str | None]
    prefill_tps: NotRequired[float]
    first_token_s: NotRequired[float]
    download_bytes: Count
    local: bool
    recommended: bool
    limit: NotRequired[Literal["memory"]]
    alternatives: list[Fix]
    quality: NotRequired[dict[str, Any] | None]


class Plan(TypedDict):
    """Output of `localllm plan --json`."""

    machine: dict[str, Any]
    rows: list[PlanRow]


class CatalogFile(TypedDict):
    spec: str
    format: str
    download_bytes: Count
    verified: bool


class CatalogPlan(TypedDict):
    device: str
    kv: str
    ctx: Count
    max_ctx: Count
    need_bytes: Count
    have_bytes: Count
    decode_tps: float
    prefill_tps: float
    basis: Literal["estimate", "measured"]


class CatalogModel(TypedDict):
    model: str
    family: str
    title: str
    params: Count
    active_params: Count
    context: Count
    architecture: str
    released: str | None
    license: str | None
    drafter: str | None
    gated: bool
    file: CatalogFile
    fits: bool
    reason: str | None
    recommended: bool
    plan: CatalogPlan | None


class Catalog(TypedDict):
    """Output of `localllm catalog --json`."""

    machine: dict[str, Any]
    models: list[CatalogModel]
