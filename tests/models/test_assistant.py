"""Assistants of Gemma 4 draft from the keys and values of the larger model: against transformers, and at work."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from localllm import LLM
from localllm.cli.commands import pull, show
from localllm.config import EngineOptions
from localllm.device.fake import MACHINES
from localllm.engine.assistant import AssistantDrafter
from localllm.engine.engine import Engine
from localllm.engine.speculation import Speculation
from localllm.errors import BadModelFile, ConfigError, OutOfMemory, UnsupportedModel
from localllm.hub import local
from localllm.models.architectures import open_model
from localllm.models.assistant import AssistantModel, load_assistant
from localllm.models.loader import Loading, LoadOptions
from localllm.models.model import Model
from localllm.plan.fit import planner_with, with_drafter_beside
from localllm.plan.planner import Planner
from localllm.request import SamplingParams

from .test_decode_graphs import answers, engine_of, requests, rerun
from .test_gguf_models import write_gguf

slow = pytest.mark.slow
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 11, "centroid_intermediate_top_k": 3}
NAMES = ("gemma4", "gemma4-e2b", "gemma4-moe")


@pytest.fixture(autouse=True)
def _sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 refuses a model all of whose layers share, and shows no keys and values of one without any."""
    from transformers import Gemma4TextConfig

    of_others = Gemma4TextConfig.kv_sharing_modes.fget

    def modes(self: Any) -> list[str | None]:
        kinds, shared = self.layer_types, self.num_kv_shared_layers
        if shared == len(kinds):
            return ["reuse"] * shared
        last = {kind: index for index, kind in enumerate(kinds)}
        return of_others(self) if shared else ["store" if last[kind] == i else None for i, kind in enumerate(kinds)]

    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))


def assistant_of(tiny_of: Callable, target: Any, seed: int = 3, **more: Any) -> Any:
    """One for a tiny model."""
    theirs = target.reference.config
    plain = {"enable_moe_block": False, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0}
    sizes = {"hidden_size": 24, "intermediate_size": 34, "num_hidden_layers": 3, "num_kv_shared_layers": 3}
    sizes |= {"global_head_dim": 28, "num_global_key_value_heads": 1}
    kinds = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    text = theirs.to_dict() | plain | sizes | kinds | {"vocab_size_per_layer_input": 0, "num_attention_heads": 2}
    for name in ("per_layer_config", "kv_sharing_modes", "moe_intermediate_size", "num_experts", "top_k_experts"):
        text.pop(name, None)
    made = tiny_of("gemma4_assistant", {"text_config": text, "backbone_hidden_size": theirs.hidden_size} | more, seed)
    # transformers lets the first round of drafts read two keys more than a window has beside the token itself
    made.reference.config.get_text_config().sliding_window = theirs.sliding_window - 2
    if more:
        order = torch.randperm(99, generator=torch.Generator().manual_seed(seed))
        made.reference.masked_embedding.token_ordering.copy_(order)
        made.tensors["masked_embedding.token_ordering"] = order
    return made


def loaded_for(one: Any, target: Model, folder: Path) -> AssistantModel:
    with open_model(one.save(folder)) as checkpoint:
        return load_assistant(checkpoint, LoadOptions(exact=True), target.facts)


def as_gguf(one: Any, path: Path) -> Path:
    """As llama.cpp's converter writes it: all layers count as predictors, and logits are computed for all tokens."""
    text = one.config["text_config"]
    more = {"model_type": "gemma4-assistant", "nextn": 3, "backbone_hidden_size": one.config["backbone_hidden_size"]}
    tensors = {name: tensor for name, tensor in one.tensors.items() if "masked_embedding" not in name}
    return write_gguf(path, text | more, tensors, gguf.GGMLQuantizationType.F32)


def expected_drafts(target: Any, one: Any, ids: list[int], count: int) -> list[int]:
    """Those of transformers, when the model has read all of `ids` but the last."""
    layers = target.reference.model.layers
    for layer, mode in zip(layers, target.reference.config.kv_sharing_modes, strict=True):
        layer.self_attn.store_full_length_kv = mode == "store"
    with torch.no_grad():
        read = target.reference.model(torch.tensor([ids[:-1]]), use_cache=True, return_shared_kv_states=True)
        hidden, token, found = read.last_hidden_state[:, -1:], ids[-1], []
        for _ in range(count):
            embedded = target.reference.get_input_embeddings()(torch.tensor([[token]]))
            made = one.reference(
                inputs_embeds=torch.cat([embedded, hidden], -1),
                position_ids=torch.tensor([[len(ids) - 1]]),
                attention_mask=None,
                shared_kv_states=read.shared_kv_states,
            )
            hidden, token = made.last_hidden_state, int(made.logits.argmax())
            found.append(token)
    return found


class Checked(AssistantDrafter):
    """Keeps what it was asked and what it answered."""

    def __init__(self, engine: Engine, own: AssistantModel) -> None:
        super().__init__(engine.runner, own, 99, 0.1)
        self.deep = 3
        self.seen: list[tuple[list[int], tuple[int, ...]]] = []
        engine.runner.listener = self
        engine.stepper.speculation = Speculation(self, "always")

    def propose(self, sequences: Any, counts: Any) -> list[tuple[int, ...]]:
        found = super().propose(sequences, counts)
        pairs = zip(sequences, found, strict=True)
        self.seen += [(list(one.token_ids), drafts) for one, drafts in pairs if drafts]
        return found


FORMS = ("eager", "graphs", "preempted", "graphs, preempted")
MANY = [(name, ordered, form) for name in NAMES for ordered in (False, True) for form in FORMS]
QUICK = [("gemma4-e2b", True, "graphs"), ("gemma4", False, "preempted"), ("gemma4-moe", False, "eager")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "ordered", "form"), [*QUICK, *(pytest.param(*case, marks=slow) for case in MANY if case not in QUICK)]
)
def test_drafts_match_transformers_and_change_no_token(
    name: str, ordered: bool, form: str, tiny: Callable, tiny_of: Callable, loaded: Callable, tmp_path: Path
) -> None:
    """Windows, chunks, batches, the prefix tree, preemption, right and wrong drafts, and with graphs no eager pass."""
    target, model = tiny(name), loaded(name)
    one = assistant_of(tiny_of, target, **(ORDERED if ordered else {}))
    own = loaded_for(one, model, tmp_path)
    expected = answers(engine_of(model), requests(1))
    captured = form.startswith("graphs")
    engine = engine_of(model, *((1, 2, 4, 5), True) if captured else (), guesses=(2, 4, 8, 16, 64) if captured else ())
    checked, eager = Checked(engine, own), []
    if captured:
        checked.graphs(engine.runner.graphs.inputs, (1, 2, 4, 8, 16, 64), rerun).capture()
        build = checked._builder.build
        checked._builder.build = lambda step: eager.append(step.scheduled) or build(step)
    if "preempted" in form:
        engine.scheduler.limits = replace(engine.scheduler.limits, preempt_every=7)
    for _ in range(1 + ("preempted" not in form)):
        assert answers(engine, requests(1)) == expected
    assert engine.runner.listener is checked and len(checked.seen) > 20 and not eager
    for ids, drafts in random.Random(1).sample(checked.seen, 20):
        assert list(drafts) == expected_drafts(target, one, ids, len(drafts))


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, pytest.param(True, marks=slow)])
def test_a_model_with_its_assistant_answers_the_same(
    ordered: bool, tiny: Callable, tiny_of: Callable, tmp_path: Path
) -> None:
    """From files, through plan, loader, boot, sleep and a failure."""
    one = tiny("gemma4-e2b")
    path = write_gguf(tmp_path / "tiny.gguf", one.config, one.tensors, gguf.GGMLQuantizationType.F32)
    draft = str(assistant_of(tiny_of, one, **(ORDERED if ordered else {})).save(tmp_path / "assistant"))

    def answered(llm: LLM) -> list[list[int]]:
        texts = ["t5 t6 t7", "t9", "t8 t8 t8 t8"]
        params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
        return [output.completions[0].token_ids for output in llm.generate(texts, params)]

    with LLM(path, ctx=256, speculation="off") as llm:
        wanted, held, kept = answered(llm), llm.state().weight_bytes, llm.plan.kv_bytes
    with LLM(path, ctx=256, speculation="draft", draft=draft, debug_invariants=True) as llm:
        assert answered(llm) == wanted and answered(llm) == wanted
        assert "speculation draft, " in llm.run_summary and "draft tokens accepted" in llm.run_summary
        assert llm.state().weight_bytes > held and llm.plan.kv_bytes == kept and llm.plan.draft_pages == ()
        assert any("the plan includes" in reason for reason in llm.plan.reasons)
        llm.sleep()
        llm.wake()
        assert answered(llm) == wanted and llm.engine.stats().num_draft_tokens > 12 and not llm.state().warnings
        llm.engine.runner.listener.hear = lambda step, hidden: 1 / 0
        assert answered(llm) == wanted
        assert any("the draft model is off" in line for line in llm.state().warnings)
    with LLM(path, ctx=256, draft=draft) as llm:  # where it is measured to pay
        assert answered(llm) == wanted


def test_one_that_cannot_draft_is_refused(tiny: Callable, tiny_of: Callable, tmp_path: Path) -> None:
    target, other = tiny("gemma4"), tiny("gemma4-e2b")
    facts = open_model(target.save(tmp_path / "target")).facts
    draft = open_model(assistant_of(tiny_of, target).save(tmp_path / "draft")).facts
    cpu = Planner(MACHINES["cpu"], EngineOptions(draft="it"), draft=draft)
    plan = cpu.plan(facts)
    assert plan.weight_bytes > Planner(MACHINES["cpu"]).plan(facts).weight_bytes and not plan.draft_pages
    with pytest.raises(
        UnsupportedModel, match="drafts tokens for a larger Gemma 4 model and cannot run alone"
    ) as raised:
        Planner(MACHINES["cpu"]).plan(draft)
    assert "--draft" in raised.value.hint
    with pytest.raises(UnsupportedModel, match="cannot run alone"):
        LLM(tmp_path / "draft")
    with pytest.raises(ConfigError, match="expects a KV cache with other shapes"):
        cpu.plan(open_model(other.save(tmp_path / "other")).facts)
    with pytest.raises(ConfigError, match="44 hidden units and 99 tokens, and this one has 48 and 99"):
        cpu.plan(replace(facts, hidden_size=48))
    with pytest.raises(ConfigError, match="one device, not on 2"):
        replace(cpu, options=EngineOptions(draft="it", tensor_parallel=2)).plan(facts)


@pytest.mark.parametrize("more", [{}, ORDERED], ids=["all tokens", "ordered"])
def test_the_plan_counts_every_tensor_of_an_assistant(
    more: dict[str, Any], tiny: Callable, tiny_of: Callable, tmp_path: Path
) -> None:
    """Those beside the decoder are 33 MB of gemma-4-31B-it-assistant."""
    with open_model(assistant_of(tiny_of, tiny("gemma4"), **more).save(tmp_path)) as checkpoint:
        assert checkpoint.facts.weight_bytes == sum(info.nbytes for info in checkpoint.tensors.values())


def test_layers_of_one_kind_share_a_table_of_rotations(
    tiny: Callable, tiny_of: Callable, loaded: Callable, tmp_path: Path
) -> None:
    """The plan counts one per rotation: 134 MB for 131,072 positions and heads of 256."""
    own = loaded_for(assistant_of(tiny_of, tiny("gemma4")), loaded("gemma4"), tmp_path)
    assert len(own.layers) == 3 and len({id(rope) for _, rope in own.views}) == len(own.views) == 2
    assert [view for *_, view in own.calls] == [0, 0, 1]


def test_a_full_gpu_is_reported_as_for_any_model(
    tiny: Callable, tiny_of: Callable, loaded: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(reader: Loading) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    one, model = assistant_of(tiny_of, tiny("gemma4")), loaded("gemma4")
    monkeypatch.setattr(Loading, "tables", full)
    with pytest.raises(OutOfMemory, match="the GPU ran out of memory while loading: CUDA out of memory"):
        loaded_for(one, model, tmp_path)


def test_ordered_embeddings_with_a_head_of_their_own_are_refused(
    tiny: Callable, tiny_of: Callable, tmp_path: Path
) -> None:
    """Logits of a few tokens are computed from rows of the embedding."""
    target = tiny("gemma4")
    head = {"lm_head.weight": torch.randn(99, 24)}
    untied = {"tie_word_embeddings": False}
    assert not open_model(assistant_of(tiny_of, target).save(tmp_path / "all", head, **untied)).facts.tied_embeddings
    with pytest.raises(UnsupportedModel, match="use_ordered_embeddings and an untied head"):
        _ = open_model(assistant_of(tiny_of, target, **ORDERED).save(tmp_path / "few", head, **untied)).facts


def test_files_of_an_assistant_that_are_damaged_are_refused(
    tiny: Callable, tiny_of: Callable, loaded: Callable, tmp_path: Path
) -> None:
    one, model = assistant_of(tiny_of, tiny("gemma4"), **ORDERED), loaded("gemma4")
    key = "masked_embedding.token_ordering"
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        f"{key}: is missing; 99 token ids are expected": ({key: None}, {}),
        f"{key}: holds F32 .99.": ({key: torch.zeros(99)}, {}),
        f"{key}: has token ids from 0 to 99": ({key: torch.arange(99) + (torch.arange(99) == 98)}, {}),
        "pre_projection.weight: the weight has shape": (
            {"pre_projection.weight": torch.zeros(24, 87)},
            {},
        ),
        "num_centroids.* is 10, which does not divide 99 tokens": ({}, {"num_centroids": 10}),
        "centroid_intermediate_top_k": ({}, {"centroid_intermediate_top_k": 12}),
    }
    for number, (words, (tensors, config)) in enumerate(cases.items()):
        folder = one.save(tmp_path / str(number), tensors, **config)
        with pytest.raises(BadModelFile, match=words), open_model(folder) as checkpoint:
            load_assistant(checkpoint, LoadOptions(exact=True), model.facts)


def test_lists_show_one_without_a_tokenizer(tiny: Callable, tiny_of: Callable, tmp_path: Path) -> None:
    folder = assistant_of(tiny_of, tiny("gemma4")).save(tmp_path / "it")
    row = local.describe(local.LocalModel("org/it", folder, "hub", size_bytes=1))
    assert (row.broken, row.supported, row.chat) == (False, True, False)
    with open_model(folder) as checkpoint:
        fields = show._show_fields(checkpoint, "org/it", "", EngineOptions())
        assert not fields["capabilities"]["chat"] and "cannot run alone" in fields["plan"]["reason"]
        assert "--draft" in show._chats(checkpoint.facts)
    assert pull._fits(folder, EngineOptions()) == (None, None)


@pytest.mark.parametrize("name", NAMES)
def test_gguf_is_the_same_assistant(name: str, tiny: Callable, tiny_of: Callable, tmp_path: Path) -> None:
    one = assistant_of(tiny_of, tiny(name))
    target = open_model(tiny(name).save(tmp_path / "target")).facts
    ours = [open_model(one.save(tmp_path / "hf")), open_model(as_gguf(one, tmp_path / "mtp-tiny.gguf"))]
    whole, packed = (load_assistant(checkpoint, LoadOptions(exact=True), target) for checkpoint in ours)
    assert packed.sources == whole.sources and ours[1].facts.num_layers == 3 and not ours[1].facts.extra_layers
    assert ours[1].facts.num_params == ours[0].facts.num_params
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    assert torch.equal(packed.head(x), whole.head(x)) and torch.equal(packed.after(x), whole.after(x))
    both = torch.cat([x, x, x, x], 1)[:, :88]
    assert torch.equal(packed.before(both), whole.before(both))


@pytest.mark.slow
def test_a_drafter_next_to_a_gguf_model_drafts_by_itself(tiny: Callable, tiny_of: Callable, tmp_path: Path) -> None:
    one = tiny("gemma4-e2b")
    path = write_gguf(tmp_path / "tiny.gguf", one.config, one.tensors, gguf.GGMLQuantizationType.F32)
    as_gguf(assistant_of(tiny_of, one), tmp_path / "mtp-gemma-4-tiny.gguf")

    def answered(llm: LLM) -> list[int]:
        return llm.generate("t5 t6 t7", SamplingParams(seed=3, max_tokens=24, ignore_eos=True)).completions[0].token_ids

    with LLM(path, ctx=256, speculation="off") as llm:
        wanted = answered(llm)
    with LLM(tmp_path, ctx=256, speculation="draft", debug_invariants=True) as llm:
        assert llm.path == tmp_path  # the folder has one model
    with LLM(path, ctx=256, speculation="draft", debug_invariants=True) as llm:
        assert answered(llm) == wanted and llm.engine.stats().num_draft_tokens > 12 and not llm.state().warnings
        planner = with_drafter_beside(Planner.here(llm.options), llm.facts, path)
        assert planner.plan(llm.facts, path).weight_bytes == llm.plan.weight_bytes
    as_gguf(assistant_of(tiny_of, tiny("gemma4")), tmp_path / "mtp-gemma-4-tiny.gguf")
    with LLM(path, ctx=256) as llm:
        assert answered(llm) == wanted and llm.engine.runner.listener is None
        assert with_drafter_beside(Planner.here(llm.options), llm.facts, path).draft is None
        assert any("mtp-gemma-4-tiny.gguf next to the model does not draft" in line for line in llm.state().warnings)


def test_a_drafter_that_nobody_asked_for_never_moves_the_model(
    tiny: Callable, tiny_of: Callable, tmp_path: Path
) -> None:
    facts = open_model(tiny("gemma4").save(tmp_path / "target")).facts
    draft = open_model(assistant_of(tiny_of, tiny("gemma4")).save(tmp_path / "draft")).facts
    gpu = Planner(MACHINES["rtx5090"])
    found = planner_with(gpu, draft, facts, tmp_path)
    assert found is not None and found.draft is draft and found.plan(facts).device.startswith("cuda")
    large = replace(draft, weight_bytes=40 << 30, stored_format="bf16")
    moved = replace(gpu, draft=large).plan(facts)
    assert (moved.device, moved.fits) == ("cpu", True), (moved.weight_bytes, moved.have_bytes)
    assert planner_with(gpu, large, facts, tmp_path) is None
