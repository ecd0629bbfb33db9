"""Every implementation of the ops that carry a state against the reference, on steps with prompts and without."""

from __future__ import annotations

import pytest
import torch

from localllm.kernels import recurrent
from localllm.kernels.registry import RECURRENT, Impl, OpFacts
from localllm.kernels.table import implementations
from localllm.kernels.verify.cases import ModelShapes
from localllm.kernels.verify.trial import op_error

FACTS = OpFacts(deterministic=False)
FAST = [impl for op in RECURRENT for impl in implementations(op)[:-1] if impl.fits(FACTS) is None]


@pytest.mark.parametrize("impl", FAST, ids=[impl.key for impl in FAST])
def test_outputs_and_states_are_those_of_the_reference(impl: Impl) -> None:
    assert op_error(impl.op, impl.run, ModelShapes(hidden=64, intermediate=128)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("op", ["delta_rule", "state_space"])
def test_all_instruction_sets_give_what_the_reference_gives(isa: str, op: str) -> None:
    (run,) = (impl.run for impl in implementations(op) if impl.name == "c")
    assert op_error(op, run, ModelShapes(hidden=64, intermediate=128)) == ""


def test_a_state_space_gives_the_same_bits_for_a_prompt_and_for_its_tokens(isa: str) -> None:
    (run,) = (impl.run for impl in implementations("state_space") if impl.name == "c")
    draw = torch.Generator().manual_seed(5)
    x, b, c = (torch.randn(9, *shape, generator=draw) for shape in ((6, 21), (2, 37), (2, 37)))
    steps, decay = torch.rand(9, 6, generator=draw), -torch.rand(6, generator=draw)
    state = torch.randn(3, 6, 21, 37, generator=draw)
    whole, single = state.clone(), state.clone()
    slots = torch.tensor([2])
    y = run(x, b, c, steps, decay, whole, slots, torch.tensor([0, 9], dtype=torch.int32))
    for t in range(9):
        at, one = slice(t, t + 1), torch.tensor([0, 1], dtype=torch.int32)
        assert torch.equal(run(x[at], b[at], c[at], steps[at], decay, single, slots, one), y[at]), t
    assert torch.equal(whole, single) and torch.equal(whole[:2], state[:2])


def test_a_state_space_without_decay_adds_up_what_it_is_given() -> None:
    x, ones = torch.arange(1.0, 71.0).view(70, 1, 1), torch.ones(70, 1, 1)
    state = torch.full((2, 1, 1, 1), 100.0)
    where = torch.tensor([1]), torch.tensor([0, 70], dtype=torch.int32)
    steps, decay = torch.full((70, 1), 2.0), torch.zeros(1)
    for run in (recurrent.state_space, recurrent.state_space_chunked):
        kept = state.clone()
        y = run(x, ones, ones, steps, decay, kept, *where)
        assert torch.allclose(y.flatten(), 100 + 2 * x.flatten().cumsum(0))
        assert kept.flatten().tolist() == [100.0, float(y[-1])]
