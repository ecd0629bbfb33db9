"""DFlash drafters fill a block of masks in one pass: against transformers, and at work."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from localllm import LLM
from localllm.boot.assembly import assemble
from localllm.cli.commands import pull, show
from localllm.config import EngineOptions
from localllm.device.fake import MACHINES
from localllm.engine.cuda_graph import Captured, Run
from localllm.engine.decode_inputs import DecodeInputs
from localllm.engine.dflash import DFlashDrafter, _Heard
from localllm.engine.engine import Engine
from localllm.engine.scheduler import Scheduled, Step
from localllm.engine.sequence import Sequence
from localllm.engine.speculation import Speculation
from localllm.errors import BadModelFile, ConfigError, UnsupportedModel
from localllm.hub import local
from localllm.models.architectures import open_model
from localllm.models.dflash import DFlashModel, load_dflash
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model
from localllm.plan.memory import GRAPH_BYTES
from localllm.plan.planner import Planner
from localllm.request import CAPTURED_BLOCKS, Request, SamplingParams

from .test_decode_graphs import CONTEXT, PAGE, PAGES, answers, engine_of, requests, rerun
from .test_gguf_models import write_gguf

slow = pytest.mark.slow
BLOCK, MASK = 6, 98


@dataclass
class Drafter:
    """transformers' model, and its files in one of the layouts in which they are published."""

    reference: Any
    window: int

    @property
    def tensors(self) -> dict[str, Tensor]:
        names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
        found = {}
        for key, value in self.reference.state_dict().items():
            start = next((one for one in names if key.startswith(one)), "")
            found[names.get(start, "") + key.removeprefix(start)] = value.detach().clone().contiguous()
        return found

    def save(self, folder: Path, layout: str = "z-lab", more: Any = (), **changes: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads(self.reference.config.to_json_string(use_diff=False))
        config |= {
            "vocab_size": 99,
            "architectures": ["MuseGlimmerAssistantModel"],
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        tensors = self.tensors
        if layout == "z-lab":
            own = {"target_layer_ids": config.pop("target_layer_ids"), "mask_token_id": config.pop("mask_token_id")}
            config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": own}
        else:
            tensors = {key: value.contiguous() for key, value in self.reference.state_dict().items()}
        (folder / "config.json").write_text(json.dumps(config | changes))
        save_file(tensors | dict(more), folder / "model.safetensors")
        return folder

    def as_gguf(self, path: Path) -> Path:
        """As llama.cpp's converter writes it."""
        config = json.loads(self.reference.config.to_json_string(use_diff=False))
        tensors = {
            key if key.startswith(("fc.", "hidden_norm.")) else f"model.{key}": value
            for key, value in self.tensors.items()
        }
        config |= {"model_type": "dflash", "vocab_size": 99}
        return write_gguf(path, config, tensors, gguf.GGMLQuantizationType.F32)


def drafter_of(target: Any, windows: tuple[int, ...] = (0, 5), seed: int = 3) -> Drafter:
    """One for a tiny model; a layer for each window, 0 for full attention."""
    from transformers import MuseGlimmerAssistantConfig
    from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantModel

    theirs = target.reference.config.get_text_config()
    taps = [0, theirs.num_hidden_layers - 2] if theirs.num_hidden_layers > 2 else [0]
    config = MuseGlimmerAssistantConfig(
        hidden_size=theirs.hidden_size, intermediate_size=50, num_hidden_layers=len(windows), num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=max(windows) or None, block_size=BLOCK, mask_token_id=MASK,
        target_layer_ids=taps, layer_types=["sliding_attention" if one else "full_attention" for one in windows],
    )  # fmt: skip
    torch.manual_seed(seed)
    model = MuseGlimmerAssistantModel._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * spread if "norm" in key else spread * parameter.shape[-1] ** -0.5)
    return Drafter(model, max(windows))


def expected_drafts(target: Any, one: Drafter, ids: list[int], causal: bool) -> list[int]:
    """Those of transformers, when the model has read all of `ids` but the last.

    causal   layers with a window see only what is before a token; else all of a block see the same window
    """
    known = len(ids) - 1
    table = target.reference.get_input_embeddings()
    noise = torch.nn.functional.embedding(torch.tensor([[ids[-1], *[MASK] * (BLOCK - 1)]]), table.weight)
    noise = noise * float(getattr(table, "embed_scale", 1.0))
    seen = torch.zeros(1, 1, BLOCK, known + BLOCK)
    keys, own = torch.arange(known + BLOCK), torch.arange(known, known + BLOCK)[:, None]
    last = own if causal else torch.full_like(own, known + BLOCK - 1)
    near = torch.where((keys > last - one.window) & (keys <= last), 0.0, float("-inf"))[None, None]
    with torch.no_grad():
        read = target.reference(torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False)
        context = torch.cat([read.hidden_states[layer + 1] for layer in one.reference.config.target_layer_ids], -1)
        made = one.reference(
            noise_embeds=noise,
            context_hidden_states=context,
            position_ids=torch.arange(known + BLOCK)[None],
            attention_mask={"full_attention": seen, "sliding_attention": near},
            use_cache=False,
        )
        head = target.reference.get_output_embeddings()
        best: list[int] = head(made.last_hidden_state[0, 1:]).argmax(-1).tolist()
        return best


class Checked(DFlashDrafter):
    """Keeps what it was asked and what it answered."""

    def __init__(self, engine: Engine, own: DFlashModel, blocks: int = 5) -> None:
        inputs = DecodeInputs(blocks * BLOCK, CONTEXT, PAGE, [PAGES] * len(engine.runner.cache.groups), "cpu")
        super().__init__(engine.runner, own, inputs, 64, 0.1)
        self.extend = engine.scheduler.pages.extend
        self.seen: list[tuple[list[int], tuple[int, ...]]] = []
        engine.runner.listener = self
        engine.stepper.speculation = Speculation(self, "always", goes_back=bool(engine.runner.model.states))

    def propose(self, sequences: Any, counts: Any) -> list[tuple[int, ...]]:
        found = super().propose(sequences, counts)
        pairs = zip(sequences, found, strict=True)
        self.seen += [(list(one.token_ids), drafts) for one, drafts in pairs if drafts]
        return found


def loaded_pair(target: Any, one: Drafter, folder: Path, layout: str = "z-lab") -> tuple[Model, DFlashModel]:
    options = LoadOptions(exact=True)
    with open_model(one.save(folder / "draft", layout)) as draft, open_model(target.save(folder / "model")) as whole:
        model = load_model(whole, replace(options, drafting=draft.facts.layers))
        return model, load_dflash(draft, options, model)


FORMS = ("eager", "graphs", "preempted", "graphs, preempted")
NAMES = ("qwen3", "muse-glimmer", "qwen3.5", "gemma3", "gpt-oss", "qwen3-moe", "gemma4-moe", "mistral")
QUICK = [("qwen3", "graphs"), ("qwen3.5", "eager"), ("muse-glimmer", "preempted")]
MANY = [(name, form) for name in NAMES for form in FORMS]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "form"), [*QUICK, *(pytest.param(*case, marks=slow) for case in MANY if case not in QUICK)]
)
def test_drafts_match_transformers_and_change_no_token(name: str, form: str, tiny: Callable, tmp_path: Path) -> None:
    """Windows, chunks, batches, the prefix tree, preemption, right and wrong drafts, and with graphs no eager pass."""
    target = tiny(name)
    one = drafter_of(target)
    model, own = loaded_pair(target, one, tmp_path, "muse" if name == "muse-glimmer" else "z-lab")
    expected = answers(engine_of(model), requests(1))
    captured = form.startswith("graphs")
    engine = engine_of(model, *((1, 2, 4, 5), True) if captured else (), guesses=(2, 4, 8, 16, 64) if captured else ())
    checked = Checked(engine, own)
    if captured:
        checked.graphs(rerun).capture()
    if "preempted" in form:
        engine.scheduler.limits = replace(engine.scheduler.limits, preempt_every=7)
    for _ in range(1 + ("preempted" not in form)):
        assert answers(engine, requests(1)) == expected
    assert engine.runner.listener is checked and len(checked.seen) > 20
    for ids, drafts in random.Random(1).sample(checked.seen, 20):
        assert list(drafts) == expected_drafts(target, one, ids, name != "muse-glimmer")[: len(drafts)]


@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("gemma3", marks=slow)])
def test_a_model_with_its_drafter_answers_the_same(name: str, tiny: Callable, tmp_path: Path) -> None:
    """From files, through plan, loader, boot, sleep and a failure."""
    one = tiny(name)
    path = write_gguf(tmp_path / "tiny.gguf", one.config, one.tensors, gguf.GGMLQuantizationType.F32)
    draft = str(drafter_of(one).save(tmp_path / "drafter"))

    def answered(llm: LLM) -> list[list[int]]:
        texts = ["t5 t6 t7", "t9", "t8 t8 t8 t8"]
        params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
        return [output.completions[0].token_ids for output in llm.generate(texts, params)]

    with LLM(path, ctx=256, speculation="off") as llm:
        wanted, held, kept = answered(llm), llm.state().weight_bytes, llm.plan.kv_bytes
    with LLM(path, ctx=256, speculation="draft", draft=draft, debug_invariants=True) as llm:
        assert answered(llm) == wanted and answered(llm) == wanted
        assert "speculation draft, " in llm.run_summary and "draft tokens accepted" in llm.run_summary
        assert llm.state().weight_bytes > held and llm.plan.kv_bytes > kept and llm.plan.draft_pages == ()
        assert any("of weights and the KV cache of 2 layers" in reason for reason in llm.plan.reasons)
        llm.sleep()
        llm.wake()
        assert answered(llm) == wanted and llm.engine.stats().num_draft_tokens > 12 and not llm.state().warnings
        drafter = llm.engine.runner.listener
        assert llm._model.taps is drafter.taps
        drafter.hear = lambda step, hidden: 1 / 0
        assert answered(llm) == wanted
        assert any("the draft model is off" in line for line in llm.state().warnings)
        assert llm._model.taps is None, "nobody reads what steps would copy"
        llm.engine.runner.listener = drafter
        assert llm._model.taps is drafter.taps
    with LLM(path, ctx=256, draft=draft) as llm:  # where it is measured to pay
        assert answered(llm) == wanted


def test_one_that_cannot_draft_is_refused(tiny: Callable, tmp_path: Path) -> None:
    target, other = tiny("qwen3"), tiny("gemma4-e2b")
    facts = open_model(target.save(tmp_path / "target")).facts
    draft = open_model(drafter_of(target).save(tmp_path / "draft", num_target_layers=3)).facts
    cpu = Planner(MACHINES["cpu"], EngineOptions(draft="it"), draft=draft)
    plan, alone = cpu.plan(facts), Planner(MACHINES["cpu"]).plan(facts)
    assert (
        plan.weight_bytes > alone.weight_bytes and plan.sequence_bytes > alone.sequence_bytes and not plan.draft_pages
    )
    with pytest.raises(UnsupportedModel, match="drafts tokens for a larger model and cannot run alone") as raised:
        Planner(MACHINES["cpu"]).plan(draft)
    assert "--draft" in raised.value.hint
    with pytest.raises(UnsupportedModel, match="cannot run alone"):
        LLM(tmp_path / "draft")
    with pytest.raises(ConfigError, match="cannot draft for a model with per-layer inputs or"):
        cpu.plan(open_model(other.save(tmp_path / "other")).facts)
    with pytest.raises(ConfigError, match="44 hidden units and 99 tokens, and this one has 48 and 99"):
        cpu.plan(replace(facts, hidden_size=48))
    with pytest.raises(ConfigError, match="a model with 3 layers, and this one has 2"):
        cpu.plan(replace(facts, layers=facts.layers[:2]))
    with pytest.raises(ConfigError, match="one device, not on 2"):
        replace(cpu, options=EngineOptions(draft="it", tensor_parallel=2)).plan(facts)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, UnsupportedModel, "DFlash2DraftModel is not supported"),
        ({"dflash_config": {"mask_token_id": 3}}, BadModelFile, "target_layer_ids: must list layer numbers"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [2, 1]}}, BadModelFile, "in order"),
        ({"dflash_config": {"mask_token_id": 99, "target_layer_ids": [0]}}, BadModelFile, "mask_token_id"),
        ({"block_size": 1}, BadModelFile, "block_size: must be 2 to 64, not 1"),
        ({"block_size": 300}, BadModelFile, "block_size: must be 2 to 64, not 300"),
        ({"hidden_size": 48}, BadModelFile, "expected"),
    ],
)
def test_files_of_other_drafters_are_refused(
    changes: dict[str, Any], error: type[Exception], match: str, tiny: Callable, tmp_path: Path
) -> None:
    with pytest.raises(error, match=match):
        _ = open_model(drafter_of(tiny("qwen3")).save(tmp_path, **changes)).facts


def test_parts_of_other_drafters_are_refused(tiny: Callable, tmp_path: Path) -> None:
    one = drafter_of(tiny("qwen3"))
    for name, what in {"markov_head.w1.weight": "DSpark", "layers.0.attn_conv.base": "DFlash 2"}.items():
        with pytest.raises(UnsupportedModel, match=what):
            _ = open_model(one.save(tmp_path / what, more={name: torch.zeros(3)})).facts
    copies = {"embed_tokens.weight": torch.zeros(99, 44), "lm_head.weight": torch.zeros(99, 44)}
    facts = open_model(one.save(tmp_path / "copies", more=copies)).facts  # of the larger model's tables
    assert facts.weight_bytes == open_model(one.save(tmp_path / "none")).facts.weight_bytes


def test_gguf_is_the_same_drafter(tiny: Callable, tmp_path: Path) -> None:
    target = tiny("gemma3")
    one = drafter_of(target)
    model, whole = loaded_pair(target, one, tmp_path)
    with open_model(one.as_gguf(tmp_path / "drafter.gguf")) as checkpoint:
        packed = load_dflash(checkpoint, LoadOptions(exact=True), model)
    assert (
        packed.facts.dflash == replace(whole.facts.dflash, num_layers=0) and packed.facts.layers == whole.facts.layers
    )
    assert packed.facts.num_params == whole.facts.num_params == sum(map(torch.numel, one.tensors.values()))
    x = torch.randn(5, 88, generator=torch.Generator().manual_seed(1))
    assert torch.equal(packed.fc(x), whole.fc(x)) and torch.equal(packed.norm.weight, whole.norm.weight)


def test_a_drafter_is_listed_and_shown(tiny: Callable, tmp_path: Path) -> None:
    path = drafter_of(tiny("qwen3")).save(tmp_path / "drafter")
    assert local._read_facts(path).only_drafts and pull._fits(path, EngineOptions()) == (None, None)
    with open_model(path) as checkpoint:
        assert show._chats(checkpoint.facts) == "no: a drafter, for `localllm chat MODEL --draft`"
        assert not show._capabilities(checkpoint)["chat"]
        fields = show._show_fields(checkpoint, "qwen/qwen3.6-27b-fp8:Q4_K_M", "", EngineOptions())
        assert fields["drafter"] == "z-lab/Qwen3.6-27B-DFlash"  # of a model with that name
        assert show._show_fields(checkpoint, "tiny", "", EngineOptions())["drafter"] is None
        assert checkpoint.facts.weight_bytes == sum(info.nbytes for info in checkpoint.tensors.values())


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen3.5", marks=slow)])
def test_an_assembled_engine_captures_the_blocks(name: str, tiny: Callable, tmp_path: Path) -> None:
    """Graphs of one block and of two, beside those of the model; a block is no larger than a captured step."""
    model, own = loaded_pair(tiny(name), drafter_of(tiny(name)), tmp_path)
    options = EngineOptions(ctx=CONTEXT, max_parallel=3, kv="f32", speculation="draft", prefill_budget=24)
    facts = replace(model.facts, drafting=())
    made = replace(
        Planner(MACHINES["cpu"], options, draft=own.facts).plan(facts),
        graph_buckets=(1, 2, 3),
        guess_buckets=(2, 4, 8, 16) if model.states else (4, 8, 16),
        num_drafts=15,
    )
    assert assemble(model, replace(made, graph_buckets=()), draft=own).runner.cache.nbytes == made.kv_bytes
    shapes: list[int] = []

    def capture(run: Run) -> Captured:
        shapes.append(run.args[0].token_ids.shape[0] if run.func.__name__ == "compute" else 0)
        return rerun(run)

    engine = assemble(model, made, draft=own, capture=capture, check_invariants=True)
    assert list(engine.runner.beside) == ["the draft model"]
    assert {BLOCK, 2 * BLOCK} <= set(shapes) and not engine.runner.graphs.failure
    expected = answers(engine_of(model), requests(2))
    assert answers(engine, requests(2)) == expected
    stats = engine.stats()
    assert stats.num_draft_tokens > 12 and engine.runner.listener is not None
    assert engine.scheduler.limits.draft_rows == 16


@pytest.mark.parametrize(
    ("layout", "changes", "windows", "causal"),
    [
        ("z-lab", {}, (None, 5), (False, True)),
        ("z-lab", {"layer_types": None}, (None, None), (False, False)),
        ("z-lab", {"is_causal": False}, (None, 5), (False, False)),
        ("z-lab", {"causal": True}, (None, 5), (True, True)),
        ("z-lab", {"use_swa": True, "swa_window_size": 7, "layer_types": None}, (7, 7), (False, False)),
        ("muse", {}, (None, 5), (False, False)),
    ],
)
def test_what_a_token_of_a_block_sees(
    layout: str,
    changes: dict[str, Any],
    windows: tuple[Any, ...],
    causal: tuple[bool, ...],
    tiny: Callable,
    tmp_path: Path,
) -> None:
    """As vLLM reads files of z-lab and MiMo, and transformers those of Muse Glimmer."""
    own = {"target_layer_ids": [0, 1], "mask_token_id": MASK} | changes
    outer = {key: own.pop(key) for key in ("is_causal", "layer_types") if key in own}
    more = outer | ({"dflash_config": own} if layout == "z-lab" else {})
    facts = open_model(drafter_of(tiny("qwen3")).save(tmp_path, layout, **more)).facts
    assert (facts.windows, facts.dflash.causal) == (windows, causal)


def test_with_many_sequences_one_may_still_draft_a_block(tiny: Callable, tmp_path: Path) -> None:
    """Then a graph of the model has room for a token and its drafts, and none of its own is captured for that."""
    model, own = loaded_pair(tiny("qwen3"), drafter_of(tiny("qwen3")), tmp_path)
    facts = replace(model.facts, drafting=())
    for parallel in (1, 8, 16, 32):
        options = EngineOptions(ctx=256, max_parallel=parallel, draft="it", gpu_mem=0.5)
        made = Planner(MACHINES["h100"], options, draft=own.facts).plan(facts)
        assert made.num_drafts == 15 and 16 in (*made.graph_buckets, *made.guess_buckets)
        on_cpu = replace(made, device="cpu", kv="f32", graph_buckets=(1,), num_pages=(20,) * 3)
        engine = assemble(model, on_cpu, draft=own, capture=rerun)
        assert engine.scheduler.limits.draft_rows == 16


def test_the_plan_counts_the_graphs_of_its_passes_and_no_others(tiny: Callable, tmp_path: Path) -> None:
    model, own = loaded_pair(tiny("qwen3"), drafter_of(tiny("qwen3")), tmp_path)
    facts, options = replace(model.facts, drafting=()), EngineOptions(ctx=256, draft="it", gpu_mem=0.5)
    plans = [Planner(MACHINES["h100"], options, draft=draft).plan(facts) for draft in (own.facts, None)]
    drafted, alone = (dict(one.work_terms) for one in plans)
    assert len(CAPTURED_BLOCKS) * GRAPH_BYTES <= drafted["graphs"] - alone["graphs"] < 3 * GRAPH_BYTES


def test_an_embedding_model_keeps_nothing_for_a_drafter(tiny: Callable, tmp_path: Path) -> None:
    facts = open_model(tiny("qwen3").save(tmp_path / "target")).facts
    draft = open_model(drafter_of(tiny("qwen3")).save(tmp_path / "draft")).facts
    cpu = Planner(MACHINES["cpu"], EngineOptions(draft="it"), draft=draft)
    assert len(cpu.plan(facts).num_pages) == 3 and len(cpu.plan(replace(facts, pooling="last")).num_pages) == 1


def test_nothing_is_drafted_beyond_the_context_of_the_drafter(tiny: Callable, tmp_path: Path) -> None:
    """Later hidden states are not stored, and steps are launched ahead again."""
    model, own = loaded_pair(tiny("qwen3"), drafter_of(tiny("qwen3")), tmp_path)
    engine = engine_of(model)
    inputs = DecodeInputs(5 * BLOCK, 40, PAGE, [PAGES] * len(engine.runner.cache.groups), "cpu")
    checked = Checked(engine, own)
    DFlashDrafter.__init__(checked, engine.runner, own, inputs, 64, 0.1)
    checked.extend = engine.scheduler.pages.extend
    asked = [Request([3, 4, 5], SamplingParams(temperature=0, max_tokens=70, ignore_eos=True))]
    assert answers(engine, asked) == answers(engine_of(model), asked)
    assert 25 < max(len(ids) for ids, _ in checked.seen) <= 40 - BLOCK + 1
    sequence = Sequence(Request([1] * 36, SamplingParams(max_tokens=70)), 0, 2, 0, 120)
    sequence.append(1)
    assert not engine.stepper.speculation.wants(Step([Scheduled(sequence, 36, 1)]), 16)


def test_forced_tokens_are_not_taken_for_accepted_drafts() -> None:
    sequence = Sequence(Request([1, 2, 3], SamplingParams()), 0, 1, 0, 100)
    heard = _Heard(0, 0, [], (7, 8, 9), 3)
    for token in (7, 8, 5):
        sequence.append(token)
        assert heard.reaches(sequence)  # the last token is not computed yet
    sequence.append(6)  # by a grammar, behind the one that differs
    assert not heard.reaches(sequence)
    sequence.num_preemptions += 1
    assert not _Heard(0, 0, [], (), 6).reaches(sequence)
