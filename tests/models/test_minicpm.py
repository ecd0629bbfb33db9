"""MiniCPM against the Granite of transformers with the same multipliers; transformers has no MiniCPM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from localllm.errors import LocalLLMError
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model

from .test_gguf_models import write_gguf
from .test_nanbeige import prompt

HIDDEN, LAYERS, DIM = 42, 3, 12
STATED = {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "scale_emb": 12, "scale_depth": 1.4}
MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")


def made(tiny_of: Callable, base: int = 6, **changes: Any) -> Any:
    """A tiny Granite, described as a MiniCPM."""
    values = {
        "vocab_size": 99, "hidden_size": HIDDEN, "intermediate_size": 70, "num_hidden_layers": LAYERS,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": DIM, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "attention_multiplier": DIM**-0.5, "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 * LAYERS**-0.5, "logits_scaling": HIDDEN / base,
    }  # fmt: skip
    model = tiny_of("granite", values)
    kept = {key: value for key, value in model.config.items() if key not in MULTIPLIERS}
    return replace(model, config=kept | STATED | {"dim_model_base": base} | changes)


@pytest.mark.parametrize(("base", "is_old"), [(6, False), (256, True)])
def test_logits_are_those_of_granite(base: int, is_old: bool, tiny_of: Callable, paged: Any, tmp_path: Path) -> None:
    """Whole, in chunks, and from GGUF, where old files state no multipliers."""
    model, ids = made(tiny_of, base, legacy=is_old), prompt()
    wanted = model.logits(ids)
    path = write_gguf(tmp_path / "minicpm.gguf", model.config, model.tensors, gguf.GGMLQuantizationType.F32)
    for place in (model.save(tmp_path / "minicpm"), path):
        with open_model(place) as checkpoint:
            assert checkpoint.facts.architecture == "minicpm"
            ours = load_model(checkpoint, LoadOptions(exact=True))
        for chunks in ([40], [17, 1, 22]):
            rows = paged(ours).all_logits(ids, chunks)
            assert float((rows - wanted).abs().max() / wanted.abs().max()) < 2e-5


def test_experts_are_refused(tiny_of: Callable, tmp_path: Path) -> None:
    """MiniCPM-MoE, whose layers are others."""
    model = made(tiny_of)
    with pytest.raises(LocalLLMError, match="with experts"):
        _ = open_model(model.save(tmp_path / "mixture", num_experts=8)).facts
