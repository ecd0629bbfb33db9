"""Wrong kernels are caught by name, the next ones take their place, and verdicts are kept."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels import Impl, LinearFacts, OpFacts, Weight, choose, reference, sampling, table
from localllm.kernels.registry import OPS, RECURRENT, SPARSE, fits_always
from localllm.kernels.table import implementations
from localllm.kernels.verify.cases import ModelShapes, op_cases
from localllm.kernels.verify.records import Records, capability_of
from localllm.kernels.verify.selftest import KernelCrash, SelfTest
from localllm.kernels.verify.trial import compare, is_device_lost, linear_error

FACTS = OpFacts(num_heads=6, num_kv_heads=2, head_dim=20, kv_format="bf16")
SHAPES = ModelShapes(hidden=44, intermediate=70, facts=FACTS, has_windows=True)


BACK_ENDS = table.BACK_ENDS


def plant(monkeypatch: pytest.MonkeyPatch, op: str, run: Callable[..., Any]) -> None:
    """Put a kernel of ours in front of all others."""
    monkeypatch.setattr(table, "BACK_ENDS", ({op: (Impl(op, "planted", fits_always, run),)}, *BACK_ENDS))


def off_at_the_end(x: Tensor, *rest: Any) -> Tensor:
    """Right but for the last row of an odd batch."""
    out = reference.rms_norm(x, *rest)
    if x.shape[0] % 2:
        out[-1] *= 1.5
    return out


def forgets_the_window(q: Tensor, pages: Any, *rest: Any) -> Tensor:
    table, starts, lengths, scale, _window, softcap = rest
    return reference.paged_attention(q, pages, table, starts, lengths, scale, None, softcap)


def forgets_the_sinks(*given: Any) -> Tensor:
    return reference.paged_attention(*given[:8])


def needs_pages_of_16_tokens(q: Tensor, pages: Any, *rest: Any) -> Tensor:
    if pages.k.shape[2] < 16:
        raise ValueError(f"page size {pages.k.shape[2]}")
    return reference.paged_attention(q, pages, *rest)


def writes_one_slot_too_far(k: Tensor, v: Tensor, pages: Any, slots: Tensor) -> None:
    reference.kv_write(k, v, pages, (slots + 1) % (pages.k.shape[0] * pages.k.shape[2]))


def failing(error: Exception) -> Callable[..., Any]:
    """A kernel that raises it."""

    def fails(*arguments: Any) -> Tensor:
        raise error

    return fails


def refuses(*arguments: Any) -> Tensor:
    raise ValueError("shared memory: 101,377 of 101,376 bytes")


def nan_for_one_token(gate_up: Tensor, limit: float | None = None) -> Tensor:
    out = reference.silu_mul(gate_up, limit)
    if gate_up.shape[0] == 1:
        out[0, 3] = torch.nan
    return out


def forgets_the_limit(gate_up: Tensor, limit: float | None = None) -> Tensor:
    return reference.gelu_tanh_mul(gate_up)


@pytest.mark.parametrize(
    ("op", "run", "words"),
    [
        ("rms_norm", off_at_the_end, "1 x 44: relative error"),
        ("paged_attention", forgets_the_window, "window 37: relative error"),
        ("kv_write", writes_one_slot_too_far, "1 tokens: relative error"),
        ("silu_mul", nan_for_one_token, "1 of 70 values are not finite"),
        ("gelu_tanh_mul", forgets_the_limit, "clamped: relative error"),
        ("rope", refuses, "ValueError: shared memory: 101,377"),
    ],
)
def test_a_wrong_op_is_caught_and_named(
    op: str, run: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, op, run)
    test = SelfTest()
    taken = dict(test.table(SHAPES).ops)
    assert taken[op] != "planted"
    (failure,) = test.failures
    assert failure.name == f"{op}:planted"
    assert words in failure.reason
    assert str(failure).startswith(f"{op}:planted failed its self-test (")
    assert all(
        impl != "torch" for name, impl in taken.items() if name in OPS and name not in (*RECURRENT, *SPARSE)
    )  # what is right stays


def test_a_kernel_without_sinks_is_caught_where_the_model_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "paged_attention", forgets_the_sinks)
    test, other = SelfTest(), SelfTest()
    assert dict(test.table(SHAPES).ops)["paged_attention"] == "planted"
    assert dict(other.table(replace(SHAPES, has_sinks=True)).ops)["paged_attention"] != "planted"
    assert "mixed: relative error" in other.failures[0].reason and not test.failures


def test_a_kernel_that_cannot_read_blocks_is_caught_where_the_model_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "paged_attention", needs_pages_of_16_tokens)
    test, other = SelfTest(), SelfTest()
    assert dict(test.table(replace(SHAPES, states=())).ops)["paged_attention"] == "planted"
    sparse = replace(SHAPES, states=(("index_scores", (3, 20, 4)),))
    assert dict(other.table(sparse).ops)["paged_attention"] != "planted"
    assert "blocks of 4 tokens: ValueError: page size 4" in other.failures[0].reason and not test.failures


FORMATS, HEADS = ("f32", "bf16", "fp16", "int8", "fp8"), ((6, 2, 20), (9, 3, 64), (4, 1, 256))
QUICK = [("f32", HEADS[0]), ("bf16", HEADS[2]), ("int8", HEADS[1]), ("fp8", HEADS[0])]


@pytest.mark.parametrize(
    ("kv_format", "heads"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in itertools.product(FORMATS, HEADS)],
)
def test_our_kernels_pass(kv_format: str, heads: tuple[int, int, int]) -> None:
    """Without a reason to suspect them nothing is disabled: a false alarm costs speed until the next release."""
    num_heads, kv_heads, dim = heads
    facts = replace(FACTS, kv_format=kv_format, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=dim)
    test = SelfTest()
    test.table(replace(SHAPES, facts=facts, softcap=30.0, rotated=dim // 2))
    assert test.failures == []


def test_every_op_has_cases() -> None:
    for op in OPS:
        assert len(list(op_cases(op, SHAPES))) >= 3


def test_states_are_tried_in_the_sizes_of_the_model() -> None:
    """What it does not have is neither tried nor compiled."""
    shapes = replace(SHAPES, states=(("causal_conv", (12, 3)), ("state_space", (4, 1, 6, 5))))
    tried = {op: [arguments[0].shape[1:] for _, arguments in op_cases(op, shapes)] for op in RECURRENT}
    assert set(tried["causal_conv"]) == {(12,)} and set(tried["state_space"]) == {(4, 6)}
    assert not tried["delta_rule"]
    assert shapes.key == f"{SHAPES.key} causal_conv 12x3 state_space 4x1x6x5"


def weight_of(n: int, k: int) -> Weight:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    return Weight("int4g", (n, k), codes, torch.rand(n, k // 32).half() + 0.1, group_size=32)


def test_what_a_case_launches_is_compiled_before_it_runs() -> None:
    compiled: list[Any] = []
    test = SelfTest(compile_ahead=compiled.append)
    test.table(SHAPES)
    assert test.num_run > 5 and len(compiled) == test.num_run


def test_a_product_is_tried_with_the_weight_itself() -> None:
    """One that forgets the scales of its last group; the reference is not asked."""
    weight = weight_of(50, 96)
    facts = LinearFacts("int4g", (50, 96), group_size=32)
    right = choose(table.implementations("linear"), facts).impl
    prepared = right.prepare(weight)
    assert SelfTest().linear_passed(right, facts, weight, prepared)
    assert weight.scales is not None
    scales = weight.scales.clone()
    scales[:, -1] = 1.0
    wrong = replace(right, name="wrong")
    test = SelfTest()
    assert not test.linear_passed(wrong, facts, weight, right.prepare(weight._replace(scales=scales)))
    assert test.disabled == {"linear:wrong"} and test.failures[0].name == "linear:wrong"
    assert "int4g 50 x 96, 1 tokens: relative error" in test.failures[0].reason
    assert not test.linear_passed(wrong, facts, weight, prepared)  # once is enough
    cut = replace(right, run=lambda x, prepared, bias: right.run(x, prepared, bias)[:, :-1])
    assert "shape [1, 49] instead of [1, 50]" in linear_error(cut, facts, weight, prepared)


def test_a_kernel_that_crashes_the_card_is_passed_over_from_the_next_start_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crashes(*arguments: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it")

    plant(monkeypatch, "rope", crashes)
    with pytest.raises(KernelCrash, match="rope:planted crashed the GPU in its self-test: CUDA error"):
        SelfTest(Records("selftest", {}, tmp_path)).table(SHAPES)
    test = SelfTest(Records("selftest", {}, tmp_path))
    assert dict(test.table(SHAPES).ops)["rope"] == "c"
    assert "left the device unusable" in test.failures[0].reason


@pytest.mark.parametrize(
    "said", ["CUDA error: uncorrectable ECC error encountered", "Triton Error [CUDA]: unknown error"]
)
def test_a_gpu_that_fails_is_no_fault_of_a_kernel(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    plant(monkeypatch, "rope", failing(RuntimeError(said + more)))
    with pytest.raises(RuntimeError, match=said.split(": ")[1]):
        SelfTest(Records("selftest", {}, tmp_path)).table(SHAPES)
    plant(monkeypatch, "rope", reference.rope)
    again = SelfTest(Records("selftest", {}, tmp_path))
    assert dict(again.table(SHAPES).ops)["rope"] == "planted" and again.failures == []


def test_numbers_that_overflow_in_the_reference_are_not_held_against_a_kernel(tmp_path: Path) -> None:
    """For the file with them it is disabled; for sound ones of the same shape it is tried again."""
    weight, facts = weight_of(50, 96), LinearFacts("int4g", (50, 96), group_size=32)
    assert weight.scales is not None
    broken = weight._replace(scales=weight.scales.float().fill_(1e37))
    right = choose(table.implementations("linear"), facts).impl
    test = SelfTest(Records("selftest", {}, tmp_path))
    assert not test.linear_passed(right, facts, broken, right.prepare(broken))
    assert "not finite, and some of the reference" in test.failures[0].reason
    test.save()
    again = SelfTest(Records("selftest", {}, tmp_path))
    assert again.linear_passed(right, facts, weight, right.prepare(weight)) and again.num_run == 1
    assert compare(torch.tensor([torch.inf, 1.0]), torch.ones(2), 1.0) == "1 of 2 values are not finite"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),
        OSError(28, "No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_could_not_be_compiled_today_is_tried_again_tomorrow(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "rope", failing(error))
    test = SelfTest(Records("selftest", {}, tmp_path))
    assert dict(test.table(SHAPES).ops)["rope"] == "c"
    assert type(error).__name__ in test.failures[0].reason
    test.save()
    plant(monkeypatch, "rope", reference.rope)
    again = SelfTest(Records("selftest", {}, tmp_path))
    assert dict(again.table(SHAPES).ops)["rope"] == "planted" and again.failures == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=["gpu", "cpu"])
def test_memory_that_runs_out_is_no_fault_of_a_kernel(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "rope", failing(error))
    test = SelfTest(Records("selftest", {}, tmp_path))
    with pytest.raises(type(error)):
        test.table(SHAPES)
    assert test.failures == [] and not [key for key, _ in test.records.items() if "planted" in key]


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("device-side assert triggered", True),
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("Triton Error [CUDA]: uncorrectable ECC error encountered", True),
        ("Triton Error [CUDA]: uncorrectable NVLink error detected during the execution", True),
        ("Triton Error [CUDA]: unknown error", True),
        ("CUDA driver error: device not ready", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", False),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic", False),
        ("CUDA error: invalid configuration argument", False),
        ("CUDA error: no kernel image is available for execution on the device", False),
        ("Triton Error [CUDA]: device kernel image is invalid", False),  # of a newer ptxas than the driver
        ("Triton Error [CUDA]: out of resources: shared memory", False),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),
        ("CUDA error: operation not permitted when stream is capturing", False),
        ("CUDA error: operation failed due to a previous error during capture", False),
        ("CUDA error: operation would result in a merge of separate capture sequences", False),
        ("CUDA error: operation not permitted on an event last recorded in a capturing stream", False),
        ("CUDA error: dependency created on uncaptured work in another stream", False),
        ("Triton Error [CUDA]: operation not supported on global/shared address space", True),
    ],
)
def test_a_card_that_is_lost_is_told_from_a_launch_that_was_refused(said: str, lost: bool) -> None:
    assert is_device_lost(RuntimeError(said)) is lost
    assert is_device_lost(torch.AcceleratorError(said)) is lost


@pytest.mark.parametrize(("name", "group"), [("triton_fp8_w8a8", 4096), ("triton_nvfp4_w4a4", 16)])
def test_what_rounding_activations_costs_is_known(name: str, group: int) -> None:
    """Else the self-test would refuse a product for what it was asked to do."""
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1)).view(-1, group)
    largest = x.abs().amax(1, keepdim=True)
    if group == 16:
        steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        scaled = x / largest * 6
        rounded = steps[(scaled.abs()[..., None] - steps).abs().argmin(-1)] * scaled.sign()
    else:
        scaled = x / largest * 448
        rounded = scaled.to(torch.float8_e4m3fn).float()
    lost = float(((rounded - scaled) * largest).norm() / (scaled * largest).norm())
    rounds = next(impl.rounds for impl in implementations("linear") if impl.name == name)
    assert lost * 0.9 < rounds < lost * 1.5


def test_an_amd_card_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch for ROCm shows it: a card of CUDA, of capability 9.4."""
    card = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert capability_of(torch.device("cuda")) == 94
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert capability_of(torch.device("cuda")) == 942
    facts = LinearFacts("dense", (64, 64), device="cuda", capability=942, dtype="bfloat16", deterministic=False)
    choice = choose(implementations("linear"), facts)
    assert "triton" not in choice.impl.name
    assert ("triton", "the kernels compile for AMD GPUs (gfx942), but have not been run on one") in choice.passed_over


def test_a_wrong_sampler_is_caught() -> None:
    def off_by_one(logits: Tensor, inputs: Any, cuts: bool) -> Any:
        out = sampling.sample(logits, inputs, cuts)
        return out._replace(token_ids=(out.token_ids + 1) % logits.shape[1])

    def forgets_cuts(logits: Tensor, inputs: Any, cuts: bool) -> Any:
        return sampling.sample(logits, inputs, False)

    def counts_nothing(logits: Tensor, inputs: Any, cuts: bool) -> Any:
        return sampling.sample(logits, inputs._replace(history=inputs.history.clone()), cuts)

    assert SelfTest().sampler_passed("reference", sampling.sample, 1001, "cpu")
    for run, words in ((off_by_one, "greedy"), (forgets_cuts, "random rows"), (counts_nothing, "token counts")):
        test = SelfTest()
        assert not test.sampler_passed("planted", run, 1001, "cpu")
        assert words in test.failures[0].reason and test.failures[0].name == "sample:planted"


def test_verdicts_are_kept_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "rms_norm", off_at_the_end)
    runs = []
    for identity in ({"driver": "1"}, {"driver": "1"}, {"driver": "2"}):
        test = SelfTest(Records("selftest", identity, tmp_path))
        assert dict(test.table(SHAPES).ops)["rms_norm"] != "planted"
        assert [f.name for f in test.failures] == ["rms_norm:planted"]  # also when it was known
        test.save()
        runs.append(test.num_run)
    assert runs[0] > 5 and runs[1] == 0 and runs[2] == runs[0]
    other = SelfTest(Records("selftest", {"driver": "1"}, tmp_path))
    other.table(replace(SHAPES, hidden=48))
    assert other.num_run == runs[0]


def test_a_damaged_or_unwritable_record_only_costs_a_repetition(tmp_path: Path) -> None:
    records = Records("selftest", {"a": "b"}, tmp_path)
    records.put("x", {"reason": ""})
    records.save()
    assert records.path is not None
    assert Records("selftest", {"a": "b"}, tmp_path).get("x") == {"reason": ""}
    for damage in ("", "{", "[]", '{"entries": 3}', json.dumps({"entries": {"x": 3}})):
        records.path.write_text(damage)
        assert Records("selftest", {"a": "b"}, tmp_path).get("x") is None
    (tmp_path / "file").write_text("")
    blocked = Records("selftest", {"a": "b"}, tmp_path / "file/below")
    blocked.put("x", {"reason": ""})
    blocked.save()


def test_compare_sees_a_single_wrong_number() -> None:
    right = torch.randn(64, 64)
    assert compare(right, right.clone(), 1e-3) == ""
    assert compare(right.bfloat16(), right, 2e-2) == ""
    wrong = right.clone()
    wrong[5, 7] += 0.5
    assert "5.0e-01 maximum" in compare(wrong, right, 1e-3)
    assert "shape" in compare(right[:3], right, 1e-3)
