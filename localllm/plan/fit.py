"""Model selection: which catalog models run on a machine according to the planner, and which one to recommend.

A family name resolves to its member with the highest `worth` here, which weighs size and date against the speed and
the context that fit. The home screen, `plan`, `doctor` and a chat without a model name use the same ranking.
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
from localllm.config import EngineOptions
from localllm.errors import LocalLLMError, ModelNotFound
from localllm.hub import catalog
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import ModelFacts, count_linear_params, repeated
from localllm.models.architectures.layers import Dense, Experts, LayerFacts
from localllm.models.architectures.mixers import Attention, RopeFacts
from localllm.models.architectures.registry import understand
from localllm.paths import folders_near, is_drafter
from localllm.plan.placement import chosen_device
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner
from localllm.terminal import GIB, clean_line, gib, tokens_short

MIN_CTX = 2048  # tokens of context that must fit
# general-purpose families; other families are used only when named
GENERAL = ("qwen", "gemma", "llama", "mistral", "gpt-oss", "phi", "smollm")
RANK_COST = 0.08  # `worth` lost per step down the order of weight formats
MIXED_WORTH = 0.6  # `worth` gained by an MoE model on unified memory, which is large but slow
DIVIDED_COST = 1.0  # `worth` lost with experts in host memory: they fill it, and that speed was never measured on a GPU
GPU_ONLY = "runs only on a GPU"
STATE_WINDOW = 1024  # window, in tokens, of the attention layer that represents a sequence's fixed-size state
# Minimum compute capability -> weight formats, best first: 8 bits lose no noticeable quality, 16 bits only take more
# memory, and GPUs without FP8 arithmetic are fastest with 4 bits.
ORDERS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (100, ("fp8", "nvfp4", "int4", "gguf", "bf16")),
    (89, ("fp8", "int4", "nvfp4", "gguf", "bf16")),
    (75, ("int4", "gguf", "nvfp4", "fp8", "bf16")),
)


Plans = dict[catalog.Candidate, Plan | None]


def facts_of(candidate: catalog.Candidate) -> ModelFacts | None:
    """Model facts for a catalog entry without its files; None if only its size is known.

    The weights are as large as the download without an n-gram table. Everything else comes from the entry's shape or
    from its config.json, read by the architecture. For an architecture that this version cannot run, stand-in layers
    give the right KV bytes only.
    """
    shape = candidate.shape
    if candidate.config:
        facts = replace(_described(candidate.config), **_own_of(candidate))
        if facts.loops > 1:
            again = (facts.loops - 1) * count_linear_params(facts) / facts.num_params
            facts = replace(facts, active_share=facts.active_share + again)
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
    """The entry's file properties as fields of `ModelFacts`."""
    return {
        "name": candidate.title,
        "max_context": candidate.context,
        "has_chat_template": True,
        "license": candidate.license,
        "stored_format": candidate.format,
        "num_params": candidate.params,
        "weight_bytes": candidate.weight_bytes,
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
    """A stand-in attention layer whose keys, and whose values, have `values` elements per token."""
    return LayerFacts(Attention(1, 1, values, RopeFacts(1e6, 64), window=window), Dense(4 * 4096))


def device_kind(planner: Planner) -> str:
    """The kind of device that plans use: cuda or cpu."""
    try:
        return chosen_device(planner.machine, planner.options.device).kind
    except LocalLLMError:  # no such device: planning for it reports the error
        return "cpu"


def _in_one_place(planner: Planner) -> Planner:
    """A planner fixed to one device, whatever the model, with the context that fits."""
    try:
        device = chosen_device(planner.machine, planner.options.device).device
    except LocalLLMError:  # as in `device_kind`
        device = planner.options.device
    return planner.having(ctx="auto", device=device)


def judge(planner: Planner, min_ctx: int, made_before: Plans | None = None) -> catalog.Fits:
    """A function that says whether a candidate runs here with `min_ctx` tokens (or its maximum), and how fast.

    With a usable GPU the candidate must fit there: a family name never falls back to the CPU automatically. A candidate
    of unknown shape is judged by size. `made_before` is a cache of plans to share between calls.
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
    """The plan for a catalog entry; None if it cannot be planned, or needs a GPU and there is none."""
    facts = facts_of(candidate)
    if facts is None or (candidate.device == "gpu" and device_kind(planner) == "cpu"):
        return None
    try:
        return planner.plan_within(facts)
    except LocalLLMError:
        return None


def preference(planner: Planner, made_before: Plans | None = None) -> Callable[[catalog.Candidate], float]:
    """A function that scores candidates for this machine: `catalog.worth`, adjusted for how its format suits the GPU.

    It uses `Plan.pace`, so a single noisy benchmark does not reorder models. On the CPU there is no format penalty.
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
    """The weight format of a candidate: nvfp4, mxfp4, fp8, bf16, gguf or int4."""
    name = candidate.format.lower()
    if candidate.quant:
        return "gguf"
    return next((kind for kind in ("nvfp4", "mxfp4", "fp8", "bf16") if kind in name), "int4")


def recommended(
    alias: str, planner: Planner, limit: catalog.DownloadLimit | None = None, made_before: Plans | None = None
) -> catalog.Choice | None:
    """The choice for a family or model name on this machine, without contacting the hub; None if nothing fits.

    `limit` is the largest download for a family name (see `hub.download_limit`).
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
    """The best file of a model for this machine, whether or not it runs here."""

    file: catalog.Candidate
    plan: Plan | None  # present even if the model does not fit
    reason: str  # why it does not run; "" if it does


def best_file(name: str, planner: Planner, made_before: Plans | None = None) -> Best:
    """The file that `recommended` takes, else the smallest runnable one with the reason why it does not fit.

    If nothing fits on the GPU, the plan shows what is missing there: a name never falls back to the CPU automatically.
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
    need = max(made.need_bytes, made.have_bytes + GIB // 10)  # keep a difference visible after rounding
    least = f"{gib(need, 1)} at {tokens_short(made.ctx)} tokens of context"
    return Best(file, made, f"needs {least}, {gib(made.have_bytes, 1)} free")


def runnable(name: str, planner: Planner) -> list[catalog.Candidate]:
    """The files of a name that this machine could run if they fit; all of them if it could run none."""
    members, on_cpu = catalog.members(name), device_kind(planner) == "cpu"
    return [one for one in members if not one.needs and not (on_cpu and one.device == "gpu")] or [*members]


def judgement(planner: Planner) -> hub.Judgement:
    """The rule by which `hub.resolve` resolves a family name: the same as in `recommended`."""
    plans = Plans()
    fits, prefer = judge(planner, MIN_CTX, plans), preference(planner, plans)
    return hub.Judgement(catalog.memory_of(planner.machine), fits, prefer)


def resolve(name: str, planner: Planner, **how: Any) -> hub.Resolved:
    """Resolve a name with `hub.resolve`, which takes `how`; family names follow the rule of `recommended`.

    Raises what `hub.resolve` raises, and DoesNotFit if no member fits even with the smallest context.
    """
    return hub.resolve(name, judge=lambda: judgement(planner), **how)


def with_draft(planner: Planner) -> Planner:
    """A planner that includes the draft model named in the options, from its files or else from the catalog.

    Raises ModelNotFound if neither has it, and what `resolve` and `open_model` raise.
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


def drafter_beside(path: Path, options: EngineOptions, facts: ModelFacts) -> Path | None:
    """The file next to a GGUF model that drafts for it, if it is to be used: no other draft model or head is."""
    if options.draft or options.speculation not in ("auto", "draft") or facts.predictor is not None:
        return None
    if path.suffix != ".gguf":
        return None
    found = (file for folder in folders_near(path) for file in sorted(folder.glob("*.gguf")) if is_drafter(file.name))
    return next((file for file in found if file != path), None)


def with_drafter_beside(planner: Planner, facts: ModelFacts, path: Path) -> Planner:
    """One that includes the drafter next to the model under the same conditions as a start of that model does."""
    drafter = drafter_beside(path, planner.options, facts)
    if drafter is None:
        return planner
    try:
        with open_model(drafter, mmproj="off") as checkpoint:
            draft = checkpoint.facts
        return (planner_with(planner, draft, facts, path) if draft.only_drafts else None) or planner
    except LocalLLMError:
        return planner


def planner_with(planner: Planner, draft: ModelFacts, facts: ModelFacts, path: Path) -> Planner | None:
    """One that includes a drafter nobody asked for; None if the model then would not fit, or would run elsewhere or in
    other formats. Raises ConfigError for a drafter of another model.
    """
    made = replace(planner, draft=draft)
    new, old = made.plan_within(facts, path), planner.plan_within(facts, path)
    kept = all(getattr(new, name) == getattr(old, name) for name in ("device", "quant", "kv", "host_experts"))
    return made if new.fits and kept else None


class Option(NamedTuple):
    """A model that could be recommended, with its plan."""

    model: catalog.Candidate  # `chat` accepts its name
    plan: Plan
    worth: float
    local: bool = False


class Advised(NamedTuple):
    """The recommended model for a machine, and two alternatives."""

    best: Option
    fast: Option | None  # the best model that reaches the speed and context wanted for chat
    largest: Option  # the most capable model that fits, whatever its speed


def option_of(model: catalog.Candidate, plan: Plan, planner: Planner, local: bool = False) -> Option:
    """An option scored by `preference`."""
    return Option(model, plan, preference(planner, {model: plan})(model), local)


def pick(options: Iterable[Option], planner: Planner) -> Advised | None:
    """Pick the recommended model and its alternatives; None if nothing fits."""
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
    """The recommended model for this machine, among local models and the general-purpose families."""
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
    """A local model as an option; None if it cannot be planned."""
    if model.facts is None:
        return None
    try:
        made = planner.having(ctx="auto").plan_within(model.facts, model.path)
    except LocalLLMError:
        return None
    return option_of(entry_of(model), made, planner, local=True)


def entry_of(model: hub.LocalModel) -> catalog.Candidate:
    """A local model as a catalog entry, under its own name."""
    size = (model.architecture, model.params, model.size_bytes, model.max_context)
    known = (one for one in catalog.candidates() if one.spec.casefold() == model.name.casefold())
    return replace(next(known, None) or catalog.candidate_of(model.name, *size), name=model.name)


def default_model(planner: Planner) -> str:
    """The model for a chat that names none: the chat model used last, else the best local one, else the starter."""

    def worth(model: hub.LocalModel) -> float | None:
        found = local_option(model, planner)
        return found.worth if found and found.plan.fits else None

    return hub.default_model(worth)
