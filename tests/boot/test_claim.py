"""Cards that torch cannot use are refused at load with the cause."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.boot.claim import check_card, check_room, confined, out_of_memory, runs_code_of, spread_memory
from localllm.device import GpuProcess
from localllm.device.fake import MACHINES
from localllm.errors import DeviceError, OutOfMemory

CARD = MACHINES["rtx5090"].gpus[0]
CU128 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (CU128, 120, True),
        (CU128, 121, True),  # machine code of its major version
        (CU128, 89, True),
        (CU128, 110, False),
        (("sm_80", "sm_86", "sm_90"), 120, False),
        (("sm_80", "compute_90"), 120, True),
        (("sm_80", "compute_90a"), 120, False),
        (("sm_120a",), 121, False),
        (("sm_90",), 89, False),
        ((), 90, False),
    ],
)
def test_which_code_a_card_runs(built: tuple[str, ...], capability: int, runs: bool) -> None:
    assert runs_code_of(built, capability) is runs


def torch_sees(
    monkeypatch: pytest.MonkeyPatch, count: int, capability: int = 120, built: tuple[str, ...] = CU128
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: divmod(capability, 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "some card")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built))


def test_a_card_that_fits_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_sees(monkeypatch, 1)
    check_card("cuda:0", CARD)


@pytest.mark.parametrize(
    ("count", "capability", "built", "device", "words"),
    [
        (0, 120, CU128, "cuda:0", "finds no CUDA device"),
        (1, 120, CU128, "cuda:1", "torch finds only 1 GPU"),
        (2, 86, CU128, "cuda:0", "number the GPUs differently"),
        (1, 120, ("sm_80", "sm_90"), "cuda:0", "no code for NVIDIA GeForce RTX 5090 (sm_120), only for sm_80, sm_90"),
    ],
)
def test_a_card_that_does_not_is_named_with_the_cause(
    count: int, capability: int, built: tuple[str, ...], device: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_sees(monkeypatch, count, capability, built)
    with pytest.raises(DeviceError) as caught:
        check_card(device, replace(CARD, index=1))
    assert words in caught.value.message and caught.value.hint


def test_two_cards_of_one_class_that_torch_numbers_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program started CUDA before it loaded a model: the fastest card has the number 0."""
    torch_sees(monkeypatch, 2)
    uuids = ["5ca1ab1e-0000", "c0ffee00-0001"]
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    cards = [replace(CARD, index=number, uuid=f"GPU-{uuid}") for number, uuid in enumerate(uuids)]
    check_card("cuda:1", cards[1])
    with pytest.raises(DeviceError, match="number the GPUs differently"):
        check_card("cuda:0", cards[1])


def test_a_card_that_somebody_took_since_it_was_planned_is_named_with_him(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, gib = MACHINES["rtx5090"], 1 << 30
    card = replace(CARD, free_bytes=20 * gib, processes=(GpuProcess(7, gib, "xorg"),))
    planned = replace(machine, gpus=(card,))
    made: Any = SimpleNamespace(device="cuda:0", need_bytes=18 * gib, margin_bytes=gib)
    check_room(made, planned, planned)
    taken = replace(card, free_bytes=4 * gib, processes=(*card.processes, GpuProcess(99, 16 * gib, "blender")))
    with pytest.raises(OutOfMemory, match=r"has 4.0 GiB free, down from 20.0 GiB .*: blender 99 holds 16.0 GiB$"):
        check_room(made, planned, replace(machine, gpus=(taken,)))
    with pytest.raises(DeviceError, match="the driver no longer lists it"):
        check_room(made, planned, replace(machine, gpus=()))
    monkeypatch.setattr("localllm.boot.claim.machine", lambda: replace(machine, gpus=(taken,)))
    host = out_of_memory(MemoryError(), "cuda:0", planned).message
    assert host.startswith("the machine ran out of memory while loading the model: ")
    said = out_of_memory(torch.OutOfMemoryError("CUDA out of memory"), "cuda:0", planned).message
    assert said == f"{CARD.name} ran out of memory while loading the model: blender 99 holds 16.0 GiB"


def plan(cpus: tuple[int, ...], nodes: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(cpus=cpus, nodes=nodes, ranks=())


@pytest.mark.skipif(sys.platform != "linux", reason="sets of CPUs are Linux's")
def test_threads_started_within_stay_on_the_plans_cpus() -> None:
    before = os.sched_getaffinity(0)
    first = min(before)
    with ThreadPoolExecutor(1) as pool:
        with confined(plan((first,), (0,))):
            assert os.sched_getaffinity(0) == {first}
            assert pool.submit(os.sched_getaffinity, 0).result() == {first}
        assert os.sched_getaffinity(0) == before
        assert pool.submit(os.sched_getaffinity, 0).result() == {first}, "the engine's thread stays where it began"
    with confined(plan((4095,))):  # no such CPU
        assert os.sched_getaffinity(0) == before
    assert not spread_memory((1023,)), "no such node"
