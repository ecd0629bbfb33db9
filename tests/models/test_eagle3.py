"""EAGLE-3 drafters: against layers of transformers, and at work."""

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
from torch import Tensor, nn

from localllm import LLM
from localllm.boot.assembly import assemble
from localllm.config import EngineOptions
from localllm.device.fake import MACHINES
from localllm.engine.engine import Engine
from localllm.engine.mtp import HeadDrafter
from localllm.engine.speculation import Speculation
from localllm.errors import BadModelFile, ConfigError, UnsupportedModel
from localllm.models.architectures import open_model
from localllm.models.architectures.layers import Eagle3
from localllm.models.eagle3 import Eagle3Head, Eagle3Model, load_eagle3
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model
from localllm.plan.planner import Planner
from localllm.request import SamplingParams

from .test_decode_graphs import CONTEXT, answers, engine_of, requests, rerun
from .test_gguf_models import write_gguf

slow = pytest.mark.slow
IDS = "eagle_aux_hidden_state_layer_ids"
DRAFTED = 61  # tokens of the head, of 99


class Reference(nn.Module):
    """Layers of transformers, put together as published code does."""

    def __init__(self, target: Any, kind: str, count: int, taps: int, options: dict[str, bool]) -> None:
        super().__init__()
        from transformers import AutoConfig
        from transformers.models.llama import modeling_llama as llama
        from transformers.models.qwen3 import modeling_qwen3 as qwen3

        theirs = target.reference.config.get_text_config()
        hidden = theirs.hidden_size
        module, start = (llama, "Llama") if kind == "llama" else (qwen3, "Qwen3")
        self.config = AutoConfig.for_model(
            kind, vocab_size=99, hidden_size=hidden, intermediate_size=50, num_hidden_layers=count, head_dim=16,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, rope_theta=5000.0,
        )  # fmt: skip
        self.config._attn_implementation = "eager"
        norm = getattr(module, f"{start}RMSNorm")
        layer = getattr(module, f"{start}DecoderLayer")
        self.layers = nn.ModuleList(layer(self.config, index) for index in range(count))
        for name in "qkv":
            old = getattr(self.layers[0].self_attn, f"{name}_proj")
            setattr(self.layers[0].self_attn, f"{name}_proj", nn.Linear(2 * hidden, old.out_features, bias=False))
        self.layers[0].hidden_norm = norm(hidden, eps=1e-6)
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        if options.get("norm_before_fc"):
            self.input_norm = norm(taps * hidden, eps=1e-6)
        if options.get("fc_norm"):
            self.fc_norm = nn.ModuleList(norm(hidden, eps=1e-6) for _ in range(taps))
        self.norm = norm(hidden, eps=1e-6)
        self.lm_head = nn.Linear(hidden, DRAFTED, bias=False)
        self.rotary = getattr(module, f"{start}RotaryEmbedding")(self.config)
        self.options = options

    def read(self, hidden: list[Tensor]) -> Tensor:
        if self.options.get("fc_norm"):
            hidden = [norm(one) for norm, one in zip(self.fc_norm, hidden, strict=True)]
        joined = torch.cat(hidden, -1)
        return self.fc(self.input_norm(joined) if self.options.get("norm_before_fc") else joined)

    def forward(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, hidden] each -> the next hidden state and logits of the last row."""
        count = embedded.shape[0]
        first, mask = self.layers[0], torch.full((count, count), float("-inf")).triu(1)[None, None]
        turned = self.rotary(hidden[None], torch.arange(count)[None])
        normed = first.hidden_norm(hidden)
        x = torch.cat([first.input_layernorm(embedded), normed], -1)[None]
        x = first.self_attn(hidden_states=x, position_embeddings=turned, attention_mask=mask)[0][0]
        x = x + (normed if self.options.get("norm_before_residual") else hidden)
        x = x + first.mlp(first.post_attention_layernorm(x))
        for layer in self.layers[1:]:
            made = layer(x[None], position_embeddings=turned, attention_mask=mask)
            x = (made[0] if isinstance(made, tuple) else made)[0]
        normed = self.norm(x[-1])
        return normed if self.options.get("norm_output") else x[-1], self.lm_head(normed)


@dataclass
class Drafter:
    """The reference, and its files in one of the layouts in which they are published."""

    reference: Reference
    tokens: Tensor  # of the rows of the head
    taps: tuple[int, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {key: value.detach().clone().contiguous() for key, value in self.reference.state_dict().items()}
        return {key: value for key, value in found.items() if not key.startswith("rotary")}

    def save(self, folder: Path, layout: str = "speculators", more: Any = (), **changes: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        reference, tensors = self.reference, self.tensors
        layer = json.loads(reference.config.to_json_string(use_diff=False))
        own: dict[str, Any] = {"draft_vocab_size": DRAFTED, "norm_before_residual": False, **reference.options}
        if layout == "speculators":
            config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"} | own
            config |= {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in self.taps]}
            config |= {"transformer_layer_config": layer}
        else:
            config = layer | own | {"architectures": ["LlamaForCausalLMEagle3"]}
            config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps)}}
            tensors = {key.replace("layers.0.", "midlayer."): value for key, value in tensors.items()}
        tensors |= {"d2t": self.tokens - torch.arange(DRAFTED), "t2d": torch.zeros(99, dtype=torch.bool)}
        (folder / "config.json").write_text(json.dumps(config | changes))
        save_file(tensors | dict(more), folder / "model.safetensors")
        return folder

    def as_gguf(self, path: Path) -> Path:
        """As llama.cpp's converter writes it."""
        config = json.loads(self.reference.config.to_json_string(use_diff=False))
        config |= {"model_type": "eagle3", "taps": self.taps, "d2t": self.tokens} | self.reference.options
        inner = ("layers.", "norm.")
        tensors = {f"model.{key}" if key.startswith(inner) else key: value for key, value in self.tensors.items()}
        return write_gguf(path, config, tensors, gguf.GGMLQuantizationType.F32)


def drafter_of(target: Any, kind: str = "llama", count: int = 1, **options: bool) -> Drafter:
    """One for a tiny model, which reads its first and its last layer and one between."""
    layers = target.reference.config.get_text_config().num_hidden_layers
    taps = tuple(sorted({0, layers // 2, layers - 1}))
    torch.manual_seed(len(options) + count)
    model = Reference(target, kind, count, len(taps), options).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * spread if "norm" in key else spread * parameter.shape[-1] ** -0.5)
    return Drafter(model, torch.randperm(99)[:DRAFTED].sort().values, taps)


def outputs_of(target: Any, ids: list[int], taps: tuple[int, ...]) -> list[Tensor]:
    """What leaves these layers in transformers, before any norm: [tokens, hidden] each."""
    found: dict[int, Tensor] = {}
    inner = target.reference.get_decoder() if hasattr(target.reference, "get_decoder") else target.reference.model

    def keep(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, made: Any) -> None:
            found[number] = (made[0] if isinstance(made, tuple) else made).reshape(len(ids), -1)

        return hook

    hooks = [inner.layers[tap].register_forward_hook(keep(tap)) for tap in taps]
    with torch.no_grad():
        target.reference(torch.tensor([ids]), use_cache=False)
    for one in hooks:
        one.remove()
    return [found[tap] for tap in taps]


def expected_drafts(target: Any, one: Drafter, ids: list[int], count: int) -> list[int]:
    """Those of the reference when the model has read all of `ids` but the last, everything computed anew each time."""
    table = target.reference.get_input_embeddings().weight
    tokens, found = list(ids[1:]), []
    with torch.no_grad():
        hidden = one.reference.read(outputs_of(target, ids[:-1], one.taps))
        for _ in range(count):
            state, logits = one.reference(table[tokens].float(), hidden)
            found.append(int(one.tokens[logits.argmax()]))
            tokens.append(found[-1])
            hidden = torch.cat([hidden, state[None]])
    return found


class Checked(HeadDrafter):
    """Keeps what it was asked and what it answered."""

    def __init__(self, engine: Engine, own: Eagle3Model) -> None:
        super().__init__(
            engine.runner, Eagle3Head(own, engine.runner.cache, engine.runner.model.facts.vocab_size), 0.1, 64
        )
        self.engine = engine
        self.seen: list[tuple[list[int], tuple[int, ...]]] = []
        engine.runner.listener = self
        engine.stepper.speculation = Speculation(self, "always", goes_back=bool(engine.runner.model.states))

    def propose(self, sequences: Any, counts: Any) -> list[tuple[int, ...]]:
        found = super().propose(sequences, counts)
        for one, drafts in zip(sequences, found, strict=True):
            # of several answers to one prompt, the second is drafted for before its last page is copied
            if drafts and one.request.params.n == 1:
                self.seen.append((list(one.token_ids), drafts))
        return found


def loaded_pair(target: Any, one: Drafter, folder: Path, layout: str = "speculators") -> tuple[Model, Eagle3Model]:
    options = LoadOptions(exact=True)
    with open_model(one.save(folder / "draft", layout)) as draft, open_model(target.save(folder / "model")) as whole:
        model = load_model(whole, replace(options, drafting=draft.facts.layers))
        return model, load_eagle3(draft, options, model)


FORMS = ("eager", "graphs", "preempted", "graphs, preempted")
NAMES = ("qwen3", "qwen3.5", "llama", "gpt-oss", "qwen3-moe", "gemma3", "mistral", "granite", "granite-hybrid")
QUICK = [("qwen3", "graphs"), ("qwen3.5", "preempted")]
MANY = [(name, form) for name in NAMES for form in FORMS]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "form"), [*QUICK, *(pytest.param(*case, marks=slow) for case in MANY if case not in QUICK)]
)
def test_drafts_match_transformers_and_change_no_token(name: str, form: str, tiny: Callable, tmp_path: Path) -> None:
    """Chunks, batches, the prefix tree, preemption, right and wrong drafts, and with graphs no eager pass."""
    target = tiny(name)
    one = drafter_of(target)
    model, own = loaded_pair(target, one, tmp_path)
    expected = answers(engine_of(model), requests(1))
    captured = form.startswith("graphs")
    engine = engine_of(model, *((1, 2, 4, 5), True) if captured else (), guesses=(2, 4, 8, 16, 64) if captured else ())
    checked = Checked(engine, own)
    if captured:
        checked.graphs(engine.runner.graphs.inputs, (1, 2, 4, 8, 16, 64), rerun).capture()
    if "preempted" in form:
        engine.scheduler.limits = replace(engine.scheduler.limits, preempt_every=7)
    for _ in range(1 + ("preempted" not in form)):
        assert answers(engine, requests(1)) == expected
    assert engine.runner.listener is checked and len(checked.seen) > 20
    assert max(len(drafts) for _, drafts in checked.seen) == 3
    for ids, drafts in random.Random(1).sample(checked.seen, 20):
        assert list(drafts) == expected_drafts(target, one, ids, len(drafts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count", "options"),
    [
        ("llama", 1, {"norm_before_residual": True, "norm_before_fc": True}),
        ("qwen3", 2, {"norm_output": True, "fc_norm": True}),
        pytest.param("llama", 3, {"norm_before_residual": True}, marks=slow),
        pytest.param("qwen3", 1, {}, marks=slow),
    ],
)
@pytest.mark.parametrize("layout", ["speculators", "SafeAILab"])
def test_variants(kind: str, count: int, options: dict, layout: str, tiny: Callable, tmp_path: Path) -> None:
    """Norms in other places, a layer of Qwen3, several layers, and both layouts."""
    target = tiny("qwen3")
    one = drafter_of(target, kind, count, **options)
    if layout != "speculators" and count > 1:
        pytest.skip("files of one layer only")
    model, own = loaded_pair(target, one, tmp_path, layout)
    assert own.taps == one.taps
    engine = engine_of(model)
    checked = Checked(engine, own)
    assert answers(engine, requests(1)) == answers(engine_of(model), requests(1))
    for ids, drafts in random.Random(1).sample(checked.seen, 8):
        assert list(drafts) == expected_drafts(target, one, ids, len(drafts))


@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("mistral", marks=slow)])
def test_a_model_with_its_drafter_answers_the_same(name: str, tiny: Callable, tmp_path: Path) -> None:
    """From files, through plan, loader, boot and sleep."""
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
        assert any("of weights and the KV cache of 1 layer" in reason for reason in llm.plan.reasons)
        llm.sleep()
        llm.wake()
        assert answered(llm) == wanted and llm.engine.stats().num_draft_tokens > 12 and not llm.state().warnings
        drafter = llm.engine.runner.listener
        assert isinstance(drafter, HeadDrafter) and llm._model.taps is drafter.taps
        drafter.hear = lambda step, hidden: 1 / 0
        assert answered(llm) == wanted
        assert any("the draft model is off" in line for line in llm.state().warnings)
    with LLM(path, ctx=256, draft=draft) as llm:  # where it is measured to pay
        assert answered(llm) == wanted


def test_an_assembled_engine_captures_its_passes(tiny: Callable, tmp_path: Path) -> None:
    model, own = loaded_pair(tiny("qwen3"), drafter_of(tiny("qwen3")), tmp_path)
    options = EngineOptions(ctx=CONTEXT, max_parallel=3, kv="f32", speculation="draft", prefill_budget=24)
    facts = replace(model.facts, drafting=())
    made = replace(
        Planner(MACHINES["cpu"], options, draft=own.facts).plan(facts),
        graph_buckets=(1, 2, 3),
        guess_buckets=(4, 8, 16),
        num_drafts=15,
    )
    assert assemble(model, replace(made, graph_buckets=()), draft=own).runner.cache.nbytes == made.kv_bytes
    engine = assemble(model, made, draft=own, capture=rerun, check_invariants=True)
    assert list(engine.runner.beside) == ["the draft model"] and not engine.runner.graphs.failure
    assert answers(engine, requests(2)) == answers(engine_of(model), requests(2))
    assert engine.stats().num_draft_tokens > 12 and engine.runner.listener is not None


def test_gguf_is_the_same_drafter(tiny: Callable, tmp_path: Path) -> None:
    target = tiny("qwen3")
    one = drafter_of(target, norm_before_residual=True, norm_before_fc=True)
    model, whole = loaded_pair(target, one, tmp_path)
    options = LoadOptions(exact=True)
    with open_model(one.as_gguf(tmp_path / "drafter.gguf")) as draft, open_model(tmp_path / "model") as file:
        other = load_model(file, replace(options, drafting=draft.facts.layers))  # its rotation is interleaved
        packed = load_eagle3(draft, options, other)
    assert packed.own == whole.own and packed.taps == whole.taps == one.taps
    assert packed.facts.num_params == whole.facts.num_params == sum(map(torch.numel, one.tensors.values()))
    assert torch.equal(packed.tokens, whole.tokens) and torch.equal(packed.tokens, one.tokens)
    asked = [Checked(engine_of(one), own) for one, own in ((model, whole), (other, packed))]
    for checked in asked:
        answers(checked.engine, requests(1))
    assert asked[0].seen == asked[1].seen != []


def test_the_larger_models_embedding_is_used(tiny: Callable, tmp_path: Path) -> None:
    """A copy beside the drafter is neither loaded nor counted."""
    target = tiny("qwen3")
    one, table = drafter_of(target), target.reference.get_input_embeddings().weight.detach()
    plain = open_model(one.save(tmp_path / "none")).facts
    copy = open_model(one.save(tmp_path / "copy", more={"embed_tokens.weight": table.bfloat16()})).facts
    assert (copy.eagle3, copy.weight_bytes) == (plain.eagle3, plain.weight_bytes)
    model, own = loaded_pair(target, one, tmp_path)
    torch.testing.assert_close(own.embedding(torch.arange(9)), table[:9])
    assert own.embedding.nbytes == 0


def test_one_for_a_model_of_another_hidden_size(tiny: Callable, tmp_path: Path) -> None:
    """With tables of its own, it projects the larger model's hidden states to its own size."""
    target, narrow = tiny("qwen3"), tiny("qwen2")
    one, hidden = drafter_of(narrow), target.reference.config.hidden_size
    generator = torch.Generator().manual_seed(1)
    fc = torch.randn(36, 3 * hidden, generator=generator) * hidden**-0.5
    more = {"embed_tokens.weight": torch.randn(99, 36, generator=generator), "fc.weight": fc}
    options = LoadOptions(exact=True)
    with open_model(one.save(tmp_path / "draft", more=more, target_hidden_size=hidden)) as draft:
        with open_model(target.save(tmp_path / "model")) as whole:
            model = load_model(whole, replace(options, drafting=draft.facts.layers))
        own = load_eagle3(draft, options, model)
    checked = Checked(engine_of(model), own)
    assert answers(checked.engine, requests(1)) == answers(engine_of(model), requests(1)) and checked.seen
    with pytest.raises(UnsupportedModel, match="36 hidden units for 44, and no embedding and head"):
        _ = open_model(one.save(tmp_path / "without", target_hidden_size=hidden)).facts


def test_spellings_of_published_files(tiny: Callable, tmp_path: Path) -> None:
    """Nulls and empty lists state nothing, norms are where tensors are, and the type may be the larger model's."""
    one = drafter_of(tiny("qwen3"))
    found = [
        open_model(one.save(tmp_path / str(number), layout, **changes)).facts.eagle3
        for number, (layout, changes) in enumerate(
            (
                ("speculators", {"eagle_config": {IDS: [], "norm_before_fc": None}}),
                ("speculators", {IDS: None}),
                ("SafeAILab", {"model_type": "phi3"}),
                ("SafeAILab", {"architectures": ["LlamaForCausalLM"]}),
            )
        )
    ]
    assert [facts.stated for facts in found] == [(1, 2, 3), (), (0, 1, 2), (0, 1, 2)]
    normed = drafter_of(tiny("qwen3"), norm_before_fc=True)
    assert open_model(normed.save(tmp_path / "normed", norm_before_fc=False)).facts.eagle3.norm_joined


def test_which_layers_it_reads() -> None:
    """As vLLM, SGLang and llama.cpp number them: most files number inputs, those of SpecForge outputs."""
    assert Eagle3(1).taps_in(32) == (1, 15, 28)
    assert Eagle3(1, (2, 16, 29)).taps_in(32) == (1, 15, 28)
    assert Eagle3(1, (1, 46, 90), outputs=True).taps_in(94) == (1, 46, 90)
    assert Eagle3(1, (24, 30, 36), outputs=True).taps_in(36) == (23, 29, 35)  # NVIDIA's for gpt-oss 120B
    assert Eagle3(1, (0, 2, 3)).taps_in(9) == ()  # an embedding is no layer's output
    assert Eagle3(1, (2, 16, 33)).taps_in(32) == Eagle3(1).taps_in(6) == ()


def test_one_that_cannot_draft_is_refused(tiny: Callable, tmp_path: Path) -> None:
    target, other = tiny("qwen3"), tiny("gemma4-e2b")
    facts = open_model(target.save(tmp_path / "target")).facts
    draft = open_model(drafter_of(target).save(tmp_path / "draft")).facts
    cpu = Planner(MACHINES["cpu"], EngineOptions(draft="it"), draft=draft)
    plan, alone = cpu.plan(facts), Planner(MACHINES["cpu"]).plan(facts)
    assert plan.weight_bytes > alone.weight_bytes and plan.sequence_bytes > alone.sequence_bytes
    for parallel in (1, 8):
        options = EngineOptions(ctx=256, max_parallel=parallel, draft="it", gpu_mem=0.5)
        assert Planner(MACHINES["h100"], options, draft=draft).plan(facts).num_drafts == 15
    with pytest.raises(UnsupportedModel, match="drafts tokens for a larger model and cannot run alone"):
        LLM(tmp_path / "draft")
    with pytest.raises(ConfigError, match="cannot draft for a model with per-layer inputs or"):
        cpu.plan(open_model(other.save(tmp_path / "other")).facts)
    with pytest.raises(ConfigError, match="44 hidden units and 99 tokens, and this one has 48 and 99"):
        cpu.plan(replace(facts, hidden_size=48))
    assert cpu.plan(replace(facts, vocab_size=104)).num_drafts  # a few reserved tokens more
    with pytest.raises(ConfigError, match="and this one has 44 and 999"):
        cpu.plan(replace(facts, vocab_size=999))
    with pytest.raises(ConfigError, match="a model with at least 3 layers, and this one has 2 layers"):
        cpu.plan(replace(facts, layers=facts.layers[:2]))
    with pytest.raises(ConfigError, match="one device, not on 2"):
        replace(cpu, options=EngineOptions(draft="it", tensor_parallel=2)).plan(facts)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({IDS: "all"}, BadModelFile, "must list layer numbers"),
        ({IDS: [3, 2, 1]}, BadModelFile, "different layers of the larger model in order"),
        ({IDS: [1, 2]}, BadModelFile, "expected \\[44, 88\\]"),
        ({"draft_vocab_size": 60}, BadModelFile, "expected \\[60, 44\\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedModel, "use_aux_hidden_state False"),
        ({"eagle_config": {"parallel_draft_step": 4}}, UnsupportedModel, "parallel_draft_step 4"),
        ({"transformer_layer_config": [1]}, BadModelFile, "hidden_size: is missing"),
        ({"norm_before_fc": True, "fc_norm": True}, UnsupportedModel, "over all hidden states and over each"),
        ({"speculators_model_type": "peagle", "architectures": ["X"]}, UnsupportedModel, "is not supported"),
    ],
)
def test_files_of_other_drafters_are_refused(
    changes: dict[str, Any], error: type[Exception], match: str, tiny: Callable, tmp_path: Path
) -> None:
    with pytest.raises(error, match=match):
        _ = open_model(drafter_of(tiny("qwen3")).save(tmp_path, **changes)).facts


def test_a_bad_table_of_tokens_is_refused(tiny: Callable, tmp_path: Path) -> None:
    target = tiny("qwen3")
    one = drafter_of(target)
    with pytest.raises(BadModelFile, match="d2t: holds I64 \\[3\\]; 61 token ids are expected"):
        _ = open_model(one.save(tmp_path / "short", more={"d2t": torch.zeros(3, dtype=torch.int64)})).facts
    more = {"d2t": torch.full((DRAFTED,), 50)}
    with open_model(one.save(tmp_path / "draft", more=more)) as draft:
        with open_model(target.save(tmp_path / "model")) as whole:
            model = load_model(whole, LoadOptions(exact=True, drafting=draft.facts.layers))
        with pytest.raises(BadModelFile, match="names tokens from 50 to 110; the vocabulary has 99"):
            load_eagle3(draft, LoadOptions(exact=True), model)
    with pytest.raises(BadModelFile, match="d2t: is missing, but the head has only 61 of the vocabulary's 99 tokens"):
        path = one.save(tmp_path / "none")
        tensors = {key: value for key, value in one.tensors.items() if key != "d2t"}
        save_file(tensors, path / "model.safetensors")
        _ = open_model(path).facts
    with pytest.raises(UnsupportedModel, match="with mask_hidden"):
        _ = open_model(one.save(tmp_path / "p-eagle", more={"mask_hidden": torch.zeros(3)})).facts
