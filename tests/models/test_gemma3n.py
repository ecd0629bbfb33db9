"""Gemma 3n: its text part below a wrapper, plans, what files may leave out, and numbers that contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.checkpoint import Checkpoint
from localllm.device.fake import MACHINES
from localllm.errors import BadModelFile, ConfigError, UnsupportedModel
from localllm.kernels.cpu import layers as cpu
from localllm.models.architectures import open_model
from localllm.models.architectures.registry import understand
from localllm.models.architectures.sharding import check_span, check_world
from localllm.models.loader import LoadOptions, load_model
from localllm.plan.memory import activation_bytes
from localllm.plan.planner import Planner

IDS = list(range(3, 60))


def test_a_wrapper_loads_its_text_part_and_says_so(
    tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path
) -> None:
    """As published: names below the wrapper, towers, tensors of layers that read the keys and values of others."""
    model = tiny("gemma3n")
    text = {key: value for key, value in model.config.items() if key != "architectures"}
    tensors: dict[str, Any] = dict.fromkeys(model.tensors)
    tensors |= {name.replace("model.", "model.language_model.", 1): value for name, value in model.tensors.items()}
    tensors |= {f"model.language_model.layers.4.self_attn.{name}_proj.weight": torch.ones(36, 44) for name in "kv"}
    tensors |= {
        f"model.{name}.embedding_projection.weight": torch.ones(4, 4) for name in ("embed_vision", "embed_audio")
    }
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    with open_model(model.save(tmp_path / "m", tensors, **config)) as checkpoint:
        facts = checkpoint.facts
        assert facts.architecture == "gemma3n" and "is not supported: the model reads text only" in checkpoint.unread
        assert facts.weight_bytes == sum(tensor.nbytes for tensor in model.tensors.values())
        ours = load_model(checkpoint, LoadOptions(exact=True))
    assert torch.equal(paged(ours).all_logits(IDS, [40]), paged(loaded("gemma3n")).all_logits(IDS, [40]))


def test_only_wanted_rows_go_through_the_end(loaded: Callable, paged: Any) -> None:
    model, ids = loaded("gemma3n"), IDS[:30]
    whole, driver = paged(model).all_logits(ids, [30]), paged(model)
    batch = replace(driver.batch({0: ids}), logits_indices=torch.tensor([4, 29]))
    with torch.inference_mode():
        assert torch.equal(model.logits(model.forward(batch, driver.cache)), whole[[4, 29]])


def test_the_first_stream_may_be_let_in_as_it_is(
    tiny: Callable, paged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gemma3n")
    scaled = model.logits(IDS)
    monkeypatch.setattr(model.reference.config, "altup_correct_scale", False)
    plain = model.logits(IDS)
    with open_model(model.save(tmp_path, altup_correct_scale=False)) as checkpoint:
        found = paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(IDS, [40])
    assert float((found - plain).abs().max() / plain.abs().max()) < 1e-4
    assert float((scaled - plain).abs().max() / plain.abs().max()) > 1e-3


def test_the_plan_counts_all_streams(tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("gemma3n").save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    assert facts.num_params == sum(tensor.numel() for tensor in tiny("gemma3n").tensors.values())
    made = Planner(MACHINES["cpu"]).plan(facts)
    assert made.fits and len(made.num_pages) == 2
    plain = replace(facts, layers=tuple(replace(layer, streams=None) for layer in facts.layers))
    assert activation_bytes(facts, 512, 4) >= activation_bytes(plain, 512, 4) + 512 * 4 * 44 * 4


def test_files_may_leave_out_which_gates_are_cut() -> None:
    config = {"model_type": "gemma3n_text", "num_hidden_layers": 30, "num_kv_shared_layers": 10}
    facts = understand(Checkpoint(Path("model"), "safetensors", {}, {}, config=config))[0]
    assert [layer.ffn.cut for layer in facts.layers] == [pytest.approx(1.6448536)] * 10 + [None] * 20
    assert [layer.mixer.window for layer in facts.layers] == [512, 512, 512, 512, None] * 6
    assert [layer.mixer.shares_kv_with for layer in facts.layers[18:]] == [None, None, *[18, 18, 18, 18, 19] * 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation_sparsity_pattern": [0.5] * 4}, "activation_sparsity_pattern: must list 5 numbers from 0 to"),
        ({"activation_sparsity_pattern": [1.0] * 5}, "activation_sparsity_pattern: must list 5 numbers from 0 to"),
        ({"intermediate_size": [70] * 6}, "intermediate_size: must list 5 numbers from 1 to"),
        ({"intermediate_size": 70}, r"layers\.1\.mlp\.gate_proj\.weight: the weight has shape \[66, 44\]"),
        ({"laurel_rank": 8}, r"laurel\.linear_left\.weight: the weight has shape \[7, 44\]"),
        ({"altup_num_inputs": 1}, "altup_num_inputs: must be 2 to 16, not 1"),
        ({"altup_num_inputs": 5}, r"altup_projections\.3\.weight: the weight is missing"),
        ({"altup_num_inputs": 3}, r"modality_router\.weight: the weight has shape \[4, 44\]"),
        ({"altup_active_idx": 1}, "active AltUp stream 1 instead of 0"),
        ({"num_kv_shared_layers": 4}, "layer 1: shares the KV cache of a full-attention layer, but there is none"),
        ({"vocab_size_per_layer_input": 90}, r"embed_tokens_per_layer\.weight: the weight has shape \[91, 45\]"),
    ],
)
def test_numbers_that_contradict_are_named(changes: dict[str, Any], words: str, tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("gemma3n").save(tmp_path, **changes)) as checkpoint:
        with pytest.raises((BadModelFile, UnsupportedModel), match=words) as caught:
            _ = checkpoint.facts
        assert caught.value.hint


def test_ranks_cannot_divide_it_and_no_hint_says_so(loaded: Callable) -> None:
    facts = loaded("gemma3n").facts
    with pytest.raises(ConfigError, match="depends on all values, which cannot be split across 2 ranks") as caught:
        check_world(facts, 2)
    assert caught.value.hint == "use one GPU"
    with pytest.raises(ConfigError, match="need its per-layer embeddings") as caught:
        check_span(facts, (0, 2))
    assert caught.value.hint == "use one GPU"


def test_c_declines_what_it_has_never_heard_of(loaded: Callable) -> None:
    plain, streams = loaded("qwen3").layers[0], loaded("gemma3n").layers[0].mixer.streams
    assert cpu.attention_layer(replace(plain.mixer, streams=streams)) is None
    assert cpu.mlp_layer(replace(plain.ffn, cut=1.0)) is None
