"""Every hand-made bad file is refused: fast, small, by name, with the place of the defect."""

from __future__ import annotations

import resource
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_files import gguf_cases, safetensors_cases
from tiny_models import tiny_gguf_bytes, tiny_safetensors

from localllm.errors import BadModelFile
from localllm.models.architectures import open_model

GGUF, SAFETENSORS = gguf_cases(), safetensors_cases()
MAX_S = 20.0  # of CPU; ten times the promise, because a slow busy machine takes 2.8 s for 20,000 tensors
MAX_PEAK_BYTES = 16 << 20  # the largest case is 2.2 MB; the promise is 256 MB above the process


@pytest.fixture(scope="module", autouse=True)
def _memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def refusal(path: Path, named: str) -> BadModelFile:
    """Open `path` as `show` does, and return the error it must raise."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(BadModelFile) as caught, open_model(path) as checkpoint:
            _ = checkpoint.facts
        seconds, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = caught.value
    assert seconds < MAX_S
    assert peak < MAX_PEAK_BYTES
    assert named in error.message
    assert "offset" in error.context or "key" in error.context, error.message
    assert error.hint
    assert error.message.isprintable() and len(error.message) < 700
    return error


def test_the_corpus_is_large_enough() -> None:
    assert len(GGUF) >= 60
    assert len(SAFETENSORS) >= 28


@pytest.mark.parametrize("name", GGUF)
def test_bad_gguf(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(GGUF[name])
    refusal(path, path.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_safetensors(tmp_path_factory.mktemp("st") / "model")


@pytest.mark.parametrize("name", SAFETENSORS)
def test_bad_safetensors(name: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(SAFETENSORS[name])
    assert refusal(folder, "").message.startswith(("model.safetensors: ", "model: "))


@pytest.mark.parametrize("name", ["header_length_past_end", "name_twice", "pickle"])
def test_a_bad_safetensors_file_by_its_own_path(name: str, tmp_path: Path) -> None:
    path = tmp_path / "lonely.safetensors"
    path.write_bytes(SAFETENSORS[name])
    refusal(path, "lonely.safetensors")


def test_messages_say_what_value_and_limit(tmp_path: Path) -> None:
    wanted = {
        "array_u8_2e40_alone": "is 1,099,511,627,776; the rest of the file holds at most 0",
        "big_endian": "big-endian",
        "t_type_4": "type 4 (Q4_2, or MXFP4 in Ollama's own encoding), which is retired",
        "t_type_140": "type 140, which is unknown",
        "arch_unknown": "architecture mamba99 is not supported",
        "arch_clip": "is a vision projector, not a model",
        "type_adapter": "is a LoRA adapter, not a model",
        "align_2e31": "must be a power of two up to 65,536, not 2147483648",
        "eos_out_of_range": "token id 271 is not in the vocabulary of 271",
        "cut_in_data": "truncated",
        "experts": "expert_used_count: is missing",
    }
    for name, words in wanted.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(GGUF[name])
        assert words in refusal(path, path.name).message


def test_every_cut_of_a_good_file_is_refused(tmp_path: Path) -> None:
    good, path = tiny_gguf_bytes("Q8_0", layers=1), tmp_path / "cut.gguf"
    for length in [*range(0, 6000, 251), *range(6000, len(good) - 32, 9973), len(good) - 33]:
        path.write_bytes(good[:length])
        with pytest.raises(BadModelFile), open_model(path) as checkpoint:
            _ = checkpoint.facts
