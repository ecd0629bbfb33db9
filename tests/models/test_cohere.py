"""What Command R and Command A have beside their arithmetic: names, contexts, refusals, who computes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.errors import UnsupportedModel
from localllm.kernels.cpu import segments as cpu
from localllm.kernels.cpu.build import library
from localllm.kernels.layer_weights import Norm
from localllm.kernels.segments import REFERENCES
from localllm.models.architectures import open_model
from localllm.models.kv_cache import KVCache
from localllm.models.loader import LoadOptions, load_model


def test_layers_that_see_all_turn_nothing(loaded: Callable) -> None:
    model = loaded("cohere2")
    assert [(group.window, group.layers) for group in model.groups] == [(None, (3,)), (9, (0, 1, 2, 4))]
    assert [layer.mixer.rope.scaling for layer in model.facts.layers] == ["none", "none", "none", "off", "none"]
    assert all(layer.mixer.rope.interleaved for layer in model.facts.layers)


@pytest.mark.skipif(bool(library().reason), reason="no C compiler")
@pytest.mark.parametrize("name", ["cohere2", "cohere2-moe", "cohere2-moe-shared"])
def test_one_call_runs_all_layers_as_their_parts_do(
    name: str, loaded: Callable, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both halves of a layer read the same input, also where only some of the last layer's rows are wanted."""
    model, prompts = loaded(name), {0: list(range(30)), 1: [7, 3, 9]}
    assert cpu._decoder_plan(model._calls, KVCache(model.groups, [2] * len(model.groups)).layers) is not None

    def hidden(driver: Any) -> list[torch.Tensor]:
        found = []
        for tokens in (prompts, {0: [5], 1: [6]}):
            batch = driver.batch(tokens)
            ends = batch.cu_query_lens[1:].long() - 1
            with torch.inference_mode():
                found.append(model.forward(replace(batch, logits_indices=ends), driver.cache))
        return found

    ours = hidden(paged(model))
    monkeypatch.setattr(model, "table", replace(model.table, decoder=REFERENCES["decoder"]))
    for found, wanted in zip(ours, hidden(paged(model)), strict=True):
        assert found.shape == wanted.shape == (2, 40)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(bool(library().reason), reason="no C compiler")
def test_layer_norms_in_c(loaded: Callable) -> None:
    """With a bias, and a mean that must not cost the digits of the deviations from it."""
    head = loaded("cohere2").head
    head = replace(head, norm=Norm(torch.randn(40), 1e-5, torch.randn(40)))
    for x in (torch.randn(5, 40), torch.randn(1, 40) + 100):
        found = cpu.head(lambda *_: pytest.fail("composed"), x, head)
        torch.testing.assert_close(found, REFERENCES["head"](x, head), rtol=1e-4, atol=1e-4)


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
