"""What rounding activations to 16 bits costs: KL against float32 products, for every block type of our kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/synthetic.py"
SPEC = importlib.util.spec_from_file_location("synthetic", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
synthetic = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(synthetic)
DEFAULT = ("Q4_K", "Q3_K", "IQ4_NL")
"""the others run with `make test-all`"""


@pytest.mark.parametrize(
    "block_type", [pytest.param(t, marks=() if t in DEFAULT else pytest.mark.slow) for t in synthetic.TYPES]
)
def test_every_block_type_is_near_float32(block_type: str, paged: Any, tmp_path: Path) -> None:
    path = synthetic.write_model(tmp_path / "model.gguf", block_type)
    ids = torch.randint(3, synthetic.VOCAB, (160,)).tolist()
    rows = []
    for exact, kv in ((True, "f32"), (False, "bf16")):
        with open_model(path) as checkpoint:
            model = load_model(checkpoint, LoadOptions(exact=exact))
        rows.append(paged(model, kv=kv).all_logits(ids, [len(ids)]).log_softmax(-1).double())
    exact_rows, ours = rows
    assert float(exact_rows.exp().amax(-1).median()) > 0.02  # sure enough of some token for a divergence to mean much
    divergence = (exact_rows.exp() * (exact_rows - ours)).sum(-1)
    assert float(divergence.mean()) < 0.001
    assert float(divergence.quantile(0.99)) < 0.02
