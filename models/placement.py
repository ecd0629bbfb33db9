"""Which experts of a mixture lie in host memory, where a device has no room for all of them.

At first the plan says how many of each layer; the last ones are taken, since nothing is known of their use. While the
model runs, those that are used most come to the device: see `Mover`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import torch
from torch import Tensor

from localllm.errors import UnsupportedModel
from localllm.kernels import OpFacts
from localllm.kernels.experts import cut_off, swiglu_oai
from localllm.kernels.host_experts import HostExperts, Product
from localllm.kernels.layer_weights import ExpertsWeights, Linear
from localllm.kernels.reference import relu2
from localllm.kernels.registry import choose
from localllm.kernels.table import implementations

from .architectures import ModelFacts
from .architectures.layers import Experts
from .model import Model
from .reader import Reader

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")
MOVED_BYTES_S = 64e6  # of experts that change their places, both ways: some percent of a step's time
LOOK_CHOICES = 512  # of one layer, between two looks at what is used
# an expert comes to the device that is used so much more than the one that goes, and so many times more
MORE, LEAST_USES = 1.25, 8.0
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


def split(
    weights: ExpertsWeights, host: frozenset[int], reader: Reader, fetch: Callable[[int, bool], tuple[Linear, Linear]]
) -> ExpertsWeights:
    """A mixture with the products of the experts in `host` where `experts.mixture` looks for them.

    fetch   reads an expert anew: as of `HostExperts`
    """
    gate_up: dict[int, Product] = {number: weights.gate_up[number] for number in host}
    down: dict[int, Product] = {number: weights.down[number] for number in host}
    uses = torch.zeros(len(weights.down), dtype=torch.int64)
    here = HostExperts(gate_up, down, _activation(weights, reader), fetch, uses, reader.options.stream_rows)
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


def wanted(layers: Sequence[HostExperts]) -> tuple[int, int, int] | None:
    """(layer, expert that should come to the device, expert that should go), where that gains most; None for nowhere.

    It follows from the counts alone: of equal ones the first.
    """
    found, most = None, 0.0
    for index, layer in enumerate(layers):
        heat = layer.heat.tolist()
        here = [number for number in range(len(heat)) if number not in layer.gate_up]
        if not here:
            continue
        comes, goes = max(sorted(layer.gate_up), key=heat.__getitem__), min(here, key=heat.__getitem__)
        gain = heat[comes] - heat[goes]
        if heat[comes] > MORE * heat[goes] + LEAST_USES and gain > most:
            found, most = (index, comes, goes), gain
    return found


class Mover:
    """Lets experts change their places between steps, one pair at a time, so many bytes a second at most."""

    def __init__(self, model: Model, bytes_s: float = MOVED_BYTES_S, clock: Callable[[], float] = monotonic) -> None:
        self.model, self.bytes_s, self.clock = model, bytes_s, clock
        self._layers = [
            (index, layer.ffn.host)
            for index, layer in enumerate(model.layers)
            if isinstance(layer.ffn, ExpertsWeights) and layer.ffn.host is not None
        ]
        self._experts = [host for _, host in self._layers]
        self._since = -1.0
        self._left = 0.0  # bytes that may move; below 0 after a move
        self._looked, self._more = 0, False

    def __call__(self) -> None:
        """After a step."""
        now = self.clock()
        if self._since < 0:  # what was counted until now were steps that measure
            for host in self._experts:
                host.heat.zero_()
            self._since = now
            return
        self._left = min(self._left + (now - self._since) * self.bytes_s, self.bytes_s)
        self._since = now
        chosen = self._experts[0].moved.chosen
        if self._left <= 0 or not (self._more or chosen - self._looked >= LOOK_CHOICES):
            return
        self._looked, found = chosen, wanted(self._experts)
        self._more = found is not None
        if found is not None:
            index, host = self._layers[found[0]]
            before = host.moved.exchanged
            self.model.exchange(index, *found[1:])
            self._left -= host.moved.exchanged - before
