"""Which of the catalogue's models run on a machine, judged by the plan: what `pull`, `chat` and `plan` choose from.

A family's name becomes the largest member that fits with 32k tokens of context (or the model's own) at a pace worth
reading; of its files the one that suits the card. Where none fits so, less context is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localllm import hub
from localllm.errors import DoesNotFit, LocalLLMError
from localllm.hub import catalog
from localllm.models.architectures.facts import Attention, Dense, LayerFacts, ModelFacts, RopeFacts, repeated
from localllm.plan.placement import chosen_device
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner

FLOORS = {"cuda": (32_768, 8_192, 2_048), "cpu": (8_192, 2_048)}  # tokens of context that must fit, tried in this order
COMFORTABLE_TPS = {"cuda": 30.0, "cpu": 10.0}  # tokens per second that reading a chat wants
# compute capability and up -> kinds of weights of those that fit and are fast enough, the best first: eight bits cost
# no quality one would notice, sixteen only take room, and a card without FP8 arithmetic is quickest in four
ORDERS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (100, ("fp8", "nvfp4", "int4", "gguf", "bf16")),
    (89, ("fp8", "int4", "nvfp4", "gguf", "bf16")),
    (75, ("int4", "gguf", "nvfp4", "fp8", "bf16")),
)


Plans = dict[catalog.Candidate, Plan | None]


def facts_of(candidate: catalog.Candidate) -> ModelFacts | None:
    """What the planner needs to know of a model that is not here; None for one this version cannot run.

    Sizes are the catalogue's: weights as large as the download, everything else from the model's shape.
    """
    shape = candidate.shape
    if shape is None or candidate.needs:
        return None
    attention = Attention(shape.heads, shape.kv_heads, shape.head_dim, RopeFacts(1e6, shape.head_dim))
    return ModelFacts(
        architecture=candidate.architecture,
        source_architecture=candidate.architecture,
        name=candidate.title,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        max_context=candidate.context,
        rms_norm_eps=1e-6,
        layers=repeated(LayerFacts(attention, Dense(shape.intermediate)), shape.windows),
        tied_embeddings=shape.tied,
        has_chat_template=True,
        license=candidate.license,
        stored_format=candidate.format,
        num_params=candidate.params,
        weight_bytes=candidate.download_bytes,
    )


def device_kind(planner: Planner) -> str:
    """cuda where a plan would take a GPU, else cpu."""
    try:
        return chosen_device(planner.machine, planner.options.device).kind
    except LocalLLMError:  # a device that is not there: whoever plans for it says so
        return "cpu"


def judge(planner: Planner, min_ctx: int, made_before: Plans | None = None) -> catalog.Fits:
    """A verdict on candidates: whether one runs here with that context (or its own), and how fast.

    Where there is a usable GPU, it must fit there: the CPU is no place that a family's name chooses by itself. A model
    whose shape is not known is judged by its size. `made_before` keeps the plans for the next verdict.
    """
    kind, planner = device_kind(planner), planner.having(ctx="auto")
    plans = {} if made_before is None else made_before
    by_size = catalog.default_fits(catalog.memory_of(planner.machine))

    def fits(candidate: catalog.Candidate) -> tuple[bool, float]:
        if candidate.shape is None and not candidate.needs:
            return by_size(candidate)
        if candidate not in plans:
            plans[candidate] = plan_of(candidate, planner)
        made = plans[candidate]
        if made is None or (made.device == "cpu") is not (kind == "cpu"):
            return False, 0.0
        return made.fits and made.max_ctx >= min(min_ctx, candidate.context), made.decode_tps

    return fits


def plan_of(candidate: catalog.Candidate, planner: Planner) -> Plan | None:
    """The plan for a model that is not here; None when it cannot run at all."""
    facts = facts_of(candidate)
    if facts is None or (candidate.device == "gpu" and device_kind(planner) == "cpu"):
        return None
    try:
        return planner.plan_within(facts)
    except LocalLLMError:
        return None


def preference(planner: Planner) -> Callable[[catalog.Candidate], int]:
    """How well a kind of weights suits the card: 0 is best. On the CPU the catalogue's own order holds."""
    gpu = chosen_device(planner.machine, "auto").gpu
    capability = gpu.capability if gpu else 0
    order = next((kinds for least, kinds in ORDERS if capability >= least), ())
    return lambda candidate: order.index(kind_of(candidate)) if kind_of(candidate) in order else 0


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
    for floor in FLOORS[kind]:
        try:
            return catalog.choose(
                alias,
                judge(planner, floor, plans),
                free_label=catalog.memory_of(planner.machine).label,
                on_gpu=kind == "cuda",
                limit=limit,
                prefer=preference(planner),
            )
        except LocalLLMError:
            continue
    return None


def resolve(name: str, planner: Planner, **how: Any) -> hub.Resolved:
    """What a name stands for, a family's name by `recommended`'s rule; `how` as of `hub.resolve`, which it asks.

    Raises what that raises, DoesNotFit when no member fits with the smallest context either.
    """
    floors, plans = FLOORS[device_kind(planner)], Plans()
    for floor in floors:
        try:
            fits = judge(planner, floor, plans)
            return hub.resolve(name, device=planner.machine, fits=fits, prefer=preference(planner), **how)
        except DoesNotFit:
            if floor == floors[-1]:
                raise
    raise AssertionError("the last floor returns or raises")
