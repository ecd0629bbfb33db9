"""Heads that predict the token after next: against transformers' own, in any company, and as a source of guesses."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from localllm import LLM
from localllm.boot.assembly import assemble
from localllm.config import EngineOptions
from localllm.device.fake import MACHINES
from localllm.engine.cuda_graph import Captured, Run
from localllm.engine.engine import Engine
from localllm.engine.mtp import MOST_KEPT, HeadDrafter
from localllm.engine.speculation import Speculation
from localllm.errors import UnsupportedModel
from localllm.llm.draft import check_head
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model
from localllm.models.predictor import MtpHead
from localllm.plan.memory import WAITING_ROWS
from localllm.plan.planner import Planner
from localllm.quality.quantize import quantize
from localllm.quant.encode import Target
from localllm.request import Request, SamplingParams

from .ling2 import as_ling2
from .test_decode_graphs import answers, engine_of, requests, rerun
from .test_gguf_models import write_gguf

OURS = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
LING = {"self_attn.o_proj": "attention.dense", "self_attn": "attention", "shared_head.norm": "final_layernorm"}
LING |= {"e_score_correction_bias": "expert_bias"}
HY3 = {"mlp.gate.weight": "mlp.router.gate.weight", "mlp.e_score_correction_bias": "mlp.expert_bias"}
HY3 |= {"shared_experts": "shared_mlp", "shared_head.norm": "final_layernorm"}
slow = pytest.mark.slow
OTHERS = ("qwen3.5-moe", "qwen3-next", "glm4-moe", "glm4-moe-lite", "ling2", "ling3", "hy3")
FROM_FILES = ("deepseek-v3", "exaone-moe")  # whose GGUF files have no head, or do not say what it sees
NAMES = ["qwen3.5", *(pytest.param(name, marks=slow) for name in OTHERS + FROM_FILES)]


def with_head(one: Any, name: str) -> tuple[Any, Any]:
    """A tiny model whose checkpoint has a head, and transformers' layer of it."""
    from transformers.modeling_layers import MtpLayer

    config, layers = one.reference.config, one.reference.model.layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    number = max(i for i, kind in enumerate(types) if kind == "full_attention")
    norm, own = type(one.reference.model.norm), name.startswith(("qwen", "exaone"))
    if name == "exaone-moe":  # its head has no experts
        config = copy.deepcopy(config)
        config.mlp_layer_types = ["dense"] * len(layers)
    head = MtpLayer(config, type(layers[number]), norm, number).float().eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key:
                parameter.copy_((0 if name.startswith("qwen") else 1) + 0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for key, buffer in head.named_buffers():
            if key.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    tensors, count = {}, len(layers)
    for key, tensor in head.state_dict().items():
        module, inner = key.partition(".")[0], key.removeprefix("mtp_block.")
        if own:
            stored = f"mtp.{OURS[module]}.weight" if module in OURS else f"mtp.layers.0.{inner}"
        else:
            stored = f"model.layers.{count}.{inner}".replace("post_norm", "shared_head.norm")
        for ours, theirs in {"ling3": LING, "hy3": HY3}.get(name, {}).items():
            stored = stored.replace(ours, theirs)
        tensors[stored] = tensor.detach().clone()
    tensors = as_ling2(tensors) if name == "ling2" else tensors
    stated = {"mtp_num_hidden_layers": 1} if name.startswith("qwen3.5") else {"num_nextn_predict_layers": 1}
    stated |= {"mtp_layer_types": ["full_attention"]} if name == "exaone-moe" else {}
    return replace(one, config=one.config | stated, tensors=one.tensors | tensors), head


def loaded_head(one: Any, folder: Path, **changes: Any) -> Model:
    with open_model(one.save(folder, **changes)) as checkpoint:
        return load_model(checkpoint, LoadOptions(exact=True, predictor=True))


def expected_logits(one: Any, head: Any, ids: list[int]) -> Tensor:
    """Of the token after next, for every token but the first."""
    count = len(ids) - 1
    with torch.no_grad():
        inner = one.reference.model
        hidden = inner(torch.tensor([ids]), use_cache=False).last_hidden_state[:, :-1]
        embedded = inner.embed_tokens(torch.tensor([ids[1:]]))
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        turned = inner.rotary_emb(embedded, positions)
        return one.reference.lm_head(head(embedded, hidden, turned, mask, positions, None))[0]


def own_logits(model: Model, paged: Any, ids: list[int], chunks: list[int]) -> Tensor:
    """The same of ours, the prompt read in chunks."""
    driver, found, start = paged(model), [], 0
    head = MtpHead(model, driver.cache, model.facts.vocab_size)
    for length in chunks:
        batch = driver.batch({0: ids[start : start + length]})
        with torch.inference_mode():
            hidden = head.read(model.forward(batch, driver.cache))
            after = torch.tensor(ids[start + 1 : start + length + 1])
            found.append(head.logits(head.states(replace(batch, token_ids=after), hidden, None)))
        start += length
    return torch.cat(found)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_its_logits_match_transformers(name: str, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    one, head = with_head(tiny(name), name)
    ids = prompt(71)
    wanted = expected_logits(one, head, ids)
    found = own_logits(loaded_head(one, tmp_path), paged, ids, [33, 1, 36])
    with open_model(tmp_path) as checkpoint:
        assert load_model(checkpoint).predictor is None  # nobody asks it
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4


@pytest.mark.parametrize("kinds", [[], "full_attention", None])
def test_a_head_that_sees_nobody_knows_what_is_named(kinds: Any, tiny: Callable, tmp_path: Path) -> None:
    one, _ = with_head(tiny("exaone-moe"), "exaone-moe")
    with open_model(one.save(tmp_path, mtp_layer_types=kinds)) as checkpoint:
        facts = checkpoint.facts
    assert facts.predictor is None and facts.predictor_flaw.endswith("mtp_layer_types")


@slow
@pytest.mark.parametrize("name", ["qwen3.5-packable", "glm4-moe-packable"])
def test_a_quantized_model_keeps_its_head(name: str, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """While loading the head is quantized, too, and planned so; in a folder that is written it stays as it was."""
    one, head = with_head(tiny(name), name)
    ids, folder = prompt(40), one.save(tmp_path / "model")
    wanted = expected_logits(one, head, ids)

    def off(path: Path, options: LoadOptions) -> tuple[float, int]:
        with open_model(path) as checkpoint:
            model = load_model(checkpoint, options)
        found = own_logits(model, paged, ids, [20, 19])
        assert model.predictor is not None
        return float((found - wanted).abs().max() / wanted.abs().max()), model.predictor.nbytes

    with open_model(folder) as checkpoint:
        made = Planner(MACHINES["cpu"], EngineOptions(quant="int8")).plan(checkpoint.facts)
        bare = Planner(MACHINES["cpu"], EngineOptions(quant="int8", speculation="off")).plan(checkpoint.facts)
    lost, size = off(folder, LoadOptions(predictor=True, weights="int8"))
    assert lost < 0.08 and made.weight_bytes - bare.weight_bytes == pytest.approx(size, rel=0.15)
    quantize(folder, tmp_path / "written", Target("int8"))
    lost, larger = off(tmp_path / "written", LoadOptions(predictor=True))
    assert lost < 0.08 and larger > 3 * size


# --- files ------------------------------------------------------------------------------------------------------------


def as_gguf(one: Any, path: Path) -> Path:
    """Written with its head, if the model has one; the header says that it does."""
    count, tensors = one.config["num_hidden_layers"], {}
    for key, tensor in one.tensors.items():
        for module, theirs in OURS.items():
            ours = f"model.layers.{count}.{module}.".replace("post_norm", "shared_head.norm")
            key = key.replace(f"mtp.{theirs}.", ours)
        tensors[key.replace("mtp.layers.0.", f"model.layers.{count}.")] = tensor
    config = one.config | {"num_hidden_layers": count + 1, "nextn": 1}
    return write_gguf(path, config, tensors, gguf.GGMLQuantizationType.F32)


@slow
@pytest.mark.parametrize("name", ["qwen3.5", *OTHERS])
def test_gguf_has_the_same_head(name: str, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    one, _ = with_head(tiny(name), name)
    with open_model(as_gguf(one, tmp_path / "tiny.gguf")) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True, predictor=True))
        assert checkpoint.facts.num_layers == len(ours.layers) and checkpoint.facts.predictor_bytes > 0
    ids = prompt(40)
    wanted = own_logits(loaded_head(one, tmp_path / "c"), paged, ids, [39])
    found = own_logits(ours, paged, ids, [39])
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 2e-5


@slow
def test_above_the_engine_answers_are_the_same(tiny: Callable, tmp_path: Path) -> None:
    one, params = tiny("qwen3.5"), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    path = as_gguf(copying(with_head(one, "qwen3.5")[0]), tmp_path / "tiny.gguf")

    def answered(llm: LLM) -> list[Any]:
        return [found.completions[0].token_ids for found in llm.generate(["t5 t6 t7", "t9"], params)]

    with LLM(path, ctx=256, speculation="off") as llm:
        wanted, held = answered(llm), llm.state().weight_bytes
    with LLM(path, ctx=256, speculation="mtp", debug_invariants=True) as llm:
        assert answered(llm) == wanted and answered(llm) == wanted
        assert "speculation mtp, " in llm.run_summary and "mtp tokens accepted" in llm.run_summary
        assert llm.state().weight_bytes > held
        llm.sleep()
        llm.wake()
        assert answered(llm) == wanted and llm.engine.stats().num_accepted_tokens > 12
        assert not any("MTP head is off" in line for line in llm.state().warnings)
        llm.engine.runner.listener.hear = lambda step, hidden: 1 / 0
        assert answered(llm) == wanted
        assert any("MTP head is off" in line for line in llm.state().warnings)
    bare = as_gguf(one, tmp_path / "bare.gguf")
    with LLM(bare, ctx=256) as llm:
        assert any("starting with blk.3.nextn.eh_proj.weight" in line for line in llm.state().warnings)
    with pytest.raises(UnsupportedModel, match="declares an MTP head"):
        LLM(bare, ctx=256, speculation="mtp")


def without(one: Any, *parts: str) -> dict[str, None]:
    return {key: None for key in one.tensors if any(part in key for part in parts)}


def test_a_head_that_cannot_be_read_is_named_and_left_out(tiny: Callable, tmp_path: Path) -> None:
    one, _ = with_head(tiny("qwen3.5"), "qwen3.5")
    cases = {
        "its tensors are missing, starting with mtp.fc.weight": without(one, "mtp."),
        "mtp.norm.weight: the tensor is missing": without(one, "mtp.norm"),
        r"mtp.fc.weight: the weight has shape \[44, 44\], expected \[44, 88\]": {"mtp.fc.weight": torch.ones(44, 44)},
        "its own embeddings": {},
    }
    for number, (words, tensors) in enumerate(cases.items()):
        more = {} if tensors else {"mtp_use_dedicated_embeddings": True}
        with open_model(one.save(tmp_path / str(number), tensors, **more)) as checkpoint:
            facts = checkpoint.facts
            assert facts.predictor is None and facts.predictor_bytes == 0
            with pytest.raises(UnsupportedModel, match=words):
                check_head(EngineOptions(speculation="mtp"), facts, "tiny")
            check_head(EngineOptions(), facts, "tiny")
            assert load_model(checkpoint, LoadOptions(exact=True, predictor=True)).predictor is None
    facts = open_model(tiny("qwen3.5").save(tmp_path / "none", mtp_num_hidden_layers=0)).facts
    with pytest.raises(UnsupportedModel, match="it has none"):
        check_head(EngineOptions(speculation="mtp"), facts, "tiny")


@slow
@pytest.mark.parametrize("which", ["head", "model", "both"])
def test_the_tensors_say_whether_the_head_is_quantized(which: str, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Whatever the list of modules that are not says: a head that is listed and quantized, or plain and not listed."""
    one, _ = with_head(tiny("qwen3.5"), "qwen3.5")
    tensors, plain = {}, {}
    for key, weight in one.tensors.items():
        if key.endswith(("_proj.weight", "fc.weight")) and which in (
            "both",
            "head" if key.startswith("mtp.") else "model",
        ):
            scale = torch.tensor(float(weight.abs().max()) / 400)
            codes = (weight / scale).to(torch.float8_e4m3fn)
            tensors |= {key: codes, f"{key}_scale": scale}
            plain[key] = codes.float() * scale
    listed = {"ignored_layers": ["mtp.fc", "mtp.layers.0"] if which == "head" else []}
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", **listed}
    ours = loaded_head(one, tmp_path / "q", tensors=tensors, quantization_config=config)
    wanted = own_logits(loaded_head(one, tmp_path / "p", tensors=plain), paged, prompt(30), [29])
    found = own_logits(ours, paged, prompt(30), [29])
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 0.02


# --- guesses ----------------------------------------------------------------------------------------------------------


class Checked(HeadDrafter):
    """Keeps what it was asked and what it answered."""

    def __init__(self, engine: Engine, deep: int) -> None:
        super().__init__(engine.runner, MtpHead(engine.runner.model, engine.runner.cache, 99), 0.1)
        self.deep = deep
        self.seen: list[tuple[list[int], tuple[int, ...]]] = []
        engine.runner.listener = self
        engine.stepper.speculation = Speculation(self, "always", goes_back=bool(engine.runner.model.states))

    def propose(self, sequences: Any, counts: Any) -> list[tuple[int, ...]]:
        found = super().propose(sequences, counts)
        pairs = zip(sequences, found, strict=True)
        self.seen += [(list(one.token_ids), guess) for one, guess in pairs if guess]
        return found


def check_answers_stay(model: Any) -> None:
    """Check that drafts of its head change no answer, eager and with replayed steps."""
    expected = answers(engine_of(model), requests(1))
    for buckets in ((), (1, 2, 4)):
        engine = engine_of(model, buckets)
        checked = Checked(engine, 3)
        assert answers(engine, requests(1)) == expected and checked.seen


NOISE = 0.03  # how much layers say about the next token beside the last one


def copying(one: Any) -> Any:
    """What follows depends mostly on the last token, so that the head, which sees it, is often right."""
    tensors = dict(one.tensors)
    for key, tensor in tensors.items():
        if key.endswith(("o_proj.weight", "out_proj.weight", "dense.weight", "down_proj.weight", "experts.down_proj")):
            tensors[key] = tensor * NOISE
        elif key.endswith(("fc.weight", "eh_proj.weight")):
            tensors[key] = torch.cat([torch.eye(tensor.shape[0]), tensor[:, tensor.shape[0] :] * NOISE], 1)
        elif key.endswith(("norm.weight", "norm_embedding.weight")):
            tensors[key] = torch.full_like(tensor, 0.0 if "qwen" in one.config["model_type"] else 1.0)
    return replace(one, tensors=tensors)


FORMS = ("eager", "graphs", "preempted", "graphs, preempted")
MANY = [(name, form) for name in ("qwen3.5", *OTHERS) for form in FORMS]
QUICK = [("qwen3.5", "preempted"), ("qwen3.5", "graphs")]


@pytest.mark.parametrize(
    ("name", "form"), [*QUICK, *(pytest.param(*case, marks=slow) for case in MANY if case not in QUICK)]
)
def test_guesses_change_no_token_and_do_not_depend_on_company(
    name: str, form: str, tiny: Callable, paged: Any, tmp_path: Path
) -> None:
    """Chunks, batches, new pages, the prefix tree, preemption, right and wrong guesses, states that go back.

    With graphs, all that is computed behind a prompt is replayed.
    """
    model = loaded_head(copying(with_head(tiny(name), name)[0]), tmp_path)
    asked = requests(1)
    expected = answers(engine_of(model), asked)
    captured = form.startswith("graphs")
    engine = engine_of(model, *((1, 2, 4, 5), True) if captured else (), guesses=(2, 4, 8, 16, 64) if captured else ())
    checked, eager = Checked(engine, 3), []
    if captured:
        checked.graphs(engine.runner.graphs.inputs, (1, 2, 4, 8, 16, 64), rerun).capture()
        for builder in (engine.runner.builder, checked._builder):
            build = builder.build
            builder.build = lambda step, build=build: eager.append(step.scheduled) or build(step)
    if "preempted" in form:
        engine.scheduler.limits = replace(engine.scheduler.limits, preempt_every=7)
    for _ in range(1 + ("preempted" not in form)):
        assert answers(engine, asked) == expected
    assert bool(eager) == captured
    assert not any(all(part.start >= part.sequence.num_prompt_tokens for part in parts) for parts in eager)
    stats = engine.stats()
    assert 0.1 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert engine.runner.listener is checked and len(checked.seen) > 20
    rng = random.Random(1)
    for ids, guess in rng.sample(checked.seen, 8):
        assert guess[0] == int(own_logits(model, paged, ids, [len(ids) - 1])[-1].argmax())


def test_a_step_that_checks_two_guesses_is_four_replays(tiny: Callable, tmp_path: Path) -> None:
    """Two passes of the head, the model, and all its rows sampled at once."""
    model = loaded_head(copying(with_head(tiny("glm4-moe"), "glm4-moe")[0]), tmp_path)
    replayed: list[str] = []

    def capture(run: Run) -> Captured:
        outputs, replay = rerun(run)
        return outputs, lambda: replayed.append(str(run)) or replay()

    engine = engine_of(model, (1, 2, 4), True, capture, device=True, guesses=(8, 16))
    checked = Checked(engine, 2)
    checked.graphs(engine.runner.graphs.inputs, (1, 2, 4, 8), capture).capture()
    engine.submit(Request(prompt(10), SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True)))
    for _ in range(3):
        engine.run_once()
    replayed.clear()
    before = engine.stats().num_draft_tokens
    for _ in range(8):
        engine.run_once()
    assert engine.stats().num_draft_tokens - before == 16 and len(replayed) == 8 * 4


def test_the_plan_counts_the_head(tiny: Callable, tmp_path: Path) -> None:
    one, _ = with_head(tiny("qwen3.5"), "qwen3.5")
    with open_model(one.save(tmp_path)) as checkpoint:
        facts, plans = checkpoint.facts, {}
        stored = sum(tensor.nbytes for key, tensor in one.tensors.items() if key.startswith("mtp."))
        for speculation in ("off", "auto", "mtp"):
            options = EngineOptions(ctx=120, max_parallel=3, kv="f32", speculation=speculation)
            plans[speculation] = Planner(MACHINES["cpu"], options).plan(facts)
        model = load_model(checkpoint, LoadOptions(exact=True, predictor=True))
    off, auto, mtp = plans.values()
    assert WAITING_ROWS == MOST_KEPT
    assert facts.predictor_bytes == stored and auto.weight_bytes - off.weight_bytes == stored
    assert any(line.startswith("MTP head: ") for line in auto.reasons) and mtp.speculation == "mtp"
    engine = assemble(model, mtp)
    assert engine.runner.cache.nbytes == mtp.kv_bytes
    assert isinstance(engine.runner.listener, HeadDrafter)
    params = SamplingParams(temperature=0, max_tokens=9)
    answers(engine, [Request(prompt(5), params)])
    assert set(engine.stats().guesses) == {"mtp"}
    made = replace(mtp, graph_buckets=(1, 2, 3), guess_buckets=(2, 4, 8, 16))
    engine = assemble(model, made, capture=rerun, check_invariants=True)
    assert engine.runner.beside["the MTP head"].captured == (1, 2, 3, 4, 8, 16)
    assert engine.runner.graphs is not None and engine.runner.graphs.note == "graphs 1,2,3,4,8,16"
    asked = [Request(prompt(5, seed), SamplingParams(temperature=0.5, seed=seed, max_tokens=9)) for seed in range(3)]
    assert answers(engine, asked) == answers(engine_of(model), asked)


@pytest.mark.parametrize("fails", ["hear", "propose"])
def test_a_head_that_fails_costs_no_request_anything(
    fails: str, tiny: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded_head(with_head(tiny("qwen3.5"), "qwen3.5")[0], tmp_path)
    asked = [Request(prompt(20, seed), SamplingParams(temperature=0, max_tokens=6)) for seed in range(2)]
    expected = answers(engine_of(model), asked)
    engine = engine_of(model)
    checked = Checked(engine, 1)

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(checked, fails, broken)
    assert answers(engine, asked) == expected
    assert engine.runner.listener is None and not checked.seen
    assert (engine.stepper.speculation is None) == (fails == "propose")
