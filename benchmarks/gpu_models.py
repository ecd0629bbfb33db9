"""Random-weight models in Qwen3's shapes, created on the device: `gpu.py` needs no download."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_place import Place
from torch import Tensor

from localllm.kernels import Weight
from localllm.kernels.layer_weights import ExpertsWeights, Norm
from localllm.kernels.verify.selftest import SelfTest
from localllm.models.architectures.facts import ModelFacts, count_linear_params, count_params, kv_bytes_per_token
from localllm.models.architectures.layers import Dense, DFlash, Eagle3, Experts, LayerFacts, Paired
from localllm.models.architectures.mixers import Attention, RopeFacts
from localllm.models.architectures.names import hf_names
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
# format of the linear layers -> bytes per weight; head and embedding are always bfloat16
FORMATS = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 2 / 128, "nvfp4": 0.5 + 1 / 16}
STD = 0.02
INT4_GROUP = 128


def vocab_size(size: str) -> int:
    """Number of embedding rows."""
    return VOCAB if "tiny" not in size else 32


def head_dim(size: str) -> int:
    """Head dimension of queries, keys and values."""
    return 128 if "tiny" not in size else 32


def facts_of(size: str, form: str, num_layers: int | None = None) -> ModelFacts:
    """Facts of a Qwen3, as read from a checkpoint of that format."""
    hidden, inner, layers, heads, kv_heads, tied = SIZES[size]
    dim = head_dim(size)
    attention = Attention(heads, kv_heads, dim, RopeFacts(1e6, dim), dim**-0.5, qk_norm=True)
    ffn = Experts(*MIXTURES[size], inner) if size in MIXTURES else Dense(inner)
    facts = ModelFacts(
        architecture="qwen3",
        source_architecture="Qwen3ForCausalLM",
        name=f"Qwen3-{size}-{form}",
        hidden_size=hidden,
        vocab_size=vocab_size(size),
        max_context=40_960,
        rms_norm_eps=1e-6,
        layers=(LayerFacts(attention, ffn),) * (num_layers or layers),
        tied_embeddings=tied,
        stored_format={"int4": "compressed-tensors"}.get(form, form),
    )
    params = count_params(facts)
    inside = count_linear_params(facts)
    return replace(facts, num_params=params, weight_bytes=int((params - inside) * 2 + inside * FORMATS[form]))


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
        group = min(INT4_GROUP, k)
        scales = torch.full((n, k // group), STD / 4.6, device=device, dtype=torch.bfloat16)
        return Weight("int4g", shape, packed, scales, group_size=group)
    if form == "nvfp4":
        scales = torch.rand(n, k // 16, device=device).add_(0.5).to(torch.float8_e4m3fn)
        world = torch.full((n,), STD / 2.9, device=device)
        return Weight("fp4g16", shape, packed, scales, global_scale=world, group_size=16)
    raise ValueError(f"no random weights of format {form}")


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
        names = hf_names(())
        self.names = replace(names, top={**names.top, "fc": "fc", "hidden_norm": "hidden_norm"})

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
        """Return a weight: layers in the format, embedding and head in bfloat16; `order` is ignored."""
        return random_weight(self._form if "layers" in name else "bf16", shape, device or self.device)

    def bias(
        self, name: str, size: int, device: torch.device | None = None, order: Tensor | None = None
    ) -> Tensor | None:
        """Qwen3 has no biases."""
        return None

    def norm(self, name: str, size: int, *, has_offset: bool = True) -> Norm:
        """Ones."""
        return Norm(torch.ones(size, device=self.device), self.facts.rms_norm_eps)


def load(
    facts: ModelFacts,
    form: str,
    kv: str,
    place: Place,
    *,
    deterministic: bool = False,
    selftest: SelfTest | None = None,
) -> Model:
    """Create a model on the GPU."""
    torch.manual_seed(0)
    options = LoadOptions(place.device, place.dtype, kv, deterministic=deterministic, selftest=selftest)
    return RandomLoading(facts, form, options).model()


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


def kv_bytes(facts: ModelFacts, kv: str, tokens: int) -> int:
    """Bytes of keys and values that attention over `tokens` reads."""
    return kv_bytes_per_token(facts.layers, kv) * tokens
