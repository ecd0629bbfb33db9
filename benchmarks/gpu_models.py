"""Random-weight models, created on the device: `gpu.py` needs no download. The shapes are Qwen3's and the catalog's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_place import Place
from torch import Tensor

from localllm.checkpoint import Checkpoint
from localllm.hub import catalog
from localllm.kernels import Weight
from localllm.kernels.layer_weights import ExpertsWeights, Norm
from localllm.kernels.registry import SEGMENTS
from localllm.kernels.segments import KernelTable
from localllm.kernels.table import implementations, kernel_table
from localllm.kernels.verify.selftest import SelfTest
from localllm.models.architectures.facts import (
    ModelFacts,
    count_linear_params,
    count_params,
    kv_bytes_per_token,
    linear_shapes,
    vector_shapes,
)
from localllm.models.architectures.layers import STAY_STORED, Dense, DFlash, Eagle3, Experts, Fusion, LayerFacts, Paired
from localllm.models.architectures.mixers import Attention, RopeFacts
from localllm.models.architectures.names import NameMap
from localllm.models.architectures.registry import understand
from localllm.models.architectures.sharding import Shard
from localllm.models.dflash import DFlashModel, read_dflash
from localllm.models.eagle3 import Eagle3Model, read_eagle3
from localllm.models.loader import Loading, LoadOptions
from localllm.models.model import Model

VOCAB = 151_936
SIZES: dict[str, tuple[int, int, int, int, int, bool]] = {
    # hidden, intermediate, layers, heads, KV heads, whether head and embedding are tied
    "tiny": (32, 32, 1, 1, 1, True),  # for a rehearsal
    "tiny mixture": (32, 32, 1, 1, 1, True),
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
    "30B-A3B": (2048, 768, 48, 32, 4, False),
}
MIXTURES = {"30B-A3B": (128, 8), "tiny mixture": (4, 2)}  # experts per layer and per token
# models of the catalog whose kernels Qwen3 does not use, with weight and KV format; the most used first
FAMILIES = (
    ("qwen3.5-27b", "int4", "fp8"),  # gated delta rule, gated attention, MTP head
    ("gpt-oss-20b", "mxfp4", "bf16"),  # sinks, biases, windows
    ("qwen3.5-35b-a3b", "nvfp4", "fp8"),  # gated delta rule beside experts
    ("gemma4-26b-a4b", "int4", "fp8"),  # heads of 512, experts of 704
    ("glm4.7-flash", "int4", "bf16"),  # latent attention
    ("nemotron3.5-30b-a3b", "nvfp4", "fp8"),  # Mamba-2
    ("gemma4-e2b", "int4", "fp8"),  # per-layer inputs, shared keys and values
    ("lfm2.5-8b-a1b", "bf16", "bf16"),  # short convolutions
    ("granite4-h-tiny", "bf16", "bf16"),  # Mamba-2 beside experts
    ("llama4-scout", "int4", "fp8"),  # chunked attention
    ("north-mini-code", "int4", "fp8"),  # LayerNorms, parallel layers
    ("ling3-tiny", "bf16", "bf16"),  # Kimi delta rule
    ("glm5.3-flash", "int4", "bf16"),  # sparse latent attention, mixed streams
    ("deepseek-v4-flash", "mxfp4", "bf16"),  # compressed attention
)
HEADED = "qwen3.5-27b"  # measured with its MTP head, which the catalog's description leaves out
# a model of the catalog in other sizes, for a rehearsal
TINY = {
    "tiny-hybrid": (
        HEADED,
        {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 32,
            "num_attention_heads": 1, "num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 1,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}  # fmt: skip
# format of the linear layers -> bytes per weight; head and embedding are always bfloat16
FORMATS = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 2 / 128, "nvfp4": 0.5 + 1 / 16}
MIXED_FORMATS = {"mxfp4": 0.5 + 1 / 32}  # of experts; all other modules are bfloat16
STD, VECTOR_STD = 0.02, 0.3
INT4_GROUP = 128
GATES = ("linear_attn.in_proj_a", "linear_attn.in_proj_b")  # checkpoints keep these small modules in 16 bits


def vocab_size(size: str) -> int:
    """Number of embedding rows."""
    return VOCAB if "tiny" not in size else 32


def head_dim(size: str) -> int:
    """Head dimension of queries, keys and values."""
    return 128 if "tiny" not in size else 32


def facts_of(size: str, form: str, num_layers: int | None = None) -> ModelFacts:
    """Facts of a Qwen3 or a model of the catalog, as read from a checkpoint of that format.

    num_layers  number of layers to keep; 0: at least two, and as few as have one of each kind; None: all
    """
    facts = _qwen3(size, form) if size in SIZES else _of_catalog(size, form)
    if num_layers == 0:
        num_layers = max(2, 1 + max(facts.layers.index(kind) for kind, _ in facts.kinds))
    facts = replace(facts, layers=facts.layers[:num_layers])
    params, inside = count_params(facts), count_linear_params(facts)
    each = FORMATS | MIXED_FORMATS
    return replace(facts, num_params=params, weight_bytes=int((params - inside) * 2 + inside * each[form]))


def _qwen3(size: str, form: str) -> ModelFacts:
    hidden, inner, layers, heads, kv_heads, tied = SIZES[size]
    dim = head_dim(size)
    attention = Attention(heads, kv_heads, dim, RopeFacts(1e6, dim), dim**-0.5, qk_norm=True)
    ffn = Experts(*MIXTURES[size], inner) if size in MIXTURES else Dense(inner)
    return ModelFacts(
        architecture="qwen3",
        source_architecture="Qwen3ForCausalLM",
        name=f"Qwen3-{size}-{form}",
        hidden_size=hidden,
        vocab_size=vocab_size(size),
        max_context=40_960,
        rms_norm_eps=1e-6,
        layers=(LayerFacts(attention, ffn),) * layers,
        tied_embeddings=tied,
        stored_format={"int4": "compressed-tensors"}.get(form, form),
    )


def _of_catalog(name: str, form: str) -> ModelFacts:
    known, changes = TINY.get(name, (name, {}))
    config = next(one.config for one in catalog.candidates() if one.name == known and one.config)
    described = Checkpoint(Path(known), "safetensors", {}, {}, config=json.loads(config) | changes)
    facts = replace(understand(described)[0], name=f"{name}-{form}", stored_format=form)
    if known != HEADED:
        return facts
    layer = next(one for one in facts.layers if isinstance(one.mixer, Attention))
    head = replace(layer, fusion=Fusion())
    size = sum(n * k for n, k in linear_shapes(head, facts.hidden_size).values())
    return replace(facts, predictor=head, extra_layers=1, predictor_bytes=int(size * FORMATS[form]))


def random_weight(form: str, shape: tuple[int, int], device: torch.device) -> Weight:
    """Return a canonical weight with values of standard deviation about STD."""
    n, k = shape
    if form == "bf16":
        return Weight("dense", shape, (torch.randn(n, k, device=device, dtype=torch.float32) * STD).bfloat16())
    if form == "fp8":
        codes = (torch.randn(n, k, device=device) * 16).to(torch.float8_e4m3fn)
        return Weight("fp8", shape, codes, torch.full((n, 1), STD / 16, device=device))
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    if form == "int4":
        group = next((group for group in (INT4_GROUP, 64) if k % group == 0), min(32, k))
        scales = torch.full((n, k // group), STD / 4.6, device=device, dtype=torch.bfloat16)
        return Weight("int4g", shape, packed, scales, group_size=group)
    if form == "nvfp4":
        scales = torch.rand(n, k // 16, device=device).add_(0.5).to(torch.float8_e4m3fn)
        world = torch.full((n,), STD / 2.9, device=device)
        return Weight("fp4g16", shape, packed, scales, global_scale=world, group_size=16)
    if form == "mxfp4":
        scales = torch.randint(117, 123, (n, k // 32), dtype=torch.uint8, device=device)
        return Weight("fp4g32", shape, packed, scales, group_size=32)
    raise ValueError(f"no random weights of format {form}")


class _Names(NameMap):
    """Canonical names."""

    def source(self, module: str) -> str:
        """The module itself."""
        return module


class _NoFile:
    """Stand-in for the checkpoint that a load reads."""

    def __init__(self, facts: ModelFacts) -> None:
        self.path = Path(facts.name)
        self.kind = "safetensors"
        self.tensors: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.quantization_config: dict[str, Any] = {}
        self.metadata: dict[str, Any] = {}
        self.nbytes = 0
        self.names = _Names(top={}, layer="model.layers.{}.", inner={})

    def maps(self, address: int) -> bool:
        """Nothing is mapped."""
        return False


class RandomLoading(Loading):
    """A load with random weights instead of a file's."""

    def __init__(self, facts: ModelFacts, form: str, options: LoadOptions) -> None:
        super().__init__(_NoFile(facts), Shard(facts), options)  # type: ignore[arg-type]
        self._form = form

    def weight(
        self, name: str, shape: tuple[int, int], device: torch.device | None = None, order: Tensor | None = None
    ) -> Weight:
        """Return a weight: layers in the format, all other modules in bfloat16; `order` is ignored."""
        kept = ".layers." not in name or name.endswith((*STAY_STORED, *GATES))
        kept |= self._form in MIXED_FORMATS and ".experts." not in name
        return random_weight("bf16" if kept else self._form, shape, device or self.device)

    def stored(
        self,
        name: str,
        shape: tuple[int, int],
        device: torch.device | None = None,
        order: Tensor | None = None,
        *,
        encodes: bool = False,
    ) -> Weight:
        """As `weight`."""
        return self.weight(name, shape, device)

    def bias(
        self, name: str, size: int, device: torch.device | None = None, order: Tensor | None = None
    ) -> Tensor | None:
        """Return small numbers if the layer has such a bias."""
        index, _, module = name.removeprefix("model.layers.").partition(".")
        if not index.isdigit():
            return None
        layer = self.facts.keeping_layers[int(index)]
        if f"{module}.bias" not in vector_shapes(layer, self.facts.hidden_size):
            return None
        return torch.randn(size, device=device or self.device) * STD

    def norm(self, name: str, size: int, *, has_offset: bool = True) -> Norm:
        """Ones; zeros as the bias of a LayerNorm."""
        kind, weight = self.facts.layers[0].norms, torch.ones(size, device=self.device)
        bias = torch.zeros_like(weight) if kind.bias or kind.centred else None
        groups = kind.groups if size == self.facts.hidden_size else 1
        return Norm(weight, self.facts.rms_norm_eps, bias, groups)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Random numbers."""
        return torch.randn(shape, device=self.device) * VECTOR_STD

    def numbers(self, name: str, shape: tuple[int, ...], end: int) -> Tensor:
        """Random integers."""
        return torch.randint(0, end, shape, device=self.device)

    def vector(self, stored: str, size: int) -> Tensor:
        """Ones: scales of layers."""
        return torch.ones(size)


def load(
    facts: ModelFacts,
    form: str,
    kv: str,
    place: Place,
    *,
    deterministic: bool = False,
    selftest: SelfTest | None = None,
) -> Model:
    """Create a model on the GPU, with its MTP head."""
    torch.manual_seed(0)
    head = facts.predictor is not None
    options = LoadOptions(
        place.device, place.dtype, kv, deterministic=deterministic, selftest=selftest, predictor=head
    )  # fmt: skip
    return RandomLoading(facts, form, options).model()


def table_apart(facts: ModelFacts, kv: str, place: Place) -> KernelTable:
    """The kernel table that is used if every segment whose products do more fails its self-test."""
    ops = RandomLoading(facts, "bf16", LoadOptions(place.device, place.dtype, kv)).op_facts()
    return kernel_table(ops, frozenset(f"{name}:triton" for name in SEGMENTS if _may_be_apart(name)))


def _may_be_apart(segment: str) -> bool:
    return any(impl.name == "triton_apart" for impl in implementations(segment))


def drafters_of(facts: ModelFacts) -> tuple[ModelFacts, ModelFacts]:
    """Facts of a DFlash drafter of two layers, the second with a window, and of an EAGLE-3 drafter."""
    attention = facts.layers[0].mixer
    assert isinstance(attention, Attention)
    full = LayerFacts(replace(attention, kv_apart=True), Dense(facts.intermediate_size))
    windowed = replace(full, mixer=replace(attention, kv_apart=True, window=64))
    taps = tuple(sorted({0, max(0, facts.num_layers - 2)}))
    block = DFlash(taps, 16, facts.vocab_size - 1, (False, True), facts.hidden_size)
    paired = replace(full, mixer=replace(attention, paired=True), fusion=Paired())
    eagle3 = Eagle3(facts.hidden_size, tuple(tap + 1 for tap in taps))
    common = {"stored_format": "bf16"}
    return (
        replace(facts, name=f"{facts.name}-DFlash", layers=(full, windowed), dflash=block, **common),
        replace(facts, name=f"{facts.name}-EAGLE-3", layers=(paired,), eagle3=eagle3, **common),
    )


def load_drafter(
    facts: ModelFacts, kv: str, place: Place, target: Model, selftest: SelfTest
) -> DFlashModel | Eagle3Model:
    """Create a drafter whose products are batch-invariant; the facts of `target` include its layers."""
    options = LoadOptions(place.device, place.dtype, kv, deterministic=True, selftest=selftest)
    read = read_dflash if facts.dflash is not None else read_eagle3
    return read(RandomLoading(facts, "bf16", options), target)


def read_bytes(model: Model) -> int:
    """Bytes of weights that a decoding step reads: all except other embedding rows and unselected experts."""
    idle = 0.0
    for weights in (layer.ffn for layer in model.layers if isinstance(layer.ffn, ExpertsWeights)):
        others = 1 - weights.top_k / len(weights.down)
        idle += others * sum(one.nbytes for one in (*weights.gate_up, *weights.down))
    return sum(layer.nbytes for layer in model.layers) + model.head.linear.nbytes - int(idle)


def cache_bytes(facts: ModelFacts, kv: str, tokens: int) -> int:
    """Bytes of keys and values that a step after `tokens` reads, and of recurrent states that it reads and writes."""
    layers = zip(facts.layers, facts.windows, strict=True)
    kept = sum(kv_bytes_per_token([layer], kv) * min(tokens, window or tokens) for layer, window in layers)
    return kept + 2 * facts.state_bytes
