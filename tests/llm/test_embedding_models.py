"""Models that embed text: what their files say of it is what they do, and they generate nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))

import tiny_encoder
import tiny_models

from localllm import LLM
from localllm.errors import BadModelFile, ContextTooLong, InvalidRequest, UnsupportedModel
from localllm.models.architectures import open_model
from localllm.request import SamplingParams

MODULE = "sentence_transformers.models."
FRAME = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}


def embedding_model(folder: Path, mode: str = "pooling_mode_lasttoken", dense: dict[str, Any] | None = None) -> Path:
    """A tiny model with sentence-transformers' files, as Qwen3-Embedding has them: no `model.` before its names."""
    tiny_models.tiny_safetensors(folder, tie_word_embeddings=True)
    tensors = {name.removeprefix("model."): one for name, one in tiny_models.tiny_hf_tensors().items()}
    del tensors["lm_head.weight"]
    (folder / "model.safetensors").write_bytes(tiny_models.safetensors_bytes(tensors))
    modules = [{"path": "", "type": f"{MODULE}Transformer"}, {"path": "1_Pooling", "type": f"{MODULE}Pooling"}]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, mode: True}))
    if dense is not None:
        modules.append({"path": "2_Dense", "type": f"{MODULE}Dense"})
        (folder / "2_Dense").mkdir()
        (folder / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 64, "out_features": 48} | dense))
        weight = np.random.default_rng(1).standard_normal((48, 64), np.float32)
        stored = {"linear.weight": ("F32", [48, 64], weight.tobytes())}
        (folder / "2_Dense" / "model.safetensors").write_bytes(tiny_models.safetensors_bytes(stored))
    modules.append({"path": "9_Normalize", "type": f"{MODULE}Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    tokenizer = tiny_models.tokenizer_json() | {"post_processor": FRAME}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_pooling_and_closing_token_come_from_the_files(tmp_path: Path) -> None:
    with LLM(embedding_model(tmp_path / "model"), ctx=256) as llm:
        ids = llm.encode_text("the sea")
        assert ids == [*llm.encode_prompt("the sea"), 0] and llm.default_pooling == "last"
        assert np.array_equal(llm.embed("the sea"), llm.embed(ids, pooling="last"))
        first = llm.embed(["the sea", "the sun"], pooling="cls")
        assert np.array_equal(first, llm.embed(["the hills", "the"], pooling="cls"))  # a causal model's first token
        assert not np.allclose(llm.embed("the sea", pooling="mean"), llm.embed("the sea"))
        assert len(llm.encode_text("a" * 400, limit=256)) == 256 and llm.embed("a" * 255).shape == (64,)


def test_pooled_vectors_go_through_the_dense_layers(tmp_path: Path) -> None:
    identity = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    with LLM(embedding_model(tmp_path / "model", "pooling_mode_mean_tokens", identity), ctx=256) as llm:
        assert llm.facts.pooling == "mean" and llm.facts.embedding_size == 48
        weight = np.random.default_rng(1).standard_normal((48, 64), np.float32)
        vector = llm.embed("the sea", normalize=False)
        model = tiny_models.tiny_safetensors(tmp_path / "plain")
        with LLM(model, ctx=256) as plain:
            pooled = plain.embed(llm.encode_text("the sea"), normalize=False)
        assert np.allclose(vector, weight @ pooled, rtol=1e-4, atol=1e-4) and llm.embed([]).shape == (0, 48)


def test_a_model_that_embeds_generates_nothing(tmp_path: Path) -> None:
    with LLM(embedding_model(tmp_path / "model"), ctx=256) as llm:
        assert not llm.has_chat_template and llm.state().embeds
        for ask in (
            lambda: llm.chat("hello"),
            lambda: llm.generate("hello", SamplingParams(max_tokens=2)),
            lambda: llm.score("hello"),
        ):
            with pytest.raises(InvalidRequest, match="is an embedding model") as raised:
                ask()
            assert "/v1/embeddings" in raised.value.hint


@pytest.mark.parametrize(
    ("mode", "dense", "words", "error"),
    [
        ("pooling_mode_max_tokens", None, "pooling by max_tokens", UnsupportedModel),
        ("pooling_mode_cls_token", {}, "2_Dense.linear.bias: the tensor is missing", BadModelFile),
        ("pooling_mode_cls_token", {"bias": False, "in_features": 65}, "takes 65 inputs", BadModelFile),
        (
            "pooling_mode_cls_token",
            {"activation_function": "torch.nn.GELU"},
            "a dense layer with GELU",
            UnsupportedModel,
        ),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, mode: str, dense: dict[str, Any] | None, words: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=words), open_model(embedding_model(tmp_path / "model", mode, dense)) as checkpoint:
        _ = checkpoint.facts


def test_an_encoder_reads_each_text_whole(tmp_path: Path) -> None:
    texts = ["The sea is blue", "hills", "the " * 62, "sun " * 40, "a b c d"]
    with LLM(tiny_encoder.tiny_encoder(tmp_path / "bert"), kv="f32", debug_invariants=True) as llm:
        assert (llm.plan.ctx, llm.plan.prefill_budget, llm.plan.prefix_cache) == (64, 64, False)
        assert llm.encode_text("hills") == [2, 7, 8, 3] and llm.default_pooling == "cls"
        together = llm.embed(texts)
        for text, vector in zip(texts, together, strict=True):
            assert np.array_equal(llm.embed(text), vector)  # two long ones do not share a step, nor is one cut
        assert not np.allclose(llm.embed("the sea"), llm.embed("the sun"))  # the first token sees the last one
        with pytest.raises(ContextTooLong):
            llm.embed("the " * 63)
        with pytest.raises(InvalidRequest, match="is an embedding model"):
            llm.chat("hello")
        assert llm.stats().pages_free == llm.stats().pages_total
