"""The corpus through `show`, `run` and the model list: refused by name, fast, small, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from bad_files import gguf_cases, safetensors_cases
from tiny_models import assemble, tiny_gguf, tiny_keys, tiny_safetensors, tiny_tensors, vocabulary

from localllm.checkpoint import open_checkpoint
from localllm.checkpoint.gguf_types import SCALE_OFFSETS

from .conftest import MAX_GROWTH_KIB, MAX_S, SLACK, Door, process, quick_and_small, refused

GGUF, SAFETENSORS = gguf_cases(), safetensors_cases()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def check(door: Door, path: Path, *named: str) -> None:
    """`show` and `run` say the same; the JSON twin tells the place."""
    seen = door("show", path)
    quick_and_small(seen)
    said = refused(seen, *named)
    ran = door("run", path, "hi", "--json")
    quick_and_small(ran)
    assert refused(ran, *named) == said
    error = ran.error
    assert error["exit"] == 12 and (error["message"], error["hint"]) == said
    assert "offset" in error["context"] or "key" in error["context"]
    assert error["context"]["file"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", GGUF)
def test_bad_gguf(name: str, door: Door, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(GGUF[name])
    check(door, path, path.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_safetensors(tmp_path_factory.mktemp("st") / "model")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SAFETENSORS)
def test_bad_safetensors(name: str, door: Door, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(SAFETENSORS[name])
    check(door, folder, "model.safetensors: ", "model: ")


@pytest.mark.parametrize("name", ["empty", "array_u8_2e40_alone", "arch_unknown", "tokens_missing", "t_overlap"])
def test_run_in_words_and_as_events(name: str, door: Door, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(GGUF[name])
    ran = door("run", path, "hi")
    refused(ran, path.name)
    assert ran.stdout == ""
    streamed = door("run", path, "hi", "--json", "--stream")
    refused(streamed, path.name)
    assert json.loads(streamed.stdout.splitlines()[-1])["error"]["exit"] == 12


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with every file of the corpus as a model of its own, and two good ones among them."""
    home = tmp_path_factory.mktemp("crowd")
    for name, content in GGUF.items():
        place = home / "data/models" / name
        place.mkdir(parents=True)
        (place / "model.gguf").write_bytes(content)
    good = home / "data/models/good"
    good.mkdir()
    tiny_gguf(good / "model.gguf", "Q8_0")
    source = tiny_safetensors(home / "source")
    for name, content in {**SAFETENSORS, "good": b""}.items():
        place = home / f"hf/hub/models--many--{name}/snapshots/{COMMIT}"
        shutil.copytree(source, place)
        if content or name != "good":
            (place / "model.safetensors").write_bytes(content)
    return home


@pytest.fixture
def crowd(crowded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_HOME", str(crowded))
    monkeypatch.setenv("HF_HOME", str(crowded / "hf"))
    return crowded


def test_the_list_shows_each_as_broken_and_goes_on(crowd: Path, door: Door) -> None:
    listed = door("ls", "--all", "--json")
    quick_and_small(listed, 10)
    assert listed.code == 0 and "Traceback" not in listed.stderr
    rows = {row["id"]: row for row in json.loads(listed.stdout)["models"]}
    assert set(rows) == {*GGUF, "good", *(f"many/{name}" for name in SAFETENSORS), "many/good"}
    for name, row in rows.items():
        if name.endswith("good"):
            assert row["supported"] and not row["broken"] and row["chat"]
        else:
            assert not row["supported"] and row["reason"].isprintable(), name
            assert COMMIT not in row["reason"]
    refused_by_name = {name for name, row in rows.items() if not row["supported"] and not row["broken"]}
    assert {"arch_unknown", "version_1", "t_type_4"} <= refused_by_name
    assert len(refused_by_name) < 30

    table = door("ls", "--all")
    assert table.code == 0 and "\x1b" not in table.stdout
    assert len(table.stdout.splitlines()) == len(rows) + 1
    short = door("ls")
    assert len(short.stdout.splitlines()) == 3
    assert f"{len(rows) - 2} more cannot run" in short.stderr


@pytest.mark.slow
def test_the_picker_shows_them_too(crowd: Path) -> None:
    from localllm import hub
    from localllm.backend.in_process import InProcessBackend

    choices = [choice for choice in InProcessBackend().choices() if choice.local]
    assert len(choices) == len(hub.list_local()) == len(GGUF) + len(SAFETENSORS) + 2
    assert {c.name for c in choices if c.supported} == {"good", "many/good"}
    assert all(c.reason for c in choices if not c.supported)


@pytest.mark.slow
def test_a_model_with_a_name_is_repaired_by_that_name(crowd: Path, door: Door) -> None:
    for words in (("show", "many/data_cut"), ("run", "many/data_cut", "hi"), ("plan", "many/data_cut")):
        what, hint = refused(door(*words))
        assert hint == "localllm pull many/data_cut --repair"
    what, _ = refused(door("show", "many/norm_missing"))
    assert what.startswith("many/norm_missing: model.norm.weight")
    _, hint = refused(door("show", "cut_in_data"))  # put there by hand: nothing can be pulled
    assert hint == "use another copy of the model, or download it again"


SAMPLE = [
    ("show", "array_u8_2e40_alone", GGUF),
    ("run", "array_strings_2e60", GGUF),
    ("run", "n_tensors_max", GGUF),
    ("run", "cut_in_data", GGUF),
    ("show", "header_nested_10000", SAFETENSORS),
    ("run", "shape_huge", SAFETENSORS),
]


@pytest.fixture(scope="module")
def base_kib(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Memory of a command that finds nothing wrong."""
    where = tmp_path_factory.mktemp("base")
    result = process(where / "peak", "show", tiny_gguf(where / "good.gguf"))
    assert result.code == 0
    return result.growth_kib


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("command", "name", "corpus"),
    [
        pytest.param(*one, id=f"{one[0]}-{one[1]}", marks=pytest.mark.slow if 0 < i < 4 else ())
        for i, one in enumerate(SAMPLE)
    ],
)
def test_real_processes(
    command: str, name: str, corpus: dict[str, bytes], folder: Path, tmp_path: Path, base_kib: int
) -> None:
    if corpus is SAFETENSORS:
        path, named = folder, "model.safetensors"
        (folder / "model.safetensors").write_bytes(corpus[name])
    else:
        path, named = tmp_path / f"{name}.gguf", f"{name}.gguf"
        path.write_bytes(corpus[name])
    result = process(tmp_path / "peak", command, path, *(["hi"] if command == "run" else []))
    refused(result, named)
    assert result.stdout == ""
    assert result.seconds < MAX_S * SLACK
    assert result.growth_kib - base_kib < MAX_GROWTH_KIB


@pytest.mark.parametrize("name", ["pipe", "pipe.gguf"])
def test_a_pipe_as_a_model_is_called_one(name: str, door: Door, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    for command in (("show",), ("run", "hi")):
        result = door(command[0], tmp_path / name, *command[1:])
        assert "is a pipe, a socket or a device, not a model" in refused(result, codes=(3,))[0]


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_1", "Q4_K"])
def test_doctor_finds_scales_that_loading_refuses(quant: str, door: Door, tmp_path: Path) -> None:
    path, start = tiny_gguf(tmp_path / "nan.gguf", quant, layers=1), {"Q8_0": 34, "Q4_1": 20, "Q4_K": 144}[quant]
    with open_checkpoint(path) as checkpoint:
        info = checkpoint.tensors["blk.0.attn_q.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset + 3 * start)
        file.write(b"\x00\x7e")
    assert "non-finite" in refused(door("run", path, "hi"))[0]
    found = {check["id"]: check for check in json.loads(door("doctor", path, "--json").stdout)["checks"]}
    assert found["model.scales"]["status"] == "fail"
    assert found["model.scales"]["title"] == "blk.0.attn_q.weight contains 1 NaN or infinite scale"


def test_weights_of_64_bits_run(door: Door, tmp_path: Path) -> None:
    tokens, path = vocabulary(), tmp_path / "double.gguf"
    tensors = tiny_tensors(len(tokens), "F32", layers=1)
    for name, (dims, _, raw) in tensors.items():
        tensors[name] = (dims, "F64", np.frombuffer(raw, "<f4").astype("<f8").tobytes())
    path.write_bytes(assemble(tiny_keys(tokens, layers=1), tensors))
    assert door("run", path, "hi", "--max-tokens", "1").code == 0


def test_scales_lie_where_the_kernels_read_them() -> None:
    from localllm.kernels.gguf_blocks import BLOCK_TYPES

    assert {kind: layout.scale_offsets for kind, layout in BLOCK_TYPES.items() if layout.scale_offsets} == SCALE_OFFSETS
