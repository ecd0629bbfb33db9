"""What Command R and Command A have beside their arithmetic: names, contexts, refusals, who computes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.errors import UnsupportedModel
from localllm.kernels.cpu import segments as cpu
from localllm.models.architectures import open_model
from localllm.models.kv_cache import KVCache
from localllm.models.loader import LoadOptions, load_model


def test_layers_that_see_all_turn_nothing(loaded: Callable) -> None:
    model = loaded("cohere2")
    assert [(group.window, group.layers) for group in model.groups] == [(None, (3,)), (9, (0, 1, 2, 4))]
    assert [layer.mixer.rope.scaling for layer in model.facts.layers] == ["none", "none", "none", "off", "none"]
    assert all(layer.mixer.rope.interleaved for layer in model.facts.layers)


def test_no_fused_kernel_takes_its_layers(loaded: Callable) -> None:
    model, x = loaded("cohere2"), torch.ones(1, 40)
    pages = KVCache(model.groups, [2, 2]).layers
    assert cpu._decoder_plan(model._calls, pages) is None
    assert cpu.decoder(lambda *_: "", x, model._calls, pages, (), None, None) == ""
    assert cpu.mlp(lambda *_: "", x, model.layers[0].ffn) == ""
    assert cpu.head(lambda *_: "", x, model.head) == ""


def test_the_text_part_of_a_wrapper_runs(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny("cohere2"), list(range(40))
    tensors = {name.replace("model.", "model.language_model."): t for name, t in model.tensors.items()}
    tensors |= dict.fromkeys(model.tensors) | {"model.vision_tower.patch.weight": torch.ones(2)}
    wrapper = {"model_type": "cohere2_vision", "architectures": ["Cohere2VisionForConditionalGeneration"]}
    done: list[tuple[int, int]] = []
    with open_model(model.save(tmp_path, tensors, text_config=model.config, **wrapper)) as checkpoint:
        assert "vision_tower is not supported" in checkpoint.unread
        ours = load_model(checkpoint, LoadOptions(exact=True, progress=lambda *now: done.append(now)))
    assert max(count for count, _ in done) <= done[-1][1], "a norm that two halves of a layer read counts once"
    found, expected = paged(ours).all_logits(ids, [30]), model.logits(ids)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_a_longer_second_training_counts(tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("cohere").save(tmp_path, model_max_length=4096)) as checkpoint:
        assert checkpoint.facts.max_context == 4096 and checkpoint.facts.logit_scale == 0.7


def test_norms_that_differ_by_head_are_refused(tiny: Callable, tmp_path: Path) -> None:
    with (
        open_model(tiny("cohere").save(tmp_path, use_qk_norm=True)) as checkpoint,
        pytest.raises(UnsupportedModel, match=r"a separate query and key norm per head \(Command R\+\)"),
    ):
        _ = checkpoint.facts
