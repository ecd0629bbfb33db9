"""Every value of a model's metadata is replaced by one of another type or size: read or refused by name, and listed."""

from __future__ import annotations

import json
import os
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


@pytest.mark.slow
def test_every_gguf_key(home: Path, door: Door) -> None:
    faults = {}
    for number, (name, content) in enumerate(gguf_mutants()):
        path = home / (name if number % 12 == 0 else "changing") / "model.gguf"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        faults[name] = fault(path)
    assert {name: what for name, what in faults.items() if what} == {}
    listed_with_the_others(home, door)


@pytest.mark.slow
def test_every_field_of_a_config(home: Path, door: Door, tmp_path: Path) -> None:
    source, faults = tiny.tiny_safetensors(tmp_path / "source", layers=1), {}
    for number, (name, files) in enumerate(config_mutants()):
        folder = home / (name if number % 12 == 0 else "changing")
        folder.mkdir(exist_ok=True)
        for file in source.iterdir():
            if not (folder / file.name).exists():
                (folder / file.name).hardlink_to(file)
        for file_name in ("config.json", "generation_config.json"):
            (folder / file_name).unlink(missing_ok=True)
            (folder / file_name).write_text(json.dumps(files.get(file_name, tiny.tiny_config(layers=1))))
        faults[name] = fault(folder)
    assert {name: what for name, what in faults.items() if what} == {}
    listed_with_the_others(home, door)


def listed_with_the_others(home: Path, door: Door) -> None:
    """`ls` has a row for each and `plan` answers; what cannot be read hides none of the others."""
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


def test_every_value_that_was_saved(home: Path, door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of `eval` and `bench`, times of use, processes: what makes no sense is passed over."""
    from localllm.device import processes

    model = tiny.tiny_gguf(home / "model.gguf", "Q8_0", layers=1)
    (home / "good").mkdir()
    model = model.rename(home / "good/model.gguf")
    birth = processes._birth(os.getpid())
    saved: dict[str, dict[str, Any]] = {
        "data/quality": {"schema": "localllm.quality/1", "path": str(model), "kv": "bf16", "kl_mean": 0.1, "kl_p99": 1},
        "data/bench": {"subject": {"device": "cpu", "cores": 2, "params": 1}, "rows": [{"test": "tg128", "tps": 5.0}]},
        "state": {"used": {"good": 5.0}, "last": "good"},
        "run": {"pid": os.getpid(), "kind": "chat", "models": ["good"], "started": 5.0, "birth": birth},
        "cache": {"entries": {}},
    }
    names = {"state": "models.json", "cache": "memory_profiles.json"}
    for value in (*JSON_VALUES.values(), float("nan")):
        for folder, fields in saved.items():
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            for number, key in enumerate(fields):
                name = names.get(folder, f"{number}.json")
                (tmp_path / folder / name).write_text(json.dumps(fields | {key: value}))
        for words in (("ls", "--json"), ("ls",), ("ps", "--json")):
            result = door(*words)
            assert result.code == 0, (value, words, result.stderr)
        assert "good" in door("ls").stdout


@pytest.mark.parametrize("value", [*JSON_VALUES.values(), float("nan")], ids=lambda value: repr(value)[:20])
def test_every_number_of_a_memory_profile(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.plan import profiles

    monkeypatch.setattr(profiles, "_key", lambda what, *_: what)
    monkeypatch.setattr(profiles, "_plan_key", lambda *_: "profile")
    good = {"terms": [["weights", 10, 12]], "kind": "cpu", "seconds": 1.0, "failure": ""}
    for key in ("terms", "kind"):
        for changed in (good | {key: value}, good | {"terms": [["weights", 10, value]]}):
            entries = {"excess": value, "profile": changed}
            (tmp_path / "p.json").write_text(json.dumps({"entries": entries}))
            read = profiles.MemoryProfiles(tmp_path / "p.json")
            assert 0 <= read.excess_bytes(None, None, "cpu") < 1 << 50  # type: ignore[arg-type]
            assert str(read.known(None, None, None))  # type: ignore[arg-type]
