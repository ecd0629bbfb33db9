"""What hybrid models have beside their arithmetic: calibration, the plan's slots, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from localllm.device.fake import MACHINES
from localllm.errors import BadModelFile, UnsupportedModel
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import linear_shapes, state_bytes
from localllm.models.calibration import hessians
from localllm.plan.planner import Planner


def test_every_product_of_a_hybrid_is_observed_for_calibration(tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("qwen3.5").save(tmp_path)) as checkpoint:
        found = list(hessians(checkpoint, [list(range(40))]))
        shapes = [linear_shapes(layer, checkpoint.facts.hidden_size) for layer in checkpoint.facts.layers]
    assert [{name: total.shape[0] for name, total in layer.items()} for layer in found] == [
        {name: k for name, (_, k) in layer.items()} for layer in shapes
    ]
    assert all(bool(torch.isfinite(total).all()) for layer in found for total in layer.values())


def test_a_mixture_is_not_calibrated(tiny: Callable, tmp_path: Path) -> None:
    with (
        open_model(tiny("qwen3.5-moe").save(tmp_path)) as checkpoint,
        pytest.raises(UnsupportedModel, match="mixture of experts"),
    ):
        list(hessians(checkpoint, [[1, 2, 3]]))


@pytest.mark.parametrize("machine", ["cpu", "rtx4090"])
def test_the_plan_counts_a_slot_for_every_sequence_and_checkpoint(tiny: Callable, tmp_path: Path, machine: str) -> None:
    with open_model(tiny("qwen3.5").save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    planner = Planner(MACHINES[machine])
    made, without = planner.plan(facts), planner.having(prefix_cache=False).plan(facts)
    parallel = planner.options.max_parallel
    assert made.num_slots == 3 * parallel + 1 and without.num_slots == parallel
    spare = bool(made.graph_buckets)
    pages = sum(made.num_pages) * made.page_size * 2 * 2 * 24 * 2  # bfloat16 keys and values of the one layer
    assert made.kv_bytes == pages + (made.num_slots + spare) * state_bytes(facts)
    assert made.speculation == "off"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "without a layer of full attention"),
        ({"layer_types": ["linear_attention", "full_attention", "mamba"]}, "layers of type mamba"),
        ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads evenly"),
        ({"linear_key_head_dim": 12}, "is expected"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict, words: str, tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("qwen3.5").save(tmp_path, **change)) as checkpoint, pytest.raises(BadModelFile, match=words):
        _ = checkpoint.facts
