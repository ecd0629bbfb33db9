"""Which experts of a mixture stay in host memory when the device has no room for all of them.

The plan gives the number per layer; initially these are the last experts, since their use is unknown. While the model
runs, `Mover` brings the most used ones to the device.
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
from localllm.kernels.experts import OTHER_ACTIVATIONS, limited
from localllm.kernels.host_experts import HostExperts, Product
from localllm.kernels.layer_weights import ExpertsWeights, Linear
from localllm.kernels.registry import choose
from localllm.kernels.table import implementations

from .architectures import ModelFacts
from .architectures.layers import Experts
from .model import Model
from .reader import Reader

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")
MOVED_BYTES_S = 64e6  # bandwidth for swapping experts, both directions together: a few percent of a step's time
LOOK_CHOICES = 512  # routing choices of one layer between two checks of expert use
# swap if the incoming expert's uses exceed MORE times those of the outgoing one plus LEAST_USES
MORE, LEAST_USES = 1.25, 8.0
_OPS = {"silu": "silu_mul", "gelu_tanh": "gelu_tanh_mul"}


def uniform(facts: ModelFacts, count: int) -> tuple[frozenset[int], ...]:
    """The last `count` experts of every layer that has experts; () if `count` is 0."""
    if not count:
        return ()
    sizes = (layer.ffn.num_experts if isinstance(layer.ffn, Experts) else 0 for layer in facts.layers)
    return tuple(frozenset(range(max(0, size - count), size)) for size in sizes)


def expert_of(module: str) -> int:
    """The expert number in a module name below a layer; -1 if it is not part of an expert."""
    found = _EXPERT.match(module)
    return int(found[1]) if found else -1


def split(
    weights: ExpertsWeights, host: frozenset[int], reader: Reader, fetch: Callable[[int, bool], tuple[Linear, Linear]]
) -> ExpertsWeights:
    """Move the products of the experts in `host` to where `experts.mixture` looks for them.

    fetch   reads an expert again; see `HostExperts`
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
    """The CPU activation function of an expert. Raises UnsupportedModel if there is none."""
    activate = OTHER_ACTIVATIONS.get(weights.activation)
    if weights.activation in _OPS:
        activate = choose(implementations(_OPS[weights.activation]), OpFacts(), reader.disabled).impl.run
    if activate is None:
        raise UnsupportedModel(
            f"{reader.checkpoint.path.name}: experts with the activation {weights.activation} cannot run on the CPU",
            "start with --experts device",
        )
    return limited(activate, weights.limit)


def wanted(layers: Sequence[HostExperts]) -> tuple[int, int, int] | None:
    """The most useful swap: (layer, expert to move to the device, expert to move to the host), or None.

    It depends only on the use counts; ties go to the lower index.
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
    """Swaps experts between host and device memory between steps, one pair at a time, with limited bandwidth."""

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
        """Swap one pair if it is worth it; called after each step."""
        now = self.clock()
        if self._since < 0:  # discard uses counted in warm-up and profiling steps
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
