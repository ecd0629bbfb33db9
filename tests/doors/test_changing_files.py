"""A model's file is cut while it is loaded or used: an error or no effect, never a silent SIGBUS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import (
    assemble,
    safetensors_bytes,
    tiny_gguf,
    tiny_gguf_bytes,
    tiny_hf_tensors,
    tiny_keys,
    tiny_safetensors,
    tiny_tensors,
    vocabulary,
)

from localllm.checkpoint import gguf_file
from localllm.checkpoint.gguf_file import read_gguf
from localllm.checkpoint.mapped_file import MappedFile
from localllm.checkpoint.safetensors_file import read_safetensors
from localllm.errors import BadModelFile
from localllm.models.architectures import open_model
from localllm.request import LoadProgress, SamplingParams

QUANTS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K")


def mapped(folder: Path) -> list[str]:
    """Files of a folder that are mapped into this process."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def tied(path: Path, quant: str) -> Path:
    tokens, hidden = vocabulary(), 256 if quant == "Q4_K" else 64
    tensors = tiny_tensors(len(tokens), quant, hidden=hidden, layers=1)
    del tensors["output.weight"]
    path.write_bytes(assemble(tiny_keys(tokens, hidden=hidden, layers=1), tensors))
    return path


@pytest.mark.parametrize(
    ("quant", "dtype"), [*((quant, "auto") for quant in QUANTS), ("Q4_K", "float32"), ("F16", "bfloat16")]
)
def test_a_file_cut_while_it_is_used_changes_nothing(quant: str, dtype: str, tmp_path: Path) -> None:
    from localllm.llm.llm import LLM

    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for path in (tiny_gguf(tmp_path / "untied.gguf", quant, layers=1), tied(tmp_path / "tied.gguf", quant)):
        with LLM(path, ctx=64, dtype=dtype) as llm:
            assert not mapped(tmp_path), "a cut file would end the process here"
            answer = llm.generate("hi there", params).completions[0].token_ids
            os.truncate(path, 0)
            assert llm.generate("hi there", params).completions[0].token_ids == answer
            assert len(llm.generate("and something else", params).completions[0].token_ids) == 4


def _fp8(folder: Path) -> Path:
    """A safetensors folder whose linear layers are FP8 with a scale for each row."""
    tiny_safetensors(folder, layers=1)
    tensors = tiny_hf_tensors(layers=1)
    for name in [name for name in tensors if "proj" in name]:
        rows, columns = tensors[name][1]
        tensors[name] = ("F8_E4M3", [rows, columns], b"\x38" * rows * columns)
        tensors[name + "_scale"] = ("F32", [rows, 1], b"\0\0\x80\x3f" * rows)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    return folder


@pytest.mark.parametrize("only", ["", "torch_", "torch_dequant"])
def test_nothing_stays_mapped_whatever_computes(only: str, tmp_path: Path) -> None:
    from localllm.kernels.table import implementations
    from localllm.models.loader import LoadOptions, load_model

    shut = frozenset(impl.key for impl in implementations("linear") if not impl.name.startswith(only))
    paths = [tiny_gguf(tmp_path / f"{quant}.gguf", quant, layers=1) for quant in ("F32", "Q8_0", "Q4_K")]
    paths.append(_fp8(tmp_path / "fp8"))
    for path in paths:
        with open_model(path) as checkpoint:
            model = load_model(checkpoint, LoadOptions(disabled=shut))
        assert model.weight_bytes
        assert not mapped(tmp_path), f"{path.name}: {model.kernels}"


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_file_cut_while_it_is_loaded_is_named(kind: str, tmp_path: Path) -> None:
    from localllm.llm.llm import LLM

    model = tiny_gguf(tmp_path / "m.gguf") if kind == "gguf" else tiny_safetensors(tmp_path / "m")
    file = model if kind == "gguf" else model / "model.safetensors"
    size = file.stat().st_size

    def cut(phase: LoadProgress) -> None:
        if phase.name == "import":
            os.truncate(file, size // 2)

    with pytest.raises(BadModelFile) as caught:
        LLM(model, on_progress=cut)
    said = f"{file.name}: at byte {size // 2:,}: was truncated from {size:,} to {size // 2:,} bytes"
    assert said in caught.value.message
    assert caught.value.hint == "use another copy of the model, or download it again"


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_file_cut_while_its_header_is_parsed_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the cut falls between two reads of the header, nothing faults."""
    monkeypatch.setattr(gguf_file, "READ_BYTES", 64)
    path = tmp_path / f"m.{kind}"
    whole = tiny_gguf_bytes("Q8_0", layers=1) if kind == "gguf" else safetensors_bytes(tiny_hf_tensors(layers=1))
    plain, reads = MappedFile.read, 0
    for cut_at in range(6):
        path.write_bytes(whole)
        file, reads = MappedFile(path), 0

        def read(self: MappedFile, offset: int, nbytes: int) -> bytes:
            nonlocal reads
            if reads == cut_at:  # noqa: B023
                os.truncate(self.path, min(offset + 1, 4096))
            reads += 1
            return plain(self, offset, nbytes)

        monkeypatch.setattr(MappedFile, "read", read)
        try:
            (read_gguf if kind == "gguf" else read_safetensors)(file)
            assert reads <= cut_at, "the file was cut and nobody noticed"
        except BadModelFile as error:
            assert f"was truncated from {len(whole):,} to" in error.message
        monkeypatch.setattr(MappedFile, "read", plain)
        file.close()


def test_what_remains_ends_with_a_word(tmp_path: Path) -> None:
    """A file that is cut in the middle of a copy still raises SIGBUS: the process says so, and where."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    code = f"""
import mmap, os
from unittest.mock import MagicMock
from localllm.cli.frame import program

def crash(*args, **options):
    with open({str(path)!r}, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    os.truncate({str(path)!r}, 0)
    view[5000]

def door(app):
    command = MagicMock()
    command.params = []
    command.main.side_effect = crash
    return command

program.typer.main.get_command = door
program.main()
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -7
    assert done.stderr.startswith("Fatal Python error: Bus error")
