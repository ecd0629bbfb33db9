"""What the loader refuses, reports and shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from localllm.errors import BadModelFile, DeviceError, OutOfMemory, UnsupportedModel
from localllm.kernels.cpu.build import library
from localllm.kernels.verify.selftest import KernelCrash
from localllm.models.architectures import kv_bytes_per_token, open_model
from localllm.models.kv_cache import KVCache
from localllm.models.loader import Loading, LoadOptions, load_model

from .test_gguf_models import write_gguf

LAYER = "model.layers.1."


@pytest.mark.parametrize(
    "name",
    ["input_layernorm", "post_attention_layernorm", "self_attn.k_proj", "mlp.down_proj", "model.norm", "lm_head"],
)
def test_a_missing_tensor_is_named(name: str, tiny: Callable, tmp_path: Path) -> None:
    full = f"{name if name in ('model.norm', 'lm_head') else LAYER + name}.weight"
    folder = tiny("llama").save(tmp_path, {full: None})
    with pytest.raises(BadModelFile, match=full.removesuffix(".weight")) as caught:
        load_model(open_model(folder))
    assert caught.value.hint


@pytest.mark.parametrize("name", ["input_layernorm", "self_attn.q_proj", "mlp.gate_proj"])
def test_a_wrong_shape_is_refused(name: str, tiny: Callable, tmp_path: Path) -> None:
    full = f"{LAYER}{name}.weight"
    tensor = tiny("llama").tensors[full]
    folder = tiny("llama").save(tmp_path, {full: tensor[:-1]})
    with pytest.raises(BadModelFile, match=full.removesuffix(".weight")):
        load_model(open_model(folder))


def test_a_bias_the_architecture_has_must_be_there(tiny: Callable, tmp_path: Path) -> None:
    folder = tiny("qwen2").save(tmp_path, {f"{LAYER}self_attn.v_proj.bias": None})
    with pytest.raises(BadModelFile, match=r"v_proj\.bias"):
        load_model(open_model(folder))


def test_extra_tensors_are_ignored_unless_they_change_the_result(tiny: Callable, tmp_path: Path) -> None:
    spare = {"model.rotary_emb.inv_freq": torch.ones(6), "vision.patch.weight": torch.ones(2, 2)}
    load_model(open_model(tiny("llama").save(tmp_path / "a", spare)))
    heads = {f"{start}mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2) for start in ("", "model.")}
    load_model(open_model(tiny("llama").save(tmp_path / "heads", heads)))
    sinks = {f"{LAYER}self_attn.sinks": torch.ones(6)}
    with pytest.raises(UnsupportedModel, match="attention sinks"):
        load_model(open_model(tiny("llama").save(tmp_path / "b", sinks)))


def test_scales_of_keys_and_values_of_nemotron_are_below_its_mixers(tiny: Callable, tmp_path: Path) -> None:
    model = tiny("nemotron-h")
    number = model.config["layers_block_type"].index("full_attention")
    start = next(name for name in model.tensors if name.endswith(f"layers.{number}.mixer.k_proj.weight"))[:-13]
    added = {f"{start}{one}_proj.{one}_scale": torch.tensor(0.5 if one == "k" else 0.25) for one in "kv"}
    with open_model(model.save(tmp_path, added)) as checkpoint:
        (group,) = load_model(checkpoint).groups
    assert list(dict(group.scales).values()) == [(0.5, 0.25)]


def test_scales_of_keys_and_values_come_from_the_checkpoint(tiny: Callable, tmp_path: Path, paged: Callable) -> None:
    model = tiny("llama")

    def scales_of(name: str, **more: float | list[float]) -> dict[int, tuple[float, float]]:
        added = {f"model.layers.{key.replace('__', '.')}": torch.tensor(value) for key, value in more.items()}
        with open_model(model.save(tmp_path / name, added)) as checkpoint:
            (group,) = load_model(checkpoint).groups
        return dict(group.scales)

    each = {
        "0__self_attn__k_proj__k_scale": 0.5,
        "0__self_attn__v_proj__v_scale": [0.25],
        "1__self_attn__kv_scale": 2.0,
    }
    assert scales_of("a", **each, **{"2__self_attn__k_scale": 0.125}) == {
        0: (0.5, 0.25),
        1: (2.0, 2.0),
        2: (0.125, 0.125),
    }
    assert scales_of("b", **{f"{i}__self_attn__k_scale": 1.0 for i in range(3)}) == {}  # placeholders
    assert scales_of("c", **{"0__self_attn__k_scale": [0.5, 0.25]}) == {}  # one per head
    with pytest.raises(BadModelFile, match="k_scale is -1"):
        scales_of("d", **{"0__self_attn__k_scale": -1.0})


def test_an_architecture_without_a_file_is_refused(tiny: Callable, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="mpt"):
        load_model(open_model(tiny("llama").save(tmp_path, model_type="mpt")))


def test_progress_reaches_every_stored_byte(tiny: Callable, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    with open_model(tiny("llama-bias").save(tmp_path)) as checkpoint:
        model = load_model(checkpoint, LoadOptions(progress=lambda done, total: calls.append((done, total))))
        assert calls[-1] == (checkpoint.nbytes, checkpoint.nbytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert model.weight_bytes > 0
    assert {"qkv", "o", "gate_up", "down", "lm_head", "paged_attention"} <= model.kernels.keys()


def test_a_loaded_model_outlives_its_files(tiny: Callable, tmp_path: Path, paged: Callable) -> None:
    with open_model(tiny("llama-bias").save(tmp_path)) as checkpoint:
        model = load_model(checkpoint)
    for file in tmp_path.iterdir():
        file.unlink()
    assert paged(model).all_logits([1, 2, 3], [3]).isfinite().all()


def test_a_disabled_kernel_passes_an_implementation_over(tiny: Callable, tmp_path: Path) -> None:
    checkpoint = open_model(tiny("llama").save(tmp_path))
    first = load_model(checkpoint, LoadOptions(exact=True)).kernels["qkv"]
    assert (
        load_model(checkpoint, LoadOptions(exact=True, disabled=frozenset({f"linear:{first}"}))).kernels["qkv"] != first
    )


def test_bfloat16_activations(tiny: Callable, tmp_path: Path, paged: Callable) -> None:
    model = tiny("qwen3")
    ours = load_model(open_model(model.save(tmp_path)), LoadOptions(dtype="bfloat16"))
    expected = model.logits(list(range(30)))
    rows = paged(ours, kv="bf16").all_logits(list(range(30)), [20])
    assert rows.dtype == torch.float32
    assert float((rows - expected).abs().max() / expected.abs().max()) < 0.08


@pytest.mark.parametrize("kv", ["bf16", "f32", "fp8", "int8"])
def test_pages_cost_what_the_plan_counts(kv: str, loaded: Callable) -> None:
    model = loaded("gemma3")
    groups = model.groups
    cache = KVCache(groups, [5, 7], 32, kv)
    kept = [[model.facts.layers[layer] for layer in group.layers] for group in groups]
    counted = [32 * kv_bytes_per_token(layers, kv) for layers in kept]
    assert cache.nbytes == 5 * counted[0] + 7 * counted[1]
    assert all(part is None or not part.any() for layer in range(4) for part in cache.layers[layer])


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_a_copied_page_holds_the_same(kv: str, loaded: Callable) -> None:
    cache = KVCache(loaded("gemma3").groups, [5, 7], 16, kv)
    layers = cache.groups[1].layers
    for layer in layers:
        for part in cache.layers[layer]:
            if part is not None:
                part.view(torch.uint8).random_(0, 255)
    cache.copy_page(1, 2, 4)
    for layer in layers:
        for part in cache.layers[layer]:
            assert part is None or torch.equal(part[2].view(torch.uint8), part[4].view(torch.uint8))


def test_a_checkpoints_scales_take_the_place_of_each_tokens_own(loaded: Callable) -> None:
    groups = loaded("gemma3").groups
    layer = groups[0].layers[0]
    cache = KVCache((replace(groups[0], scales={layer: (0.5, 0.25)}), groups[1]), [2, 2], kv_format="fp8")
    pages = cache.layers[layer]
    assert pages.k_scales is not None and pages.k_scales.tolist() == [0.5]
    assert pages.v_scales is not None and pages.v_scales.tolist() == [0.25]
    assert cache.layers[groups[1].layers[0]].k_scales.shape == (2, groups[1].num_kv_heads, 16)
    cache.copy_page(0, 0, 1)


@pytest.mark.parametrize(
    "disabled", [frozenset(), frozenset({"linear:c_int16", "linear:c_float32"})], ids=["C", "torch"]
)
@pytest.mark.parametrize("name", ["llama-bias", "qwen2", "llama"])
def test_embedding_rows_are_those_of_the_file(
    name: str, disabled: frozenset[str], tiny: Callable, tmp_path: Path
) -> None:
    with open_model(tiny(name).save(tmp_path)) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True, disabled=disabled))
    ids = torch.tensor([5, 98, 0, 5])
    assert torch.equal(model.embedding(ids), tiny(name).tensors["model.embed_tokens.weight"][ids])


@pytest.mark.skipif(library().lib is None or not library().lib.ll_abi() & 1, reason="no products of bytes")
def test_activations_of_eight_bits_where_they_were_asked_for(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """By every product, with a bounded error, and whatever stands beside a row."""
    path = write_gguf(
        tmp_path / "tiny.gguf",
        tiny("llama-packable").config,
        tiny("llama-packable").tensors,
        gguf.GGMLQuantizationType.Q4_1,
    )
    with open_model(path) as checkpoint:
        plain, rounded = (load_model(checkpoint, LoadOptions(activations=kind)) for kind in ("", "int8"))
    assert {rounded.kernels[name] for name in ("qkv", "o", "gate_up", "down", "lm_head")} == {"c_int8"}
    ids = [5, 9, 1, 7, 3, 2, 11, 4] * 4
    expected, found = (paged(model).all_logits(ids, [len(ids)]) for model in (plain, rounded))
    error = float((found - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.05
    assert torch.equal(found, paged(rounded).all_logits(ids, [1, 7, 20, 4]))


def test_what_the_system_keeps_of_a_file_can_be_dropped(tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("llama-packable").save(tmp_path)) as checkpoint:
        before = {name: checkpoint.read(name).copy() for name in checkpoint.tensors}
        for name in checkpoint.tensors:
            checkpoint.forget(name)
        assert all((checkpoint.read(name) == bytes_).all() for name, bytes_ in before.items())


def test_a_card_that_is_full_or_crashes_while_loading_is_an_error_with_a_way_out(
    tiny: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_model(tiny("llama").save(tmp_path))
    for raised, error, words in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), OutOfMemory, "doctor"),
        (KernelCrash("rope:x crashed the GPU in its self-test: CUDA error"), DeviceError, "start again"),
    ):

        def fail(self: Loading, problem: Exception = raised) -> None:
            raise problem

        monkeypatch.setattr(Loading, "model", fail)
        with pytest.raises(error) as caught:
            load_model(checkpoint)
        assert words in caught.value.hint and "GPU" in caught.value.message
