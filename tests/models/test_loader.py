"""What the loader refuses, reports and shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localllm.checkpoint import open_checkpoint
from localllm.errors import BadModelFile, UnsupportedModel
from localllm.models.kv_cache import KVCache, kv_bytes_per_page
from localllm.models.loader import LoadOptions, load_model

LAYER = "model.layers.1."


@pytest.mark.parametrize(
    "name",
    ["input_layernorm", "post_attention_layernorm", "self_attn.k_proj", "mlp.down_proj", "model.norm", "lm_head"],
)
def test_a_missing_tensor_is_named(name: str, tiny: Callable, tmp_path: Path) -> None:
    full = f"{name if name in ('model.norm', 'lm_head') else LAYER + name}.weight"
    folder = tiny("llama").save(tmp_path, {full: None})
    with pytest.raises(BadModelFile, match=full.removesuffix(".weight")) as caught:
        load_model(open_checkpoint(folder))
    assert caught.value.hint


@pytest.mark.parametrize("name", ["input_layernorm", "self_attn.q_proj", "mlp.gate_proj"])
def test_a_wrong_shape_is_refused(name: str, tiny: Callable, tmp_path: Path) -> None:
    full = f"{LAYER}{name}.weight"
    tensor = tiny("llama").tensors[full]
    folder = tiny("llama").save(tmp_path, {full: tensor[:-1]})
    with pytest.raises(BadModelFile, match=full.removesuffix(".weight")):
        load_model(open_checkpoint(folder))


def test_a_bias_the_architecture_has_must_be_there(tiny: Callable, tmp_path: Path) -> None:
    folder = tiny("qwen2").save(tmp_path, {f"{LAYER}self_attn.v_proj.bias": None})
    with pytest.raises(BadModelFile, match=r"v_proj\.bias"):
        load_model(open_checkpoint(folder))


def test_extra_tensors_are_ignored_unless_they_change_the_result(tiny: Callable, tmp_path: Path) -> None:
    spare = {"model.rotary_emb.inv_freq": torch.ones(6), "vision.patch.weight": torch.ones(2, 2)}
    load_model(open_checkpoint(tiny("llama").save(tmp_path / "a", spare)))
    sinks = {f"{LAYER}self_attn.sinks": torch.ones(6)}
    with pytest.raises(UnsupportedModel, match="attention sinks"):
        load_model(open_checkpoint(tiny("llama").save(tmp_path / "b", sinks)))


def test_an_architecture_without_a_file_is_refused(tiny: Callable, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("llama").save(tmp_path))
    checkpoint.__dict__["facts"] = replace(checkpoint.facts, architecture="phi3")
    with pytest.raises(UnsupportedModel, match="phi3"):
        load_model(checkpoint)


def test_progress_reaches_every_stored_byte(tiny: Callable, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    with open_checkpoint(tiny("llama-bias").save(tmp_path)) as checkpoint:
        model = load_model(checkpoint, LoadOptions(progress=lambda done, total: calls.append((done, total))))
        assert calls[-1] == (checkpoint.nbytes, checkpoint.nbytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert model.weight_bytes > 0
    assert {"qkv", "o", "gate_up", "down", "lm_head", "paged_attention"} <= model.kernels.keys()


def test_a_loaded_model_outlives_its_files(tiny: Callable, tmp_path: Path, paged: Callable) -> None:
    with open_checkpoint(tiny("llama-bias").save(tmp_path)) as checkpoint:
        model = load_model(checkpoint)
    for file in tmp_path.iterdir():
        file.unlink()
    assert paged(model).all_logits([1, 2, 3], [3]).isfinite().all()


def test_quarantine_passes_an_implementation_over(tiny: Callable, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("llama").save(tmp_path))
    first = load_model(checkpoint, LoadOptions(exact=True)).kernels["qkv"]
    assert load_model(checkpoint, LoadOptions(exact=True, quarantined=frozenset({first}))).kernels["qkv"] != first


def test_bfloat16_activations(tiny: Callable, tmp_path: Path, paged: Callable) -> None:
    model = tiny("qwen3")
    ours = load_model(open_checkpoint(model.save(tmp_path)), LoadOptions(dtype="bfloat16"))
    expected = model.logits(list(range(30)))
    rows = paged(ours, dtype=torch.bfloat16).all_logits(list(range(30)), [20])
    assert rows.dtype == torch.float32
    assert float((rows - expected).abs().max() / expected.abs().max()) < 0.08


def test_pages_cost_what_the_plan_counts(loaded: Callable) -> None:
    groups = loaded("gemma3").groups
    cache = KVCache(groups, [5, 7], 32, torch.bfloat16)
    counted = [kv_bytes_per_page(group, torch.bfloat16, 32) for group in groups]
    assert cache.nbytes == 5 * counted[0] + 7 * counted[1]
    assert all(not pages.any() for layer in range(4) for pages in cache.layer(layer))


@pytest.mark.parametrize("quarantined", [frozenset(), frozenset({"c_int16", "c_float32"})], ids=["C", "torch"])
@pytest.mark.parametrize("name", ["llama-bias", "qwen2", "llama"])
def test_embedding_rows_are_those_of_the_file(
    name: str, quarantined: frozenset[str], tiny: Callable, tmp_path: Path
) -> None:
    with open_checkpoint(tiny(name).save(tmp_path)) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True, quarantined=quarantined))
    ids = torch.tensor([5, 98, 0, 5])
    assert torch.equal(model.embedding(ids), tiny(name).tensors["model.embed_tokens.weight"][ids])
