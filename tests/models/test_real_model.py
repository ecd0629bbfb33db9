"""The starter model: the right answer, the same bits in any company, with default kernels and with plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model

PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]
PROMPT += [198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
PARIS = [504, 3575, 282, 4649, 314, 7042, 30]
C_KERNELS = frozenset({"linear:c_int16", "linear:c_float32"})


@pytest.mark.parametrize(
    ("exact", "disabled"),
    [
        pytest.param(False, frozenset(), id="default"),
        pytest.param(True, frozenset(), id="float32", marks=pytest.mark.slow),
        pytest.param(False, C_KERNELS, id="torch", marks=pytest.mark.slow),
        pytest.param(True, C_KERNELS, id="torch-float32", marks=pytest.mark.slow),
    ],
)
def test_smollm2_says_paris_in_any_company(
    exact: bool, disabled: frozenset[str], smollm2_path: Path, paged: Any
) -> None:
    kv = "f32" if exact else "bf16"
    with open_model(smollm2_path) as checkpoint:
        model = load_model(checkpoint, LoadOptions(exact=exact, disabled=disabled))
    ids = PROMPT + PARIS
    whole = paged(model, kv=kv).all_logits(ids, [len(ids)])
    assert whole[len(PROMPT) - 1 : -1].argmax(-1).tolist() == PARIS
    assert torch.equal(paged(model, kv=kv).all_logits(ids, [17, 1, len(PROMPT) - 18]), whole)
    together = paged(model, kv=kv)
    first = together.step({0: ids[:30], 1: PARIS, 2: ids[:40]})
    second = together.step({2: ids[40:], 0: ids[30:31], 1: PROMPT[:3]})
    assert torch.equal(torch.cat([first[0], second[0]]), whole[:31])
    assert torch.equal(torch.cat([first[2], second[2]]), whole)
