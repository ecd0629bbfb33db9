"""Every implementation of the ops that carry a state against the reference, on steps with prompts and without."""

from __future__ import annotations

import pytest
import torch

from localllm.kernels import recurrent
from localllm.kernels.registry import RECURRENT, Impl
from localllm.kernels.table import implementations
from localllm.kernels.verify.cases import ModelShapes
from localllm.kernels.verify.trial import op_error

FAST = [impl for op in RECURRENT for impl in implementations(op)[:-1]]


@pytest.mark.parametrize("impl", FAST, ids=[impl.key for impl in FAST])
def test_outputs_and_states_are_those_of_the_reference(impl: Impl) -> None:
    assert op_error(impl.op, impl.run, ModelShapes(hidden=64, intermediate=128)) == ""


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
