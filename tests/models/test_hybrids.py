"""What hybrid models have beside their arithmetic: calibration, the plan's slots, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from localllm.device.fake import MACHINES
from localllm.errors import BadModelFile
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import linear_shapes, state_bytes
from localllm.models.architectures.layers import ROUTERS
from localllm.models.calibration import hessians
from localllm.models.kv_cache import KVCache
from localllm.models.loader import load_model
from localllm.plan.planner import Planner


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "lfm2", "gemma4-e2b", "gemma4-moe"])
def test_every_product_is_observed_for_calibration(name: str, tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny(name).save(tmp_path)) as checkpoint:
        found = list(hessians(checkpoint, [list(range(40))]))
        shapes = [linear_shapes(layer, checkpoint.facts.hidden_size) for layer in checkpoint.facts.layers]
    assert [{module: total.shape[0] for module, total in layer.items()} for layer in found] == [
        {module: k for module, (_, k) in layer.items() if module not in ROUTERS} for layer in shapes
    ]
    assert all(bool(torch.isfinite(total).all()) for layer in found for total in layer.values())


def test_calibration_runs_layers_as_the_model_does(tiny: Callable, tmp_path: Path) -> None:
    """What the last layer's products see follows from all layers before it."""
    ids = list(range(40))
    with open_model(tiny("gemma4-e2b").save(tmp_path)) as checkpoint:
        *_, last = hessians(checkpoint, [ids])
    rows: list[torch.Tensor] = []
    watched = tiny("gemma4-e2b").reference.model.layers[-1].per_layer_input_gate
    handle = watched.register_forward_pre_hook(lambda _, given: rows.append(given[0][0]))
    tiny("gemma4-e2b").logits(ids)
    handle.remove()
    expected = rows[0].T @ rows[0]
    assert float((last["per_layer_input_gate"] - expected).abs().max() / expected.abs().max()) < 1e-4


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


def test_a_slot_of_convolutions_holds_their_last_inputs_and_nothing_else(tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("lfm2").save(tmp_path)) as checkpoint:
        assert state_bytes(checkpoint.facts) == 2 * 42 * 3 * 4
        (group,) = load_model(checkpoint).states
    cache = KVCache((), (), states=[group], num_slots=3)
    assert [kept.state for kept in cache.layers] == [None, None]
    assert cache.nbytes == 3 * state_bytes(checkpoint.facts)


LFM2 = [
    ({"layer_types": ["conv"] * 3}, "without a layer of full attention"),
    ({"layer_types": ["conv", "full_attention"]}, "must list 3 layers"),
    ({"layer_types": ["conv", "full_attention", "sliding_attention"]}, "layers of type sliding_attention"),
    ({"conv_L_cache": 1}, "conv_L_cache"),
    ({"conv_L_cache": 3}, "is expected"),
    ({"block_auto_adjust_ff_dim": False}, "is expected"),
]


@pytest.mark.parametrize(("change", "words"), LFM2, ids=[str(index) for index in range(len(LFM2))])
def test_what_lfm2_cannot_be_is_refused_by_name(change: dict, words: str, tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("lfm2").save(tmp_path, **change)) as checkpoint, pytest.raises(BadModelFile, match=words):
        _ = checkpoint.facts


def test_older_configurations_of_lfm2_name_layers_and_sizes_otherwise(tiny: Callable, tmp_path: Path) -> None:
    model = tiny("lfm2")
    with open_model(model.save(tmp_path / "new")) as checkpoint:
        wanted = checkpoint.facts
    old = {"layer_types": None, "full_attn_idxs": [1], "block_ff_dim": model.config["intermediate_size"]}
    old |= {"intermediate_size": 1, "tie_embedding": True, "tie_word_embeddings": None}
    old |= {"rope_parameters": None, "rope_theta": 10000.0}
    with open_model(model.save(tmp_path / "old", **old)) as checkpoint:
        assert checkpoint.facts.layers == wanted.layers
        assert checkpoint.facts.tied_embeddings


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
