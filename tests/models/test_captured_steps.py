"""Steps that a GPU captures wait for no result and use no memory of the host: every architecture, on the meta device.

Models are loaded on the CPU with the kernels of a GPU and then moved to the meta device, whose values nobody can read.
Launches of Triton kernels are recorded, not run.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localllm.boot.assembly import assemble
from localllm.config import EngineOptions
from localllm.device.fake import MACHINES
from localllm.engine.cuda_graph import Captured, Run
from localllm.engine.device_sampler import DeviceSampler
from localllm.engine.speculation import SLOWER
from localllm.kernels import table
from localllm.kernels.triton import ops
from localllm.kernels.triton.cards import Card
from localllm.kernels.triton.launch import recording
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model
from localllm.plan.planner import Planner

from . import test_deepseek_v4, test_glm5_next, test_qwen4_exp
from .test_predictor import NAMES as WITH_HEAD
from .test_predictor import with_head

META = torch.device("meta")
CARD = Card(90, 132)
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2", "bincount")
LEAVES = (type, types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType, str, bytes, int, float)
LEAVES += (type(cache(len)),)  # what other models use, too
# some of each kind of layer; all are tested by `make test-all`
USUAL = ("qwen3.5", "gpt-oss", "gemma4-moe", "glm5-next", "nemotron-h-moe", "cohere2-moe-shared", "deepseek-v4")


def tensors_of(*roots: Any) -> list[Tensor]:
    """Every tensor that these refer to, also those that functions keep."""
    found, seen, left = [], set(), list(roots)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, LEAVES) or isinstance(one, dict) and "__builtins__" in one:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, types.FunctionType):
            left += [cell.cell_contents for cell in one.__closure__ or ()] + list(one.__defaults__ or ())
        else:
            left += gc.get_referents(one)
    return found


def to_meta(*roots: Any) -> None:
    for one in tensors_of(*roots):
        torch.utils.swap_tensors(one, torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=META))


class Watch(TorchDispatchMode):
    """Notes what a capture would fail on, or would do only once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def note(self, what: str) -> None:
        frame, places = sys._getframe(1), []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if {"kernels", "models", "engine"} & set(path.parts) and "tests" not in path.parts:
                places.append(f"{path.name}:{frame.f_lineno}")
            frame = frame.f_back
        self.found[f"{what} in {' < '.join(places[:3])}"] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor)]
        devices = {one.device.type for one in tensors if one.dim()}
        to = torch.device((kwargs or {}).get("device") or (tensors[0].device if tensors else "cpu"))
        if len(devices) > 1:
            self.note(f"{name} of tensors on {' and '.join(sorted(devices))}")
        if "meta" in devices and name in WAITS:
            self.note(f"{name} waits")
        if name == "_to_copy" and to.type != tensors[0].device.type:
            self.note(f"copy from {tensors[0].device} to {to}")
        if name.startswith(("index.", "index_put", "_index_put")) or name == "index":
            places = [one for one in tree_leaves(args[1]) if isinstance(one, Tensor)]
            if any(one.dtype in (torch.bool, torch.uint8) for one in places):
                self.note(f"{name} by a mask waits")
        return func(*args, **(kwargs or {}))


class Made(TorchFunctionMode):
    """Notes tensors that are made from numbers of the host, which no dispatch shows."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor) and torch.device((kwargs or {}).get("device") or "cpu") == META:
            self._watch.note(f"{func.__name__} copies from the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def capturing(found: dict[str, None]) -> Iterator[None]:
    """Add to `found` what a capture of the block would fail on."""
    watch = Watch()
    try:
        with recording(CARD) as launches, watch, Made(watch):
            yield
    finally:
        found |= watch.found
    for launch in launches:
        assert launch.signature, "of types that kernels know"
        away = [name for name, one in launch.args.items() if isinstance(one, Tensor) and one.device != META]
        found |= {f"{launch.kernel.__name__} gets {name} of the host": None for name in away}


@pytest.fixture
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(asked: Callable[[Any], str | None], facts: Any) -> str | None:
        return asked(replace(facts, device="cuda", capability=CARD.capability))

    impls = {name: tuple(replace(one, fits=partial(fits, one.fits)) for one in ops.IMPLS[name]) for name in ops.IMPLS}
    monkeypatch.setattr(table, "BACK_ENDS", (impls, table.PLAIN))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setitem(SLOWER, "meta", SLOWER["cuda"])


@torch.inference_mode()
def on_meta(folder: Path, **options: Any) -> Model:
    """As published: stored as bfloat16."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    save_file({key: one.bfloat16() if one.is_floating_point() else one for key, one in stored.items()}, file)
    with open_model(folder) as checkpoint:
        model = load_model(checkpoint, LoadOptions(dtype="bfloat16", kv_format="bf16", deterministic=False, **options))
    model.reserve_positions(512)
    to_meta(model)
    return model


@torch.inference_mode()
def faults(model: Model, speculation: str = "ngram") -> list[str]:
    """What is wrong with the steps of the plan's graphs, with and without drafts, those of a head, or with sampling.

    Also whether the cache outlives them: nothing collects cycles after `gc.freeze`.
    """
    from localllm.kernels.triton.sampling import sample

    wanted = EngineOptions(device="cuda:0", kv="bf16", ctx=256, max_parallel=3, speculation=speculation)
    plan = Planner(MACHINES["h100"], wanted).plan(model.facts)
    assert plan.graph_buckets == (1, 2, 3) and plan.guess_buckets
    counts = {"num_pages": tuple(40 for _ in plan.num_pages), "num_slots": min(9, plan.num_slots)}
    found: dict[str, None] = {}

    def capture(run: Run) -> Captured:
        with capturing(found):
            return run(), lambda: None

    gc.disable()
    try:
        runner = assemble(model, replace(plan, device="meta", **counts), capture=capture).runner
        graphs = runner.graphs
        assert graphs is not None and bool(runner.beside) is (speculation == "mtp")
        if not graphs.failure:
            DeviceSampler(sample, 3, model.facts.vocab_size, META, 16).capture(graphs.buckets, capture)
        cache, failure = weakref.ref(runner.cache), graphs.failure
        runner.release()
        del runner, graphs
        model.forget_pages()
        return [*found, *filter(None, [failure, cache() and "the cache outlives its engine"])]
    finally:
        gc.enable()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", USUAL)
def test_a_step_can_be_captured(
    name: str, tiny_for_gpu: Callable[[str], Any], tmp_path: Path, as_on_a_card: None
) -> None:
    assert not faults(on_meta(tiny_for_gpu(name).save(tmp_path)))


@pytest.mark.parametrize("name", WITH_HEAD)
def test_passes_of_an_mtp_head_can_be_captured(
    name: str, tiny_for_gpu: Callable[[str], Any], tmp_path: Path, as_on_a_card: None
) -> None:
    made, _ = with_head(tiny_for_gpu(name), name)
    assert not faults(on_meta(made.save(tmp_path), predictor=True), "mtp")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen4-exp", "glm5-next", "deepseek-v4"])
def test_passes_of_a_head_over_several_streams_can_be_captured(
    name: str, tiny_for_gpu: Callable[[str], Any], tiny_of: Callable[..., Any], tmp_path: Path, as_on_a_card: None
) -> None:
    made = tiny_for_gpu(name)
    if name == "glm5-next":
        test_glm5_next.with_head(made)[0].save(tmp_path)
    else:
        (test_qwen4_exp if name == "qwen4-exp" else test_deepseek_v4).with_head(tiny_of, made, tmp_path)
    assert not faults(on_meta(tmp_path, predictor=True), "mtp")


@pytest.mark.slow
def test_a_step_of_every_architecture_can_be_captured(
    tiny_names: tuple[str, ...], tiny_for_gpu: Callable[[str], Any], tmp_path: Path, as_on_a_card: None
) -> None:
    found = {name: faults(on_meta(tiny_for_gpu(name).save(tmp_path / name))) for name in tiny_names}
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_what_a_capture_would_fail_on_is_found() -> None:
    x, here = torch.zeros(3, 4, device=META), torch.zeros(2, dtype=torch.int64)
    for call in (
        lambda: x[here],
        lambda: x[x > 0],
        lambda: x.new_zeros(3).add_(torch.ones(3)),
        lambda: torch.tensor([1, 2], device=META),
        lambda: torch.ones(2).to(META),
        lambda: int(x[0, 0]),
        lambda: x.nonzero(),
    ):
        found: dict[str, None] = {}
        try:
            with capturing(found):
                call()
        except (RuntimeError, NotImplementedError) as error:  # values of the meta device
            assert "meta" in str(error)
        else:
            assert len(found) == 1
