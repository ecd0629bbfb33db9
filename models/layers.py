"""A layer of a checkpoint -> `DecoderLayer`: one function for each kind of mixer and of feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from localllm.kernels.layer_weights import AttentionWeights, ExpertsWeights, Linear, MlpWeights, Norm

from .architectures.facts import Attention, Dense, Experts, Norms, linear_shapes
from .model import DecoderLayer
from .reader import Reader


class LayerReader:
    """The tensors of one layer, by canonical name below `model.layers.{i}.`."""

    def __init__(self, reader: Reader, index: int) -> None:
        self.reader = reader
        self.hidden = reader.facts.hidden_size
        self.facts = reader.facts.layers[index]
        self.norms: Norms = self.facts.norms
        self.start = f"model.layers.{index}."
        self._shapes = linear_shapes(self.facts, self.hidden)

    def norm(self, name: str, size: int = 0) -> Norm:
        """`size` is the hidden size where it is not said."""
        return self.reader.norm(self.start + name, size or self.hidden)

    def norm_if(self, name: str | None, size: int = 0) -> Norm | None:
        return None if name is None else self.norm(name, size)

    def vector(self, name: str, size: int) -> Tensor:
        """Any other tensor, float32 [size]."""
        return self.reader.vector(self.reader.checkpoint.names.tensor(self.start + name), size).to(self.reader.device)

    def linear(self, layer_class: str, *modules: str) -> Linear:
        """Modules that are multiplied with the same rows, as one."""
        return self.reader.linear(layer_class, [self.start + m for m in modules], [self._shapes[m] for m in modules])


def _attention(layer: LayerReader, facts: Attention) -> AttentionWeights:
    return AttentionWeights(
        norm=layer.norm(layer.norms.before_mixer),
        qkv=layer.linear("qkv", *facts.inputs),
        out=layer.linear("o", "self_attn.o_proj"),
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        scale=facts.scale,
        q_norm=layer.norm_if("self_attn.q_norm" if facts.qk_norm else None, facts.head_dim),
        k_norm=layer.norm_if("self_attn.k_norm" if facts.qk_norm else None, facts.head_dim),
        post_norm=layer.norm_if(layer.norms.after_mixer),
        window=facts.window,
        softcap=facts.softcap,
        interleaved=facts.rope.interleaved,
        sinks=layer.vector("self_attn.sinks", facts.num_heads) if facts.sinks else None,
    )


def _dense(layer: LayerReader, facts: Dense) -> MlpWeights:
    return MlpWeights(
        norm=layer.norm(layer.norms.before_ffn),
        gate_up=layer.linear("gate_up", *facts.inputs),
        down=layer.linear("down", "mlp.down_proj"),
        activation=facts.act,
        post_norm=layer.norm_if(layer.norms.after_ffn),
    )


def _experts(layer: LayerReader, facts: Experts) -> ExpertsWeights:
    bias = "mlp.gate.e_score_correction_bias"
    shared = [f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")]
    experts = [f"mlp.experts.{number}" for number in range(facts.num_experts)]
    return ExpertsWeights(
        norm=layer.norm(layer.norms.before_ffn),
        router=layer.linear("router", "mlp.gate"),
        gate_up=tuple(layer.linear("experts_gate_up", f"{one}.gate_proj", f"{one}.up_proj") for one in experts),
        down=tuple(layer.linear("experts_down", f"{one}.down_proj") for one in experts),
        top_k=facts.top_k,
        router_kind=facts.router,
        activation=facts.act,
        renormalise=facts.renormalise,
        scale=facts.scale,
        choice_bias=layer.vector(bias, facts.num_experts) if facts.choice_bias else None,
        groups=facts.groups,
        group_top_k=facts.group_top_k,
        shared_gate_up=layer.linear("gate_up", *shared[:2]) if facts.shared_inner else None,
        shared_down=layer.linear("down", shared[2]) if facts.shared_inner else None,
        shared_gate=layer.linear("router", "mlp.shared_expert_gate") if facts.shared_gate else None,
        limit=facts.limit,
        post_norm=layer.norm_if(layer.norms.after_ffn),
    )


_KINDS: dict[type, Callable[[LayerReader, Any], Any]] = {Attention: _attention, Dense: _dense, Experts: _experts}


def load_layer(reader: Reader, index: int) -> DecoderLayer:
    """Read layer `index`, and let each of its products choose its implementation."""
    layer = LayerReader(reader, index)
    mixer, ffn = layer.facts.mixer, layer.facts.ffn
    return DecoderLayer(_KINDS[type(mixer)](layer, mixer), _KINDS[type(ffn)](layer, ffn))
