"""Model properties that the flags of other engines depend on: experts, recurrent layers, weight format, draft head.

They come from a local config.json or GGUF file, else from the catalog, else from the name; `known_from` says which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localllm import hub
from localllm.checkpoint import Checkpoint
from localllm.errors import LocalLLMError, ModelNotFound
from localllm.hub import catalog
from localllm.hub.names import parse_name, shown
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import ModelFacts, expert_counts, kept_bytes
from localllm.models.architectures.registry import understand
from localllm.paths import read_json

MAX_CONFIG_BYTES = 4 << 20
HYBRID = re.compile(
    r"Qwen3[._][568](?!B)|Qwen3[._-]?Next|Coder-Next|Nemotron-?(3|H)|LFM2|Granite-?4|Jamba|Falcon-?H1|Kimi-?Linear"
    r"|Ling-?3|GLM-5\.3-Flash",
    re.I,
)
MTP = re.compile(r"Qwen3\.[568]|Qwen3-(Coder-)?Next|GLM-(4\.[5-9]|5)|Ling-?3(\.0)?-flash|MTP", re.I)
EXPERTS = re.compile(
    r"(^|[-_.])A\d+(\.\d+)?B\b|MoE|\d+x\d+B|gpt-oss|GLM-4\.\d|GLM-5|DeepSeek-(V\d|R1(?!-Distill))|Next-80B|Coder-Next"
    r"|Flash-Next|Scout|Maverick|Kimi|Ling-?3",
    re.I,
)
# regular expression on the name -> format; the first match counts
FORMATS: tuple[tuple[str, str], ...] = (
    (r"GGUF|:I?Q\d|\.gguf", "gguf"),
    (r"NVFP4", "nvfp4"),
    (r"MXFP4|gpt-oss", "mxfp4"),
    (r"FP8", "fp8"),
    (r"AWQ|GPTQ|int4|w4a16|AutoRound|4-?bit", "int4"),
)


# Regular expression on the name -> quant_method; the first match counts. Several tools write the same format.
METHODS: tuple[tuple[str, str], ...] = (
    (r"GGUF|:I?Q\d|\.gguf", "gguf"),
    (r"gpt-oss|MXFP4", "mxfp4"),
    (r"AutoRound", "auto-round"),
    (r"GPTQ", "gptq"),
    (r"^(nvidia|Inferact|RadixArk)/.*(NVFP4|FP8|FP4)", "modelopt"),
    (
        r"^(RedHatAI|unsloth|cyankiwi|neuralmagic)/.*(NVFP4|FP8|W4A16|INT4|AWQ)|w4a16|-ct$|FP8-dynamic",
        "compressed-tensors",
    ),
    (r"AWQ", "awq"),
    (r"NVFP4|int4|4-?bit", ""),
    (r"FP8", "fp8"),
)


@dataclass(frozen=True, slots=True)
class ModelKind:
    """The properties of one model."""

    name: str  # as passed to the engine
    kind: str  # dense | moe
    format: str  # bf16, fp8, nvfp4, mxfp4, int8, int4 (AWQ, GPTQ, AutoRound, W4A16) or gguf
    hybrid: bool = False  # has recurrent layers
    mtp: bool = False  # has a draft head
    size_bytes: int = 0  # 0 when not known
    context: int = 0  # maximum context in tokens; 0 when not known
    known_from: str = "its name"
    method: str = ""  # quant_method of config.json; gguf; none for unquantized weights; "" when not known
    kv_per_token: int = 0  # KV cache bytes per token in 16 bits; 0 when not known
    kv_fixed: int = 0  # bytes of state per sequence, at any length
    active_share: float = 1.0  # fraction of the weights read per token

    @property
    def words(self) -> str:
        formats = {"int4": "W4A16", "gguf": "GGUF"}
        parts = [
            "mixture of experts" if self.kind == "moe" else "dense", formats.get(self.format, self.format.upper()),
            *(["recurrent layers"] if self.hybrid else []), *(["draft head"] if self.mtp else []),
        ]  # fmt: skip
        known = {"none": "", "gguf": "", "": ""}.get(self.method, f" ({self.method})")
        return ", ".join([parts[0], parts[1] + known, *parts[2:]])


def model_kind(name: str) -> ModelKind:
    """The properties of a model given by path, local name, catalog name or any hub name."""
    config = _config(name)
    if config is not None:
        return _from_config(name, *config)
    entry = next((c for c in catalog.candidates() if name.casefold() in (c.spec.casefold(), c.name.casefold())), None)
    if entry is not None:
        return from_catalog(entry)
    path = Path(name).expanduser()
    return _from_gguf(name, path) if path.suffix == ".gguf" and path.is_file() else _from_name(name)


def from_catalog(entry: catalog.Candidate) -> ModelKind:
    """The properties of a catalog entry."""
    by_name = _from_name(entry.spec)
    stored = entry.format.casefold()
    exact = next((one for one in ("nvfp4", "mxfp4", "fp8", "bf16") if one in stored), "int4")
    return ModelKind(
        name=entry.spec,
        kind="moe"
        if 2 * entry.active_params < entry.params
        else "dense",  # dense models also have unread embedding rows
        format="gguf" if entry.quant else exact,
        hybrid=by_name.hybrid,
        mtp=entry.draft if entry.quant else by_name.mtp,
        size_bytes=entry.weight_bytes,
        context=entry.context,
        known_from="the catalog",
        method=entry.method,
        kv_per_token=entry.kv_bytes_per_token,
        kv_fixed=entry.kv_fixed_bytes,
        active_share=entry.active_params / entry.params,
    )


Suited = Callable[[Sequence[catalog.Candidate]], ModelKind | None]


def asked_for(name: str, gguf: bool, suited: Suited) -> ModelKind:
    """Resolve a name for an engine that reads GGUF files, or safetensors, to a model that the engine can open.

    A path stays. A local model becomes its repository or its file. A catalog name becomes the repository that
    `suited` picks, else the smallest. Raises ModelNotFound.
    """
    wanted = "GGUF" if gguf else "safetensors"
    here = [] if Path(name).expanduser().exists() else _here(name)
    of_kind = [found for found in here if found.path.is_file() is gguf]
    if of_kind:
        found = of_kind[0]
        return _from_gguf(name, found.path) if gguf else replace(model_kind(name), name=found.repo or str(found.path))
    pool = [c for c in catalog.members(name) if bool(c.quant) is gguf]
    if pool:
        return suited(pool) or from_catalog(min(pool, key=lambda c: c.download_bytes))
    starter = catalog.starters().get(name.casefold())
    if starter is not None and gguf:
        return replace(_from_name(f"{starter.repos[0]}:{starter.format}"), known_from="the catalog")
    if starter is not None or catalog.members(name) or here:
        other = "--for vllm" if gguf else "--for llama.cpp"
        raise ModelNotFound(f"the catalog has no {wanted} files of {name}", f"localllm doctor {other} {name}")
    if "/" not in name and not Path(name).expanduser().exists():
        raise ModelNotFound(
            f"{shown(name)!r} is not a local file, a catalog name or a repository", "use a name like org/repository"
        )
    return model_kind(name)


def _here(name: str) -> list[hub.LocalModel]:
    """The local models with exactly that name."""
    try:
        return hub.local.find(parse_name(name))
    except LocalLLMError:
        return []


def _from_gguf(name: str, path: Path) -> ModelKind:
    """The properties of a local GGUF file, from its header or else from its name."""
    kind = replace(_from_name(name), name=str(path), format="gguf", method="gguf", size_bytes=path.stat().st_size)
    try:
        with open_model(path, "off") as checkpoint:
            facts = checkpoint.facts
    except LocalLLMError:
        return kind
    kept, fixed = kept_bytes(facts, "bf16")
    return replace(
        kind, kind="moe" if expert_counts(facts)[0] else "dense", hybrid=facts.state_bytes > 0,
        mtp=facts.extra_layers > 0, size_bytes=facts.weight_bytes, context=facts.max_context,
        kv_per_token=kept, kv_fixed=fixed, active_share=facts.active_share, known_from="its file",
    )  # fmt: skip


def _from_name(name: str) -> ModelKind:
    stored = next((kind for pattern, kind in FORMATS if re.search(pattern, name, re.IGNORECASE)), "bf16")
    return ModelKind(
        name=name,
        kind="moe" if EXPERTS.search(name) else "dense",
        format=stored,
        hybrid=bool(HYBRID.search(name)),
        mtp=bool(MTP.search(name)) and (stored != "gguf" or "mtp" in name.casefold()),
        size_bytes=_size_of(name, stored),
        method=next((how for pattern, how in METHODS if re.search(pattern, name, re.IGNORECASE)), "none"),
    )


def _size_of(name: str, stored: str) -> int:
    """Approximate size in bytes, from the number of parameters in the name; 0 without one."""
    counts = [float(found) for found in re.findall(r"(?<![\dA-Za-z.])(\d+(?:\.\d+)?)B\b", name, re.IGNORECASE)]
    bits = {"bf16": 16, "fp8": 8.5, "gguf": 4.8}.get(stored, 4.8)
    return int(max(counts, default=0.0) * 1e9 * bits / 8)


def _config(name: str) -> tuple[Path, dict[str, Any]] | None:
    """The folder and config.json of a local model; None for GGUF files and unknown names."""
    path = Path(name).expanduser()
    folders = [path] if path.is_dir() else [found.path for found in _here(name) if found.path.is_dir()]
    values = read_json(folders[0] / "config.json", MAX_CONFIG_BYTES) if folders else {}
    return (folders[0], values) if values else None


def _from_config(name: str, folder: Path, config: dict[str, Any]) -> ModelKind:
    inner = config.get("text_config")
    text = config | inner if isinstance(inner, dict) else config
    by_name = _from_name(" ".join([name, *map(str, _list(config.get("architectures")))]))
    experts = any(_number(text.get(key)) > 1 for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    layers = {str(kind) for kind in _list(text.get("layer_types"))}
    recurrent = any("linear" in kind or "mamba" in kind or "conv" in kind for kind in layers)
    draft = any(_number(text.get(key)) > 0 for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"))
    facts = _understood(folder, config)
    kept, fixed = (_kv(text), 0) if facts is None else kept_bytes(facts, "bf16")
    return ModelKind(
        name=name,
        kind="moe" if experts else "dense",
        format=_stored(config.get("quantization_config") or text.get("quantization_config")),
        hybrid=recurrent or (not layers and by_name.hybrid) if facts is None else facts.state_bytes > 0,
        mtp=draft,
        size_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        context=int(_number(text.get("max_position_embeddings"))) if facts is None else facts.max_context,
        known_from="its config.json",
        method=_method(config.get("quantization_config") or text.get("quantization_config")),
        kv_per_token=kept,
        kv_fixed=fixed,
    )


def _understood(folder: Path, config: dict[str, Any]) -> ModelFacts | None:
    """The facts in config.json; None for an architecture that this version does not know."""
    try:
        return understand(Checkpoint(folder, "safetensors", {}, {}, config=config))[0]
    except LocalLLMError:
        return None


def _stored(config: Any) -> str:
    if not isinstance(config, dict):
        return "bf16"
    method = str(config.get("quant_method", "")).lower()
    words = json.dumps(config).lower()
    if "mxfp4" in words:
        return "mxfp4"
    if "nvfp4" in words:
        return "nvfp4"
    if method == "fp8" or "float-quantized" in words or '"fp8"' in words:
        return "fp8"
    if method not in ("awq", "gptq", "auto-round", "compressed-tensors", "modelopt"):
        return "bf16"
    return "int8" if set(re.findall(r'"(?:num_bits|bits|w_bit)": (\d+)', words)) == {"8"} else "int4"


def _method(config: Any) -> str:
    return str(config.get("quant_method", "")).lower() if isinstance(config, dict) else "none"


def _kv(text: Mapping[str, Any]) -> int:
    """KV bytes per token in 16 bits, for the layers with full attention."""
    kinds = [str(kind) for kind in _list(text.get("layer_types"))]
    layers = sum("full" in kind for kind in kinds) if kinds else _number(text.get("num_hidden_layers"))
    heads = _number(text.get("num_attention_heads")) or 1
    size = _number(text.get("head_dim")) or _number(text.get("hidden_size")) / heads
    return int(4 * layers * (_number(text.get("num_key_value_heads")) or heads) * size)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0
