"""A tiny Llama, Phi-3 and Muse Glimmer in each family of stored formats, against transformers on their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_weights import FORMATS, packed_model
from torch.func import functional_call

from localllm.checkpoint import stored_formats
from localllm.errors import UnsupportedFormat
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model
from localllm.quant import dequantize, load_weight


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["llama", "phi3", "muse-glimmer"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_model_matches_its_dense_form(
    name: str, kind: str, tiny: Callable, paged: Any, tmp_path: Path
) -> None:
    model = tiny(f"{kind}-packable")
    tensors, config = packed_model(model, name)
    folder = model.save(tmp_path, tensors, quantization_config=config)
    dense = dict(model.reference.state_dict())
    with open_model(folder) as checkpoint:
        if (name, kind) == ("gptq", "muse-glimmer"):  # queries and gates with inputs in an order of their own each
            with pytest.raises(UnsupportedFormat, match="and its gate cannot be fused"):
                load_model(checkpoint)
            return
        for module, stored in stored_formats(checkpoint).items():
            key = f"{module}.weight"
            dense[key] = dequantize(load_weight(checkpoint, module, stored, tuple(dense[key].shape)))
        ours = load_model(checkpoint, LoadOptions(exact=True))
    ids = torch.randint(0, 99, (40,)).tolist()
    with torch.no_grad():
        expected = functional_call(model.reference, dense, (torch.tensor([ids]),), {"use_cache": False}).logits[0]
    rows = paged(ours).all_logits(ids, [30])
    assert float((rows - expected).abs().max() / expected.abs().max()) < 1e-4
    # q, k and v become one weight, if they are not stored so, unless each takes its inputs in an order of its own
    assert len(ours.layers[0].mixer.qkv.parts) == (3 if (name, kind) == ("gptq", "llama") else 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["kimi-linear", pytest.param("ling3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_delta_layers_and_latents(name: str, kind: str, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Modules too small for a group stay dense; up projections of latents become bfloat16, to be split by head."""
    model = tiny(f"{kind}-packable")
    tensors, config = packed_model(model, name)
    with open_model(model.save(tmp_path / "packed", tensors, quantization_config=config)) as checkpoint:
        found = stored_formats(checkpoint)
        dense = {
            f"{module}.weight": dequantize(load_weight(checkpoint, module, stored, tuple(stored.shape)))
            for module, stored in found.items()
        }
        ours = load_model(checkpoint, LoadOptions(exact=True))
    dense |= {key: part.bfloat16().float() for key, part in dense.items() if "kv_b_proj" in key}
    with open_model(model.save(tmp_path / "dense", dense)) as checkpoint:
        plain = load_model(checkpoint, LoadOptions(exact=True))
    ids = torch.randint(0, 99, (40,)).tolist()
    rows, expected = (paged(one).all_logits(ids, [30]) for one in (ours, plain))
    assert float((rows - expected).abs().max() / expected.abs().max()) < 1e-4
