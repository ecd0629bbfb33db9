"""Every value of a model's metadata is replaced by one of another type or size: read or refused by name, and listed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
from tiny_models import ARRAY, BOOL, F32, F64, I32, I64, STRING, U8, U64, array

from localllm.errors import LocalLLMError
from localllm.models.architectures import open_model
from localllm.tokenizer.files import load_tokenizer

from .conftest import Door, refused

HUGE = 10**400
DEEP: list[Any] = []
for _ in range(40):
    DEEP = [DEEP]

GGUF_VALUES: dict[str, tuple[int, Any]] = {
    "numbers": (ARRAY, array(I32, [1, 2])),
    "equal_numbers": (ARRAY, array(U64, [1 << 63, 1 << 63])),
    "fractions": (ARRAY, array(F64, [0.5, float("nan")])),
    "bools": (ARRAY, array(BOOL, [True, False])),
    "texts": (ARRAY, array(STRING, ["a", "b"])),
    "no_numbers": (ARRAY, array(I32, [])),
    "no_texts": (ARRAY, array(STRING, [])),
    "text": (STRING, "2"),
    "long_text": (STRING, "x\n" * 2000),
    "true": (BOOL, True),
    "huge": (U64, (1 << 64) - 1),
    "negative": (I64, -(1 << 63)),
    "minus_one": (I32, -1),
    "nan": (F64, float("nan")),
    "infinite": (F32, float("inf")),
    "byte": (U8, 7),
}
JSON_VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "text": "2",
    "long_text": "x\n" * 2000,
    "empty_text": "",
    "list": [1, 2],
    "empty_list": [],
    "texts": ["a", "b"],
    "deep": DEEP,
    "object": {"type": [], "rope_type": 1, "factor": {}},
    "empty_object": {},
    "huge": HUGE,
    "negative": -HUGE,
    "minus_one": -1,
    "fraction": 1e-300,
    "large": 1e308,
}
# keys that the tiny models do without
_GGUF_MORE = (
    "general.file_type general.type general.quantization_version general.sampling.temp general.sampling.top_k"
    " general.sampling.top_p split.count split.no llama.expert_count llama.attention.key_length"
    " llama.attention.value_length llama.attention.scale llama.rope.dimension_count llama.rope.scaling.factor"
    " llama.rope.scaling.type llama.rope.scale_linear llama.attention.sliding_window"
    " llama.attention.sliding_window_pattern llama.attn_logit_softcapping llama.final_logit_softcapping"
    " tokenizer.ggml.eot_token_id tokenizer.ggml.unknown_token_id tokenizer.ggml.scores tokenizer.ggml.fim_pad_token_id"
    " tokenizer.ggml.add_space_prefix tokenizer.huggingface.json tokenizer.chat_templates"
    " tokenizer.chat_template.tool_use"
)
_CONFIG_MORE = (
    "head_dim rope_scaling rope_parameters partial_rotary_factor sliding_window layer_types quantization_config"
    " compression_config text_config original_max_position_embeddings use_bidirectional_attention attention_bias"
    " final_logit_softcapping attn_logit_softcapping auto_map"
)
GENERATION = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id", "bos_token_id")


def gguf_mutants() -> Iterator[tuple[str, bytes]]:
    tokens = tiny.vocabulary()
    keys, tensors = tiny.tiny_keys(tokens, layers=1), tiny.tiny_tensors(len(tokens), "Q4_0", layers=1)
    for key in [*keys, *_GGUF_MORE.split()]:
        for name, value in GGUF_VALUES.items():
            yield f"{key}-{name}", tiny.assemble({**keys, key: value}, tensors)


def config_mutants() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, files whose values are changed)"""
    config = tiny.tiny_config(layers=1)
    for key in [*config, *_CONFIG_MORE.split()]:
        for name, value in JSON_VALUES.items():
            yield f"{key}-{name}", {"config.json": config | {key: value}}
    for key in GENERATION:
        for name, value in JSON_VALUES.items():
            yield f"generation-{key}-{name}", {"generation_config.json": {key: value}}


def fault(path: Path) -> str:
    """Open a model as every command does: what is wrong with how it is read or refused."""
    try:
        with open_model(path) as checkpoint:
            assert checkpoint.facts.num_layers and isinstance(checkpoint.doubt, str)
            load_tokenizer(checkpoint)
    except LocalLLMError as error:
        named = error.code.startswith("E12") and error.message.isprintable() and len(error.message) < 400
        return "" if named and error.hint else f"{error.code}: {error.message[:300]!r}"
    except Exception as error:
        return repr(error)[:300]
    return ""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    models = tmp_path / "data/models"
    models.mkdir(parents=True)
    return models


def test_every_gguf_key(home: Path, door: Door) -> None:
    faults = {}
    for name, content in gguf_mutants():
        (home / name).mkdir()
        (home / name / "model.gguf").write_bytes(content)
        faults[name] = fault(home / name / "model.gguf")
    assert {name: what for name, what in faults.items() if what} == {}
    listed_with_the_others(home, door)


def test_every_field_of_a_config(home: Path, door: Door) -> None:
    source = tiny.tiny_safetensors(home / "source", layers=1)
    faults = {}
    for name, files in config_mutants():
        folder = home / name
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).hardlink_to(file)
        for file_name, value in files.items():
            (folder / file_name).unlink(missing_ok=True)
            (folder / file_name).write_text(json.dumps(value))
        faults[name] = fault(folder)
    shutil.rmtree(source)
    assert {name: what for name, what in faults.items() if what} == {}
    listed_with_the_others(home, door)


def listed_with_the_others(home: Path, door: Door) -> None:
    """`ls` has a row for each and `plan` answers; what cannot be read hides none of the others."""
    for number, folder in enumerate(sorted(home.iterdir())):
        if number % 6:
            shutil.rmtree(folder)
    (home / "good").mkdir()
    tiny.tiny_gguf(home / "good/model.gguf", "Q8_0", layers=1)
    listed = door("ls", "--all", "--json")
    assert listed.code == 0, listed.stderr
    rows = {row["id"]: row for row in json.loads(listed.stdout)["models"]}
    assert rows.keys() == {folder.name for folder in home.iterdir()}
    assert rows["good"]["supported"]
    assert door("plan", "--json").code == 0
    for name in list(rows)[::25]:
        shown = door("show", name)
        if shown.code:
            refused(shown)
