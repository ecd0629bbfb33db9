"""Builds an engine from a plan and loaded weights: KV cache, CUDA graphs, drafters, runner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from localllm.boot.memory_meter import Meter
from localllm.engine.adapters import Residents
from localllm.engine.assistant import AssistantDrafter
from localllm.engine.cuda_graph import Captured, CudaCapture, DecodeGraphs, Run, shapes_of
from localllm.engine.decode_inputs import DecodeInputs
from localllm.engine.device_sampler import DeviceSampler
from localllm.engine.dflash import DFlashDrafter
from localllm.engine.draft_model import DraftModel
from localllm.engine.drafter import NgramDrafter
from localllm.engine.engine import Engine
from localllm.engine.mtp import HeadDrafter
from localllm.engine.runner import Runner
from localllm.engine.scheduler import SchedulerLimits
from localllm.engine.speculation import AnyDrafter, Mode, Speculation
from localllm.kernels.verify.selftest import SelfTest
from localllm.models.assistant import AssistantModel
from localllm.models.dflash import DFlashModel
from localllm.models.eagle3 import Eagle3Head, Eagle3Model
from localllm.models.kv_cache import KVCache
from localllm.models.model import Model
from localllm.models.placement import Mover
from localllm.models.predictor import MtpHead
from localllm.plan.plan import Plan
from localllm.request import CAPTURED_BLOCKS, CROWD

log = logging.getLogger(__name__)

Reading = HeadDrafter | AssistantDrafter | DFlashDrafter  # drafters that read hidden states


def assemble(
    model: Model,
    plan: Plan,
    *,
    draft: Model | AssistantModel | DFlashModel | Eagle3Model | None = None,
    adapters: Residents | None = None,
    meter: Meter | None = None,
    selftest: SelfTest | None = None,
    check_invariants: bool = False,
    capture: Callable[[Run], Captured] | None = None,
) -> Engine:
    """Build everything between the weights and `Engine.start`. Raises the device's own error when out of memory.

    draft     draft model, used if the plan allows drafts
    adapters  adapters that requests may name
    meter     records what torch's allocator took for kv, tables and graphs
    selftest  checks the sampling kernel
    capture   replaces `CudaCapture()`
    """
    device = torch.device(plan.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for the streams and kernels of this thread
    spare = 1 if plan.graph_buckets else 0  # a scratch page for the padding rows of a captured step
    meter = meter or Meter(device)
    counts = [count + spare for count in plan.num_pages]
    num_slots = plan.num_slots + spare
    cache = model.new_cache(counts, plan.page_size, plan.kv, device, num_slots)
    drafter = _draft_model(draft, model, plan, device) if isinstance(draft, Model) and plan.num_drafts else None
    meter.note("kv")
    runner = Runner(model, cache, model.facts.vocab_size, sampler=_sampler(model, plan, device, selftest))
    listener = runner.listener = _listener(model, draft, plan, runner)
    if plan.graph_buckets:
        _capture(runner, plan, listener, drafter, capture or CudaCapture(), meter)
    whole = not model.facts.causal
    budgets = {"drafts": plan.num_drafts, "num_slots": plan.num_slots}
    if plan.guess_buckets:  # one of them, or of `graph_buckets`, has room for a token and its drafts
        budgets["draft_rows"] = plan.num_drafts + 1
    limits = SchedulerLimits(plan.max_parallel, plan.prefill_budget, whole=whole, **budgets)
    engine = Engine(
        runner, plan.num_pages, plan.ctx, limits, prefix_cache=plan.prefix_cache, check_invariants=check_invariants,
        largest_context=min(plan.max_ctx, model.facts.max_context),
        speculation=_speculation(plan, device, (listener, drafter), bool(model.states)),
    )  # fmt: skip
    if isinstance(listener, DFlashDrafter):
        listener.extend = engine.scheduler.pages.extend
    engine.adapters = adapters
    if plan.host_experts and not plan.deterministic:  # CPU and GPU round differently, so moving experts changes results
        engine.between_steps = Mover(model)
    return engine


def _capture(
    runner: Runner,
    plan: Plan,
    listener: Reading | None,
    drafter: DraftModel | None,
    capture: Callable[[Run], Captured],
    meter: Meter,
) -> None:
    """Capture graphs of the model's decode steps and of its drafters."""
    meter.settle()  # exclude what the sampler took
    decode = runner.graphs = _graphs(runner, plan, (plan.num_pages, plan.num_slots, plan.ctx), capture)
    if drafter is not None:
        given = plan.draft_pages, plan.draft_slots, drafter.max_context
        runner.beside["the draft model"] = drafter.runner.graphs = _graphs(drafter.runner, plan, given, capture)
    if listener is not None:
        sizes = sorted({shape.rows for shape in decode.shapes})
        what = "the MTP head" if listener.name == "mtp" else "the draft model"
        if isinstance(listener, DFlashDrafter):
            runner.beside[what] = listener.graphs(capture)
        else:
            runner.beside[what] = listener.graphs(decode.inputs, sizes, capture)
    meter.note("tables")
    meter.settle()
    runner.capture()
    meter.note("graphs", reserved=True)


def _graphs(
    runner: Runner, plan: Plan, pages: tuple[Sequence[int], int, int], capture: Callable[[Run], Captured]
) -> DecodeGraphs:
    """The graphs of a model. `pages` is (pages per cache group, state slots, maximum context)."""
    model, (num_pages, num_slots, ctx) = runner.model, pages
    model.reserve_positions(ctx)
    shapes = shapes_of(plan.graph_buckets, plan.guess_buckets, bool(model.states))
    most = max(shape.rows for shape in shapes)
    scratch_slot = num_slots if model.states else -1
    inputs = DecodeInputs(most, ctx, plan.page_size, num_pages, runner.cache.device, scratch_slot)
    return DecodeGraphs.of(model, runner.cache, inputs, shapes, capture)


def _speculation(
    plan: Plan,
    device: torch.device,
    paid: Sequence[Reading | DraftModel | None],
    goes_back: bool,
) -> Speculation | None:
    by_name: dict[str, AnyDrafter] = {"ngram": NgramDrafter(), **{one.name: one for one in paid if one is not None}}
    wanted = tuple(one for name, one in by_name.items() if plan.speculation in ("auto", name))
    mode: Mode = "auto" if plan.speculation == "auto" else "always"
    return Speculation(wanted, mode, device.type, goes_back) if wanted else None


def _listener(
    model: Model, draft: Model | AssistantModel | DFlashModel | Eagle3Model | None, plan: Plan, runner: Runner
) -> Reading | None:
    """The drafter that listens to the runner: a given one, or the model's MTP head if it was loaded."""
    vocab_size, all_bytes = model.facts.vocab_size, max(1, model.weight_bytes)
    if isinstance(draft, AssistantModel) and plan.num_drafts:
        return AssistantDrafter(runner, draft, vocab_size, draft.weight_bytes / all_bytes)
    if isinstance(draft, DFlashModel) and plan.num_drafts:
        return _dflash(draft, plan, runner)
    if isinstance(draft, Eagle3Model) and plan.num_drafts:
        tables = draft.embedding.nbytes - (0 if draft.own.head else draft.head.nbytes)  # not read in a round, and read
        share = (draft.weight_bytes - tables) / all_bytes
        return HeadDrafter(runner, Eagle3Head(draft, runner.cache, vocab_size), share, _captured(plan))
    if model.predictor is None or plan.speculation not in ("auto", "mtp"):
        return None
    share = model.head.linear.nbytes / all_bytes + 1 / model.facts.num_layers  # the output head and one layer
    return HeadDrafter(runner, MtpHead(model, runner.cache, vocab_size), share)


def _captured(plan: Plan) -> int:
    """Most tokens of a captured step."""
    return max((*plan.graph_buckets, *plan.guess_buckets), default=0)


def _dflash(draft: DFlashModel, plan: Plan, runner: Runner) -> DFlashDrafter:
    model, facts = runner.model, draft.facts.dflash
    assert facts is not None
    blocks = max(CAPTURED_BLOCKS[-1], min(plan.max_parallel, CROWD))
    longest = min(plan.ctx, draft.facts.max_context)
    inputs = DecodeInputs(blocks * facts.block, longest, plan.page_size, plan.num_pages, runner.cache.device)
    share = (draft.weight_bytes + model.head.linear.nbytes) / max(1, model.weight_bytes)
    return DFlashDrafter(runner, draft, inputs, _captured(plan), share)


def _draft_model(draft: Model, model: Model, plan: Plan, device: torch.device) -> DraftModel:
    spare = 1 if plan.graph_buckets else 0
    counts, num_slots = [count + spare for count in plan.draft_pages], plan.draft_slots + spare
    cache = KVCache(draft.groups, counts, plan.page_size, plan.kv, device, draft.states, num_slots)
    longest = min(plan.ctx, draft.facts.max_context)
    share = draft.weight_bytes / max(1, model.weight_bytes)
    runner = Runner(draft, cache, draft.facts.vocab_size)
    return DraftModel(runner, plan.draft_pages, plan.max_parallel, longest, model.facts.vocab_size, share)


def _sampler(model: Model, plan: Plan, device: torch.device, selftest: SelfTest | None) -> DeviceSampler | None:
    """The sampler on the GPU; None if its kernel is unavailable or fails its self-test, so the host samples."""
    if device.type != "cuda":
        return None
    try:
        from localllm.kernels.triton.sampling import sample
    except ImportError as error:  # no Triton for this system
        log.warning("sampling on the host: %s", error)
        return None
    vocab = model.facts.vocab_size
    if selftest is not None and not selftest.sampler_passed("triton", sample, vocab, str(device)):
        return None
    return DeviceSampler(sample, plan.max_parallel, vocab, device, _captured(plan))
