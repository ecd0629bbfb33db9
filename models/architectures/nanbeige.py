"""Nanbeige 4.2: Llama whose layers run several times, with the same weights and a KV cache for each time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_LAYERS, Fields
from localllm.checkpoint.mapped_file import bad

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LOOP_NORM, LayerFacts
from .names import NameMap

OPTIONS = (
    *("qk_layernorm", "emb_neighbor_num", "insert_ngram_layer_idx", "ngram_insert_all_layers", "loop_middle_layers"),
    *("enable_double_loop_split", "loop_share_kv", "enable_hyper_connection", "enable_mhc", "enable_h_res_identity"),
    "enable_depth_attention",
)  # of its configuration class; no published model uses them


class Nanbeige(Architecture):
    """The final norm also follows the last layer of each earlier loop, unless the file says otherwise."""

    name = "nanbeige"
    label = "Nanbeige 4.2"
    hf_types: ClassVar[dict[str, Mapping[str, Any]]] = {"nanbeige": {}}
    hf_classes: ClassVar[tuple[str, ...]] = ("NanbeigeForCausalLM",)
    gguf_types = ("nanbeige",)

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        size = text.get("head_dim") or text.get("kv_channels")
        return dict(text) | ({"head_dim": size} if size else {})

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        found = next((key for key in OPTIONS if keys.raw(key)), None)
        if found is not None:
            raise config.unsupported(f"{config.source} with {found}")
        loops, weights = keys.integer("num_loops", 1, MAX_LAYERS, 1), keys.raw("loop_loss_weights")
        if weights and (not isinstance(weights, list) or len(weights) + 1 != loops):
            raise keys.fail("loop_loss_weights", f"must have one entry less than num_loops, {loops}")
        rope, context = config.rope()
        layer = LayerFacts(config.attention(rope), config.dense(config.activation()))
        return _looped(config, layer, context, loops, keys.flag("skip_loop_final_norm"))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope(interleaved=True)
        loops = config.keys.integer("num_loops", 1, MAX_LAYERS, 1)
        layer = LayerFacts(config.attention(rope), config.dense())
        return _looped(config, layer, context, loops, config.keys.flag("skip_loop_final_norm"))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        """A layer has the same names in each loop."""
        found, is_gguf = super().names(checkpoint), checkpoint.kind == "gguf"
        keys = Fields(checkpoint.path, checkpoint.metadata if is_gguf else checkpoint.config, "nanbeige." * is_gguf)
        count = keys.integer("block_count" if is_gguf else "num_hidden_layers", 1, MAX_LAYERS, 1)
        total = min(MAX_LAYERS, count * keys.integer("num_loops", 1, MAX_LAYERS, 1))
        again = {layer: found.layer.format(layer % count) for layer in range(count, total)}
        ends = range(count - 1, total, count)
        norms = {f"model.layers.{layer}.{LOOP_NORM}": found.top["model.norm"] for layer in ends}
        return replace(found, heads=again, parts={**found.parts, **norms})


def _looped(config: Config, layer: LayerFacts, context: int, loops: int, skips_norm: bool) -> ModelFacts:
    count = config.num_layers
    if count * loops > MAX_LAYERS:
        raise bad(
            config.keys.path, f"{count} layers that run {loops} times are more than {MAX_LAYERS}", key="num_loops"
        )
    last = layer if skips_norm else replace(layer, norms=replace(layer.norms, over_ffn=LOOP_NORM))
    layers = ((layer,) * (count - 1) + (last,)) * (loops - 1) + (layer,) * count
    return config.facts(layers, context, loops=loops)
