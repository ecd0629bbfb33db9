"""What holds where nobody says how to sample: a model's files, then its vendor, then this program."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.conversation.tree import effective_sampling, sampling_line
from localllm.interface import Facts
from localllm.llm import sampling
from localllm.llm.sampling import recommended
from localllm.request import RANGES, SamplingParams


def of(path: str, name: str = "", **stated: Any) -> sampling.Recommended:
    facts: Any = SimpleNamespace(name=name, sampling_defaults=stated)
    return recommended(facts, Path(path))


def values(found: sampling.Recommended) -> dict[str, Any]:
    return {name: value for name, (value, _) in found.items()}


def test_a_model_that_recommends_nothing_gets_the_defaults() -> None:
    found = of("/models/unheard-of.gguf")
    assert values(found) == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert {why for _, why in found.values()} == {"default"}


def test_a_temperature_alone_leaves_the_cuts_at_their_defaults() -> None:
    found = of("/models/unheard-of.gguf", temperature=0.5)
    assert found["temperature"] == (0.5, "GGUF metadata")
    assert found["top_k"] == (40, "default")


def test_cuts_that_are_stated_leave_the_others_off() -> None:
    assert values(of("/models/unheard-of.gguf", top_p=0.9)) == {"temperature": 0.8, "top_p": 0.9}


def test_a_folder_names_its_file_and_wins_over_the_vendor(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    found = of(str(folder), temperature=0.61)
    assert found["temperature"] == (0.61, "generation_config.json")
    assert found["top_k"] == (20, "model card of Qwen3, thinking")


def test_values_out_of_range_do_not_make_every_request_fail() -> None:
    found = of("/models/unheard-of.gguf", top_p=0.0, temperature=0.3)
    assert values(found)["top_p"] == 0.95
    SamplingParams(**values(found)).check(100)


@pytest.mark.parametrize(
    ("path", "name", "temperature"),
    [
        ("/m/SmolLM2-135M-Instruct.Q4_1.gguf", "", 0.2),
        ("/m/x.gguf", "Qwen2.5 7B Instruct", 0.7),
        ("/m/models--unsloth--Qwen3-4B-Instruct-2507-GGUF/snapshots/0/x.gguf", "", 0.7),
        ("/m/Qwen3-8B-Base.gguf", "", 0.8),
        ("/m/gemma-3-270m-Q4_K_M.gguf", "", 1.0),
        ("/m/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "", 0.6),
        ("/m/SmolLM2-135M.gguf", "", 0.8),
        ("/m/Qwen3-Coder-Next-Q4_K_M.gguf", "", 1.0),
        ("/m/Qwen3-Coder-30B-A3B-Instruct-Q4_K_M.gguf", "", 0.7),
        ("/m/Qwen3-Next-80B-A3B-Instruct-Q4_K_M.gguf", "", 0.7),
        ("/m/Qwen3.8-27B-UD-IQ4_XS.gguf", "", 1.0),
        ("/m/Qwen3-8B-Q4_K_M.gguf", "", 0.6),
        ("/m/gpt-oss-20b-mxfp4.gguf", "", 1.0),
        ("/m/Ministral-3-8B-Instruct-2512-Q4_K_M.gguf", "", 0.1),
        ("/m/Mistral-Nemo-Instruct-2407-Q4_K_M.gguf", "", 0.3),
        ("/m/Phi-4-mini-instruct-Q4_K_M.gguf", "", 0.8),
    ],
)
def test_vendors_values_are_found_by_name(path: str, name: str, temperature: float) -> None:
    assert values(of(path, name))["temperature"] == temperature


@pytest.mark.parametrize(
    ("path", "stated"),
    [
        ("/m/Qwen2.5-0.5B-Instruct-Q8_0.gguf", {"repetition_penalty": 1.1}),
        ("/m/Qwen2.5-7B-Instruct-Q4_K_M.gguf", {"repetition_penalty": 1.05}),
        ("/m/Qwen3.5-9B-Q4_K_M.gguf", {"presence_penalty": 1.5, "top_p": 0.95}),
        ("/m/Qwen3.5-2B-Q4_K_M.gguf", {"presence_penalty": 2.0, "top_p": 1.0}),
        ("/m/Qwen3.6-35B-A3B-UD-Q4_K_M.gguf", {"presence_penalty": 1.5}),
        ("/m/DeepSeek-R1-0528-Qwen3-8B-Q4_K_M.gguf", {"temperature": 0.6, "top_p": 0.95}),
        ("/m/Qwen3-VL-8B-Instruct-Q4_K_M.gguf", {"temperature": 0.7, "presence_penalty": 1.5}),
        ("/m/Qwen3-VL-8B-Thinking-Q4_K_M.gguf", {"temperature": 1.0, "top_p": 0.95}),
        ("/m/LFM2.5-8B-A1B-Q4_K_M.gguf", {"top_k": 80, "repetition_penalty": 1.05}),
        ("/m/LFM2.5-1.2B-Instruct-Q4_K_M.gguf", {"top_k": 50, "top_p": 0.1}),
    ],
)
def test_siblings_with_other_values_have_rows_of_their_own(path: str, stated: dict[str, float]) -> None:
    assert stated.items() <= values(of(path)).items()
    assert "presence_penalty" not in values(of("/m/Qwen3.6-27B-Q4_K_M.gguf"))
    assert "top_k" not in values(of("/m/DeepSeek-R1-0528-Qwen3-8B-Q4_K_M.gguf"))


def test_a_value_that_nobody_checked_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"match": "tiny", "temperature": 0.6, "top_p": 0.9, "why": "card of Tiny"}
    line = "temperature 0.6, top_p 0.9 (card of Tiny"
    for more, end in ((", not checked)", False), (")", True)):
        monkeypatch.setattr(sampling, "_rows", lambda checked=end: [row | {"verified": checked}])
        assert sampling_line(of("/m/tiny.gguf")) == line + more


def test_every_row_of_the_vendors_is_valid() -> None:
    rows = tomllib.loads(Path(sampling.__file__).with_suffix(".toml").read_text())["model"]
    for row in rows:
        re.compile(row["match"])
        stated = {key: value for key, value in row.items() if key in RANGES}
        assert row.keys() - stated.keys() <= {"match", "why", "source", "verified"}, row
        assert row.get("verified", not stated) == (not stated or "source" in row), row
        assert all(value in RANGES[key] for key, value in stated.items()), row
        assert bool(row.get("why")) == bool(stated), row


def test_the_effective_values_name_their_source() -> None:
    facts = Facts(sampling=(("temperature", 0.6, "generation_config.json"), ("top_p", 0.9, "generation_config.json")))
    assert sampling_line(effective_sampling(facts, {"top_p": 0.5, "seed": 7})) == (
        "temperature 0.6 (generation_config.json), top_p 0.5, seed 7 (set)"
    )
