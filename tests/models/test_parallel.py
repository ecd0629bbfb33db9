"""Models divided among ranks, here threads that take turns, against the same model in one piece."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from packed_weights import FORMATS, packed_model
from torch import Tensor

from localllm.errors import ConfigError, LocalLLMError
from localllm.models.architectures import open_model
from localllm.models.architectures.sharding import (
    Share,
    check_world,
    head_pieces,
    inner_pieces,
    pieces,
    refusal,
    spans,
)
from localllm.models.loader import LoadOptions, load_model
from localllm.models.ranks import Ranks


class Group:
    """Threads of which one runs at a time, until it waits for the others."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.turn = threading.Condition()
        self.given: dict[int, Tensor] = {}
        self.all: list[Tensor] = []
        self.number = 0
        self.sent: dict[tuple[int, int], Tensor] = {}
        self.failed = False

    def wait(self, until: Callable[[], bool]) -> None:
        assert self.turn.wait_for(lambda: self.failed or until(), 60)
        assert not self.failed, "another rank failed"

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        number = self.number
        self.given[rank] = value.clone()
        if len(self.given) == self.world:
            self.all = [self.given[one] for one in range(self.world)]
            self.given, self.number = {}, number + 1
            self.turn.notify_all()
        self.wait(lambda: self.number > number)
        return self.all


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    group: Group = field(default_factory=lambda: Group(1))

    def _all(self, given: Tensor) -> list[Tensor]:
        return self.group.exchange(self.share.rank, given)

    def told(self, values: Tensor) -> Tensor:
        return values.copy_(self.group.exchange(self.share.rank, values)[0])

    def passed_on(self, values: Tensor, source: int, target: int) -> None:
        group = self.group
        if self.share.rank == source and source != target:
            group.sent[source, target] = values.clone()
            group.turn.notify_all()
        elif self.share.rank == target and source != target:
            group.wait(lambda: (source, target) in group.sent)
            values.copy_(group.sent.pop((source, target)))


def on_all(shares: list[Share], work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` gives on every rank."""
    group = Group(len(shares))
    results: list[Any] = [None] * len(shares)

    def run(share: Share) -> None:
        with group.turn:
            try:
                results[share.rank] = work(ThreadRanks(share, group=group))
            except BaseException as error:
                if not group.failed:
                    results[share.rank], group.failed = error, True
                group.turn.notify_all()

    threads = [threading.Thread(target=run, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results:
        if isinstance(found, BaseException):
            raise found
    return results


def in_parts(world: int) -> list[Share]:
    return [Share(rank, world) for rank in range(world)]


def in_layers(num_layers: int, world: int) -> list[Share]:
    found = spans([1] * num_layers, [1.0] * world)
    return [Share(rank, world, "layers", span) for rank, span in enumerate(found)]


def logits_of(path: Path, paged: Any, ids: list[int], weights: str, ranks: Ranks | None) -> tuple[Tensor, int]:
    """Logits of a prompt in chunks and of tokens one by one; and the bytes of the weights."""
    with open_model(path) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=True, ranks=ranks, weights=weights))
    if ranks is not None and ranks.share.split == "layers" and ranks.share.rank:
        model.logits = Tensor.float  # type: ignore[method-assign] # rank 0 has the head
    return paged(model, num_slots=9).all_logits(ids, [40, 1, 17]), model.weight_bytes


def compare(path: Path, paged: Any, shares: list[Share], weights: str = "") -> list[int]:
    """The bytes of each rank, and of the whole model, once the logits are the same.

    weights   what linear layers become while loading
    """
    ids = torch.randint(0, 99, (61,), generator=torch.Generator().manual_seed(3)).tolist()
    whole, nbytes = logits_of(path, paged, ids, weights, None)
    found = on_all(shares, partial(logits_of, path, paged, ids, weights))
    ours = found[0][0]
    assert float((ours - whole).abs().max() / whole.abs().max()) < 1e-5
    assert torch.equal(ours.argmax(-1), whole.argmax(-1))
    if shares[0].split == "layers":
        assert torch.equal(ours, whole)
    return [*(size for _, size in found), nbytes]


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def test_heads_and_inner_values_are_cut_so_that_nothing_is_lost() -> None:
    for heads, kv_heads, world in ((9, 3, 2), (9, 3, 3), (32, 8, 8), (4, 1, 2), (16, 2, 8), (6, 6, 4), (9, 3, 6)):
        ranks = head_pieces(heads, kv_heads, world)
        assert [head for queries, _ in ranks for head in queries] == list(range(heads))
        ratio = heads // kv_heads
        for queries, kv in ranks:
            local = len(queries) // len(kv)
            assert local * len(kv) == len(queries) > 0
            assert all(head // ratio == kv[place // local] for place, head in enumerate(queries))
    assert head_pieces(4, 2, 3) == () == head_pieces(8, 2, 16)
    for count, world, unit in ((11008, 2, 256), (1536, 3, 256), (768, 2, 256), (70, 3, 1), (2880, 2, 32)):
        ranks = inner_pieces(count, world, unit)
        assert [value for one in ranks for value in one] == list(range(count))
        assert all(one.start % unit == 0 for one in ranks)
        assert max(map(len, ranks)) - min(map(len, ranks)) <= unit
    assert pieces(10, 4, 4) == (range(4), range(4, 8), range(8, 10), range(12, 10))
    assert spans([1, 1, 1, 9], [1, 1]) == ((0, 3), (3, 4))
    assert spans([1] * 12, [3, 1]) == ((0, 9), (9, 12))
    assert spans([1] * 3, [1, 1, 1]) == ((0, 1), (1, 2), (2, 3))
    with pytest.raises(ConfigError):
        spans([1], [1, 1])


def test_a_model_in_parts_gives_the_same(tmp_path: Path, paged: Any) -> None:
    path = tiny_models.tiny_gguf(tmp_path / "tiny.gguf", "Q8_0")
    first, second, whole = compare(path, paged, in_parts(2))
    assert max(first, second) < 0.55 * whole
    compare(path, paged, in_layers(2, 2))
    with open_model(path) as checkpoint:
        assert "4 heads that share 2" in refusal(checkpoint.facts, 3)
        with pytest.raises(ConfigError, match="across 3 ranks") as caught:
            load_model(checkpoint, LoadOptions(ranks=Ranks(Share(0, 3))))
    assert "2 or 4" in str(caught.value.hint)


def test_numbers_that_cannot_divide_a_model_name_those_that_can(tiny: Callable, tmp_path: Path) -> None:
    """Experts are cut as other feed-forward layers are: of each, every rank has some values."""
    with open_model(tiny("mixtral").save(tmp_path / "model")) as checkpoint:
        facts = checkpoint.facts
    heads = facts.attention[0].num_kv_heads
    narrow = replace(facts, layers=tuple(replace(one, ffn=replace(one.ffn, inner=2)) for one in facts.layers))
    for changed, world, said in (
        (narrow, 4, "a feed-forward layer of width 2"),
        (facts, 5, f"heads that share {heads}"),
        (replace(facts, vocab_size=1), 2, "a vocabulary of 1 tokens"),
    ):
        with pytest.raises(ConfigError, match=f"across {world} ranks") as found:
            check_world(changed, world)
        assert said in found.value.message
        possible = found.value.context["possible"]
        assert all(not refusal(changed, int(number)) for number in possible) and str(world) not in possible
        assert all(number in (found.value.hint or "") for number in possible) and "split layers" in found.value.hint
    assert refusal(narrow, 2) == ""


# --- every architecture and every stored format -----------------------------------------------------------------------

DENSE = ("llama", "llama-bias", "llama-yarn", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4", "gemma4-e2b")
DENSE += ("phi3", "smollm3", "smollm3-windows", "granite", "seed-oss", "glm4", "ministral3", "cohere", "cohere2")
DENSE += ("muse-glimmer", "ernie", "exaone4", "gemma", "gemma3n", "hunyuan", "granite-swa", "arcee", "apertus")
DENSE += ("glm", "vaultgemma", "hyperclovax", "nemotron", "stablelm", "stablelm-parallel")
MIXTURES = ("qwen3-moe", "qwen3-moe-mixed", "gpt-oss", "mixtral", "glm4-moe", "glm4-moe-groups", "granitemoe")
MIXTURES += ("gemma4-moe", "ernie-moe", "hunyuan-moe", "llama4", "minimax-m2", "granitemoe-swa", "afmoe", "mellum")
MIXTURES += ("laguna", "laguna-elements", "qwen2-moe", "qwen2-moe-mixed", "olmoe", "mellum-mixed", "solar-open")
MIXTURES += ("hy3", "cohere2-moe", "cohere2-moe-shared", "kolibri", "step", "exaone-moe", "dots1", "flint", "mimo")
LATENT = ("glm4-moe-lite", "mistral4", "deepseek-v2", "deepseek-v2-groups", "deepseek-v3", "youtu")
HYBRIDS = ("qwen3.5", "qwen3.5-moe", "qwen3-next", "qwen3-next-mixed", "lfm2", "lfm2-moe", "granite-hybrid")
HYBRIDS += ("falcon-h1", "nemotron-h", "nemotron-h-moe", "lfm3", "kimi-linear", "ling3")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES, *LATENT, *HYBRIDS, "olmo2", "olmo-hybrid"])
def test_every_architecture_in_parts(name: str, world: int, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    path = tiny(name).save(tmp_path / "model")
    with open_model(path) as checkpoint:
        why = refusal(checkpoint.facts, world)
    if why:
        with pytest.raises(ConfigError, match="cannot be split across"):
            compare(path, paged, in_parts(world))
        return
    compare(path, paged, in_parts(world))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES, *LATENT, *HYBRIDS, "olmo2", "olmo-hybrid"])
def test_every_architecture_in_layers(name: str, world: int, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    path = tiny(name).save(tmp_path / "model")
    with open_model(path) as checkpoint:
        num_layers = checkpoint.facts.num_layers
    if num_layers < world:
        pytest.skip(f"{num_layers} layers")
    try:
        compare(path, paged, in_layers(num_layers, world))
    except LocalLLMError as error:
        assert name in ("gemma4-e2b", "gemma3n"), error


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["llama", "phi3"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_stored_format_in_parts(
    name: str, kind: str, world: int, tiny: Callable, paged: Any, tmp_path: Path
) -> None:
    """Inputs of GPTQ in an order of its own cannot be cut, and are gathered."""
    model = tiny(f"{kind}-packable")
    tensors, config = packed_model(model, name)
    folder = model.save(tmp_path / "model", tensors, quantization_config=config)
    if world == 3:
        compare(folder, paged, in_layers(3, 3))
        return
    first, second, whole = compare(folder, paged, in_parts(2))
    assert max(first, second) < 0.6 * whole


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8", "nvfp4", "mxfp4"])
def test_what_is_encoded_while_loading_is_cut_afterwards(
    weights: str, tiny: Callable, paged: Any, tmp_path: Path
) -> None:
    compare(tiny("llama-packable").save(tmp_path / "model"), paged, in_parts(2), weights)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_blocks_of_gguf_stay_whole(kind: str, tmp_path: Path, paged: Any) -> None:
    """Heads of 64 values cut blocks of 256 in two: those outputs are gathered instead of summed."""
    path = tiny_models.tiny_gguf(tmp_path / "tiny.gguf", kind, hidden=256)
    for shares in (in_parts(2), in_layers(2, 2)):
        compare(path, paged, shares)
