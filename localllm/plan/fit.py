"""Which of the catalogue's models run on a machine, judged by the plan: what `pull`, `chat` and `plan` choose from.

A family's name becomes the member of most `worth` here: size and date against the pace and the context that fit. The
same function says which model to start with, on the home screen, in `plan`, in `doctor` and for a chat without a name.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from localllm import hub
from localllm.checkpoint import Checkpoint
from localllm.errors import LocalLLMError, ModelNotFound
from localllm.hub import catalog
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import ModelFacts, repeated
from localllm.models.architectures.layers import Dense, Experts, LayerFacts
from localllm.models.architectures.mixers import Attention, RopeFacts
from localllm.models.architectures.registry import understand
from localllm.plan.placement import chosen_device
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner
from localllm.terminal import GIB, clean_line, gib, tokens_short

MIN_CTX = 2048  # tokens of context that must fit
# families whose members are for everything; others are for those who name them
GENERAL = ("qwen", "gemma", "llama", "mistral", "gpt-oss", "phi", "smollm")
RANK_COST = 0.08  # of `worth`, for each step down the order of kinds of weights
MIXED_WORTH = 0.6  # of `worth`, more for a mixture of experts where CPU and GPU share memory: it is large and slow
DIVIDED_COST = 1.0  # of `worth`, where experts stay in host memory: they fill it, and the pace was measured on no card
GPU_ONLY = "runs on a GPU only"
STATE_WINDOW = 1024  # tokens that what a sequence keeps at any length is counted as
# compute capability and up -> kinds of weights of those that fit and are fast enough, the best first: eight bits cost
# no quality one would notice, sixteen only take room, and a card without FP8 arithmetic is quickest in four
ORDERS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (100, ("fp8", "nvfp4", "int4", "gguf", "bf16")),
    (89, ("fp8", "int4", "nvfp4", "gguf", "bf16")),
    (75, ("int4", "gguf", "nvfp4", "fp8", "bf16")),
)


Plans = dict[catalog.Candidate, Plan | None]


def facts_of(candidate: catalog.Candidate) -> ModelFacts | None:
    """What the planner needs to know of a model that is not here; None for one of which only the size is known.

    Sizes are the catalogue's: weights as large as the download, everything else from the model's shape or from what its
    config.json says of its layers, which its architecture reads. Of an architecture that this version cannot run only
    the bytes are right: layers that keep as much as its own do.
    """
    shape = candidate.shape
    if candidate.config:
        facts = replace(_described(candidate.config), **_own_of(candidate))
        if facts.inputs is None:
            return facts
        unread = facts.weight_bytes - int(facts.weight_bytes * facts.active_share)  # rows of a second embedding
        return replace(facts, active_share=1.0, inputs=replace(facts.inputs, nbytes=unread))
    if shape is not None:
        attention = Attention(shape.heads, shape.kv_heads, shape.head_dim, RopeFacts(1e6, shape.head_dim))
        layers = repeated(LayerFacts(attention, Dense(shape.intermediate)), shape.windows)
        hidden, vocab, tied = shape.hidden, shape.vocab, shape.tied
    elif candidate.layers:
        mixture = candidate.experts
        hidden, vocab, tied = mixture.width if mixture else 4096, 150_000, candidate.params < 5e9
        own = _keeping(-(-candidate.kv_bytes_per_token // (4 * candidate.layers)), None)
        layers = (own,) * candidate.layers
        if mixture:
            mixed = replace(own, ffn=Experts(mixture.num, mixture.top_k, mixture.inner))
            layers = layers[mixture.layers :] + (mixed,) * mixture.layers
        rest = candidate.kv_fixed_bytes // (4 * (STATE_WINDOW + MIN_CTX))
        layers += (_keeping(rest, STATE_WINDOW),) if rest else ()
    else:
        return None
    return ModelFacts(
        architecture=candidate.architecture,
        source_architecture=candidate.architecture,
        hidden_size=hidden,
        vocab_size=vocab,
        rms_norm_eps=1e-6,
        layers=layers,
        tied_embeddings=tied,
        **_own_of(candidate),
    )


def _own_of(candidate: catalog.Candidate) -> dict[str, Any]:
    """What an entry says of its files, as fields of `ModelFacts`."""
    return {
        "name": candidate.title,
        "max_context": candidate.context,
        "has_chat_template": True,
        "license": candidate.license,
        "stored_format": candidate.format,
        "num_params": candidate.params,
        "weight_bytes": candidate.download_bytes,
        "active_share": candidate.active_params / candidate.params,
    }


@functools.cache
def _described(config: str) -> ModelFacts:
    """The facts of a config.json, without any tensors."""
    described = Checkpoint(
        Path(catalog.__file__).with_name("catalog.toml"), "safetensors", {}, {}, config=json.loads(config)
    )
    return understand(described)[0]


def _keeping(values: int, window: int | None) -> LayerFacts:
    """A layer that keeps so many values of keys for a token, and as many of values."""
    return LayerFacts(Attention(1, 1, values, RopeFacts(1e6, 64), window=window), Dense(4 * 4096))


def device_kind(planner: Planner) -> str:
    """cuda where a plan would take a GPU, else cpu."""
    try:
        return chosen_device(planner.machine, planner.options.device).kind
    except LocalLLMError:  # a device that is not there: whoever plans for it says so
        return "cpu"


def _in_one_place(planner: Planner) -> Planner:
    """One that plans for the same device whatever the model, with the context that fits."""
    try:
        device = chosen_device(planner.machine, planner.options.device).device
    except LocalLLMError:  # as in `device_kind`
        device = planner.options.device
    return planner.having(ctx="auto", device=device)


def judge(planner: Planner, min_ctx: int, made_before: Plans | None = None) -> catalog.Fits:
    """A verdict on candidates: whether one runs here with that context (or its own), and how fast.

    Where there is a usable GPU, it must fit there: the CPU is no place that a family's name chooses by itself. A model
    whose shape is not known is judged by its size. `made_before` keeps the plans for the next verdict.
    """
    kind, planner = device_kind(planner), _in_one_place(planner)
    plans = {} if made_before is None else made_before
    by_size = catalog.default_fits(catalog.memory_of(planner.machine))

    def fits(candidate: catalog.Candidate) -> tuple[bool, float]:
        if not (candidate.shape or candidate.config or candidate.layers or candidate.needs):
            return by_size(candidate)
        if candidate not in plans:
            plans[candidate] = plan_of(candidate, planner)
        made = plans[candidate]
        if made is None or candidate.needs or (made.device == "cpu") is not (kind == "cpu"):
            return False, 0.0
        return made.fits and made.max_ctx >= min(min_ctx, candidate.context), made.decode_tps

    return fits


def plan_of(candidate: catalog.Candidate, planner: Planner) -> Plan | None:
    """The plan for a model that is not here; None when it cannot run at all: there is no GPU, and it needs one."""
    facts = facts_of(candidate)
    if facts is None or (candidate.device == "gpu" and device_kind(planner) == "cpu"):
        return None
    try:
        return planner.plan_within(facts)
    except LocalLLMError:
        return None


def preference(planner: Planner, made_before: Plans | None = None) -> Callable[[catalog.Candidate], float]:
    """How good a choice a candidate is here: `catalog.worth`, less where its kind of weights suits the card less.

    It counts with the pace that one noisy bench does not move. On the CPU the catalogue's own order holds.
    """
    kind = device_kind(planner)
    gpu = chosen_device(planner.machine, "auto").gpu if kind == "cuda" else None
    order = next((kinds for least, kinds in ORDERS if gpu and gpu.capability >= least), ())
    wish = catalog.WISHES["gpu" if gpu else "cpu"]
    plans, planner = {} if made_before is None else made_before, _in_one_place(planner)
    by_size = catalog.default_fits(catalog.memory_of(planner.machine))

    def prefer(candidate: catalog.Candidate) -> float:
        if candidate not in plans:
            plans[candidate] = plan_of(candidate, planner)
        made = plans[candidate]
        tps, ctx = (made.pace, made.ctx) if made else (by_size(candidate)[1], wish.context)
        stored = kind_of(candidate)
        extra = MIXED_WORTH if gpu and gpu.unified and 2 * candidate.active_params < candidate.params else 0.0
        extra -= DIVIDED_COST if made and made.host_experts else 0.0
        extra -= RANK_COST * (order.index(stored) if stored in order else 0)
        return catalog.worth(candidate, tps, ctx, wish) + extra

    return prefer


def kind_of(candidate: catalog.Candidate) -> str:
    """nvfp4, int4, fp8, gguf or bf16."""
    name = candidate.format.lower()
    if candidate.quant:
        return "gguf"
    return next((kind for kind in ("nvfp4", "mxfp4", "fp8", "bf16") if kind in name), "int4")


def recommended(
    alias: str, planner: Planner, limit: catalog.DownloadLimit | None = None, made_before: Plans | None = None
) -> catalog.Choice | None:
    """What a family's or a model's name would become here, without asking the hub; None when nothing fits.

    `limit` as `hub.download_limit` gives it: the most a family's name downloads.
    """
    kind, plans = device_kind(planner), {} if made_before is None else made_before
    try:
        return catalog.choose(
            alias,
            judge(planner, MIN_CTX, plans),
            free_label=catalog.memory_of(planner.machine).label,
            on_gpu=kind == "cuda",
            limit=limit,
            prefer=preference(planner, plans),
        )
    except LocalLLMError:
        return None


class Best(NamedTuple):
    """The file of a model that would be taken, whether it runs here or not."""

    file: catalog.Candidate
    plan: Plan | None  # of one that does not fit too
    reason: str  # why it does not run, "" when it does


def best_file(name: str, planner: Planner, made_before: Plans | None = None) -> Best:
    """Of a model's files the one `recommended` takes, else the smallest that could run, with what is against it.

    Where nothing fits on the GPU the plan says what is missing there: a name does not choose the CPU by itself.
    """
    if choice := recommended(name, planner, made_before=made_before):
        return Best(choice.best, plan_of(choice.best, planner), "")
    file = min(runnable(name, planner), key=lambda one: one.download_bytes)
    if device_kind(planner) == "cuda":
        planner = planner.having(device="cuda")
    made = plan_of(file, planner.having(ctx=MIN_CTX))
    if file.needs:
        return Best(file, made, f"needs {file.needs}")
    if made is None:
        only = file.device == "gpu" and device_kind(planner) == "cpu"
        return Best(file, None, GPU_ONLY if only else "cannot be planned with these settings")
    need = max(made.need_bytes, made.have_bytes + GIB // 10)  # a difference that is seen
    least = f"{gib(need, 1)} at {tokens_short(made.ctx)} tokens of context"
    return Best(file, made, f"needs {least}, {gib(made.have_bytes, 1)} are free")


def runnable(name: str, planner: Planner) -> list[catalog.Candidate]:
    """Of a name's files those that this machine could run if they fit; all of them where it could run none."""
    members, on_cpu = catalog.members(name), device_kind(planner) == "cpu"
    return [one for one in members if not one.needs and not (on_cpu and one.device == "gpu")] or [*members]


def judgement(planner: Planner) -> hub.Judgement:
    """How `hub.resolve` decides for a family's name: by `recommended`'s rule."""
    plans = Plans()
    fits, prefer = judge(planner, MIN_CTX, plans), preference(planner, plans)
    return hub.Judgement(catalog.memory_of(planner.machine), fits, prefer)


def resolve(name: str, planner: Planner, **how: Any) -> hub.Resolved:
    """What a name stands for, a family's name by `recommended`'s rule; `how` as of `hub.resolve`, which it asks.

    Raises what that raises, DoesNotFit when no member fits with the smallest context either.
    """
    return hub.resolve(name, judge=lambda: judgement(planner), **how)


def with_draft(planner: Planner) -> Planner:
    """One that counts the draft model its options name, as the catalogue has it where it is not here.

    Raises ModelNotFound where neither knows it, and what `resolve` and opening its files raise.
    """
    options = planner.options
    if not options.draft or options.speculation not in ("auto", "draft"):
        return planner
    try:
        path = resolve(options.draft, planner, offline=True).path
    except ModelNotFound as error:
        choice = recommended(options.draft, planner) if catalog.members(options.draft) else None
        if choice is not None:
            return replace(planner, draft=facts_of(choice.best))
        what = f"the draft model {clean_line(options.draft)} is not on this machine"
        raise ModelNotFound(what, f"localllm pull {clean_line(options.draft)}") from error
    assert path is not None, "offline, a name is a local model's or an error"
    with open_model(path, mmproj="off") as checkpoint:
        return replace(planner, draft=checkpoint.facts)


class Option(NamedTuple):
    """A model with its plan, in the choice of one to start with."""

    model: catalog.Candidate  # its name is what `chat` takes
    plan: Plan
    worth: float
    local: bool = False


class Advised(NamedTuple):
    """What to take on a machine, and what else may be wanted."""

    best: Option
    fast: Option | None  # the best of those with the pace and the context that a chat wants
    largest: Option  # the most able that fits with some context, whatever its pace


def option_of(model: catalog.Candidate, plan: Plan, planner: Planner, local: bool = False) -> Option:
    """A model with its plan at the context that would be taken."""
    return Option(model, plan, preference(planner, {model: plan})(model), local)


def pick(options: Iterable[Option], planner: Planner) -> Advised | None:
    """Of models that could be started the one to take, and two others; None where none fits."""
    fitting = [one for one in options if one.plan.fits and one.plan.max_ctx >= min(MIN_CTX, one.model.context)]
    if not fitting:
        return None
    wish = catalog.WISHES["cpu" if device_kind(planner) == "cpu" else "gpu"]
    fast = [
        one for one in fitting if one.plan.pace >= wish.tps and one.plan.ctx >= min(wish.context, one.model.context)
    ]
    value = lambda one: one.worth  # noqa: E731
    able = max(one.model.strength for one in fitting)
    largest = max((one for one in fitting if one.model.strength == able), key=value)
    return Advised(max(fitting, key=value), max(fast, key=value, default=None), largest)


def advised(
    planner: Planner, limit: catalog.DownloadLimit | None = None, made_before: Plans | None = None
) -> Advised | None:
    """The model to start with on this machine: of those that are here, and of what each family's name would fetch."""
    plans: Plans = {} if made_before is None else made_before
    fits = judge(planner, MIN_CTX, plans)
    most = limit.num_bytes if limit else float("inf")
    named = [one for family in GENERAL for one in catalog.members(family)]
    usable = [one for one in named if not one.needs and one.download_bytes <= most and fits(one)[0]]
    options = [option_of(one, made, planner) for one in usable if (made := plans.get(one))]
    return pick([*_here(planner), *options], planner)


def _here(planner: Planner) -> Iterable[Option]:
    chats = (model for model in hub.list_local() if model.chat and model.supported and not model.broken)
    return [found for model in chats if (found := local_option(model, planner))]


def local_option(model: hub.LocalModel, planner: Planner) -> Option | None:
    """A model of this machine as one to choose; None for one that cannot be planned."""
    if model.facts is None:
        return None
    try:
        made = planner.having(ctx="auto").plan_within(model.facts, model.path)
    except LocalLLMError:
        return None
    return option_of(entry_of(model), made, planner, local=True)


def entry_of(model: hub.LocalModel) -> catalog.Candidate:
    """A model of this machine as an entry of the catalogue, under its own name."""
    size = (model.architecture, model.params, model.size_bytes, model.max_context)
    known = (one for one in catalog.candidates() if one.spec.casefold() == model.name.casefold())
    return replace(next(known, None) or catalog.candidate_of(model.name, *size), name=model.name)


def default_model(planner: Planner) -> str:
    """The name for a chat that gives none: the model used last; else the one of most worth here; else the starter."""

    def worth(model: hub.LocalModel) -> float | None:
        found = local_option(model, planner)
        return found.worth if found and found.plan.fits else None

    return hub.default_model(worth)
