"""Every architecture against transformers in float32, and against itself in other company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from localllm.errors import BadModelFile
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model

# by default the families most in use, and one of each kind of mixer, feed-forward layer, cache and rotation
QUICK = ("llama", "llama-yarn", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "qwen3.5", "qwen3.5-moe")
QUICK += ("qwen3-next", "muse-glimmer", "qwen4-exp", "lfm2", "lfm3", "kimi-linear", "olmo-hybrid", "granite-hybrid")
QUICK += ("nemotron-h", "falcon-h1", "qwen3-moe", "gpt-oss", "mixtral", "glm4-moe", "llama4", "minimax-m2")
QUICK += ("granitemoe-swa", "step", "glm5-next", "mimo", "deepseek-v4", "gemma2", "gemma3n", "gemma4", "gemma4-e2b")
QUICK += ("gemma4-moe", "smollm3", "granite", "olmo3", "glm4", "ministral3", "cohere2", "exaone4", "hunyuan")
QUICK += ("apertus", "stablelm", "glm4-moe-lite")
SLOW = ("llama-bias", "qwen3-next-mixed", "lfm2-moe", "lfm3-plain", "ling3", "olmo-hybrid-rope", "qwen3-moe-mixed")
SLOW += ("granite-hybrid-dense", "nemotron-h-moe", "falcon-h1-normed", "glm4-moe-groups", "granitemoe", "ernie-moe")
SLOW += ("hunyuan-moe", "llama4-published", "afmoe", "mellum", "laguna", "hy3", "cohere2-moe-shared", "kolibri")
SLOW += ("flint", "qwen2-moe", "qwen2-moe-mixed", "olmoe", "mellum-mixed", "solar-open", "granitemoe-shared")
SLOW += ("laguna-elements", "cohere2-moe", "cohere2-moe-sum", "kolibri-normed", "exaone-moe", "dots1", "gemma")
SLOW += ("smollm3-windows", "olmo2", "seed-oss", "ernie", "exaone4-small", "granite-swa", "arcee", "nemotron")
SLOW += ("hyperclovax", "glm", "ministral", "cwm", "vaultgemma", "stablelm-parallel", "cohere", "cohere2-packable")
SLOW += ("internlm3", "mistral4", "deepseek-v2", "deepseek-v2-groups", "deepseek-v3", "youtu")
NAMES = (*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_logits_match_transformers(name: str, tiny: Callable, loaded: Callable, paged: Any) -> None:
    token_ids = prompt(150)
    reference = tiny(name).logits(token_ids)
    assert relative_error(paged(loaded(name)).all_logits(token_ids, [64, 1, 70]), reference) < 1e-4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_token_does_not_depend_on_chunks_or_neighbours(name: str, loaded: Callable, paged: Any) -> None:
    model = loaded(name)
    ids, others = prompt(150), prompt(90, 1)
    whole = paged(model).all_logits(ids, [150])
    assert torch.equal(paged(model, page_size=32).all_logits(ids, [7, 100, 31]), whole)
    together = paged(model)
    first = together.step({0: ids[:20], 1: others[:33]})
    second = together.step({1: others[33:34], 0: ids[20:90], 2: others[:5]})
    third = together.step({2: others[5:6], 0: ids[90:91], 1: others[34:35]})
    assert torch.equal(torch.cat([first[0], second[0], third[0]]), whole[:91])
    alone = paged(model).all_logits(others[:35], [35])
    assert torch.equal(torch.cat([first[1], second[1], third[1]]), alone)
    assert torch.equal(torch.cat([second[2], third[2]]), alone[:6])


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3.5", "lfm2", "nemotron-h", "gemma3", "gemma3n", "gemma4-e2b", "glm4-moe-lite", "cohere2"),
        *("llama4", "ling3", "qwen4-exp", "olmo-hybrid", "glm5-next", "deepseek-v4", "falcon-h1"),
    ],
)
def test_a_cached_prefix_gives_the_same_bits(name: str, loaded: Callable, paged: Any) -> None:
    model, ids = loaded(name), prompt(80)
    driver = paged(model)
    whole = driver.all_logits(ids, [80])
    # a second sequence reads the pages of the first 32 tokens, as a hit in the prefix cache does
    for group, table in enumerate(driver.tables[0]):
        shared = [page for page in table[:2] if page >= 0]
        driver.tables.setdefault(1, [[] for _ in model.groups])[group].extend(shared)
    driver.tokens[1] = ids[:32]
    if model.states:  # where the prefix ended its state was kept
        other = paged(model)
        other.all_logits(ids[:32], [32])
        for ours, theirs in zip(driver.cache.states, other.cache.states, strict=True):
            ours[driver.slot(1)] = theirs[other.slot(0)]
    assert torch.equal(driver.step({1: ids[32:]})[1], whole[32:])


def test_copied_pages_continue_alike(loaded: Callable, paged: Any) -> None:
    model, ids = loaded("mistral"), prompt(40)
    driver = paged(model)
    driver.all_logits(ids[:20], [20])
    for group, table in enumerate(driver.tables[0]):
        fresh = [driver.free[group].pop() for _ in table]
        for source, target in zip(table, fresh, strict=True):
            driver.cache.copy_page(group, source, target)
        driver.tables.setdefault(1, [[] for _ in model.groups])[group] = fresh
    driver.tokens[1] = ids[:20]
    rows = driver.step({0: ids[20:30], 1: ids[20:30]})
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16_pages_stay_close(name: str, tiny: Callable, loaded: Callable, paged: Any) -> None:
    token_ids = prompt(60)
    reference = tiny(name).logits(token_ids)
    rows = paged(loaded(name), kv="bf16").all_logits(token_ids, [40])
    assert 1e-6 < relative_error(rows, reference) < 0.05


def test_the_context_decides_between_the_factors_of_longrope(tiny: Callable, paged: Any, tmp_path: Any) -> None:
    model, ids = tiny("phi3"), prompt(60)
    reference = model.logits(ids)  # no longer than the original context: turned by the short factors
    with open_model(model.save(tmp_path)) as checkpoint:
        short, long = (load_model(checkpoint, LoadOptions(exact=True, context=ctx)) for ctx in (64, 65))
    assert relative_error(paged(short).all_logits(ids, [60]), reference) < 1e-4
    assert relative_error(paged(long).all_logits(ids, [60]), reference) > 1e-3
    for wrong, found in (([1.0], "but has 1 numbers"), ([1.0] * 5 + [0.0], "but has 0$")):
        scaling = model.config["rope_parameters"] | {"long_factor": wrong}
        with pytest.raises(BadModelFile, match=f"must hold 6 numbers from 0.001 to 1,000,000, {found}"):
            _ = open_model(model.save(tmp_path / str(len(wrong)), rope_parameters=scaling)).facts


def test_queries_are_let_be_where_the_context_is_the_trained_one(tiny: Callable, paged: Any, tmp_path: Any) -> None:
    model, ids = tiny("ministral3"), prompt(60)
    with open_model(model.save(tmp_path)) as checkpoint:
        short, long = (load_model(checkpoint, LoadOptions(exact=True, context=ctx)) for ctx in (64, 65))
    assert short.layers[0].mixer.temperature is None and long.layers[0].mixer.temperature == (0.4, 64)
    assert relative_error(paged(short).all_logits(ids, [60]), model.logits(ids)) < 1e-4


def test_layers_that_turn_differently_share_their_pages(loaded: Callable) -> None:
    model = loaded("smollm3")
    assert [group.layers for group in model.groups] == [(0, 1, 2, 3, 4)]
    assert [rope.scaling for rope in model.facts.ropes] == ["none", "off"]


def test_groups_put_full_attention_first(loaded: Callable) -> None:
    full, window = loaded("gemma3").groups
    assert (full.name, full.window, full.layers) == ("full", None, (1,))
    assert (window.name, window.window, window.layers) == ("window-11", 11, (0, 2, 3))
    (only,) = loaded("mistral").groups
    assert only.window == 9 and only.layers == (0, 1, 2)


def test_step_under_the_names_of_transformers(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """As it saves them when asked not to restore the published ones."""
    model, ids = tiny("step"), prompt(30)
    model.reference.save_pretrained(tmp_path / "theirs", save_original_format=False)
    tensors = load_file(tmp_path / "theirs/model.safetensors")
    assert not any(".moe." in name for name in tensors)
    with open_model(
        model.save(tmp_path / "ours", tensors | dict.fromkeys(set(model.tensors) - set(tensors)))
    ) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True))
    assert relative_error(paged(ours).all_logits(ids, [20]), model.logits(ids)) < 1e-4
