"""Which experts of a mixture lie in host memory, where a device has no room for all of them.

At first the plan says how many of each layer; the last ones are taken, since nothing is known of their use.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from localllm.errors import UnsupportedModel
from localllm.kernels import OpFacts
from localllm.kernels.experts import cut_off, swiglu_oai
from localllm.kernels.host_experts import HostExperts
from localllm.kernels.layer_weights import ExpertsWeights, Linear
from localllm.kernels.reference import relu2
from localllm.kernels.registry import choose
from localllm.kernels.table import implementations

from .architectures import ModelFacts
from .architectures.layers import Experts
from .reader import Reader

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")
_OPS = {"silu": "silu_mul", "gelu_tanh": "gelu_tanh_mul"}
_OTHERS: dict[str, Callable[[Tensor], Tensor]] = {"swiglu_oai": swiglu_oai, "relu2": relu2}


def uniform(facts: ModelFacts, count: int) -> tuple[frozenset[int], ...]:
    """The last `count` experts of every layer that has any; () where none stays in host memory."""
    if not count:
        return ()
    sizes = (layer.ffn.num_experts if isinstance(layer.ffn, Experts) else 0 for layer in facts.layers)
    return tuple(frozenset(range(max(0, size - count), size)) for size in sizes)


def expert_of(module: str) -> int:
    """The number of the expert that a module below a layer belongs to; -1 for none."""
    found = _EXPERT.match(module)
    return int(found[1]) if found else -1


def split(weights: Any, host: frozenset[int], reader: Reader) -> Any:
    """A feed-forward layer with the products of the experts in `host` where `experts.mixture` looks for them."""
    if not host or not isinstance(weights, ExpertsWeights):
        return weights
    gate_up, down = ({number: each[number] for number in host} for each in (weights.gate_up, weights.down))
    here = HostExperts(gate_up, down, _activation(weights, reader), torch.zeros(len(weights.down), dtype=torch.int64))
    left = [
        tuple(Linear(()) if number in host else one for number, one in enumerate(each))
        for each in (weights.gate_up, weights.down)
    ]
    return replace(weights, gate_up=left[0], down=left[1], host=here)


def _activation(weights: ExpertsWeights, reader: Reader) -> Callable[[Tensor], Tensor]:
    """What lies between an expert's products, on the CPU. Raises UnsupportedModel for what is not known there."""
    activate = _OTHERS.get(weights.activation)
    if weights.activation in _OPS:
        activate = choose(implementations(_OPS[weights.activation]), OpFacts(), reader.disabled).impl.run
    if activate is None:
        raise UnsupportedModel(
            f"{reader.checkpoint.path.name}: experts with {weights.activation} are not computed in host memory",
            "start with --experts device",
        )
    limit, run = weights.limit, activate
    return run if limit is None else lambda gate_up: run(cut_off(gate_up, limit))
