"""Each file of a model damaged in each way: never a traceback or a hang, but the file's name and how to repair it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import TEMPLATE, tiny_gguf, tiny_safetensors

from .conftest import Door, quick_and_small, refused

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", INDEX, *SHARDS, "tiny.gguf")


def _half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path, at: float = 1 / 3, bit: int = 2) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1 << bit
    path.write_bytes(data)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "half": _half,
    "flip": _flip,
    "folder": _folder,
    "unreadable": lambda path: path.chmod(0),
    "loop": _loop,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded model whose template is a file of its own, and a GGUF."""
    folder = tiny_safetensors(tmp_path_factory.mktemp("whole") / "model", shards=2)
    settings = '{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}'
    (folder / "tokenizer_config.json").write_text(settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tiny_gguf(folder.parent / "tiny.gguf", "Q8_0")
    return folder


def copy_of(whole: Path, to: Path, file: str) -> tuple[Path, Path]:
    """A copy of the model that `file` belongs to, and the copied file."""
    if file == "tiny.gguf":
        return (shutil.copy(whole.parent / file, to / file),) * 2
    shutil.copytree(whole, to / "model")
    return to / "model", to / "model" / file


def run(door: Door, model: Path) -> int:
    """`show` and `run` a damaged model; whatever fails must fail as all bad files do. Returns the end of `run`."""
    seen = door("show", model)
    if seen.code:
        refused(seen)
    ran = door("run", model, "hi", "--max-tokens", "1", "--json")
    quick_and_small(ran, 10)  # the first one that loads brings torch with it
    if ran.code:
        # 2: a template that is still one, and now fails on the message
        said = refused(ran, codes=(2, 12))
        assert ran.code == 12 or "the chat template fails" in said[0]
        assert not seen.code or refused(seen) == said
    return ran.code


@pytest.mark.one_in(2)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_matrix(file: str, damage: str, whole: Path, door: Door, tmp_path: Path) -> None:
    model, path = copy_of(whole, tmp_path, file)
    DAMAGE[damage](path)
    if damage == "unreadable" and os.access(path, os.R_OK):
        pytest.skip("nothing is unreadable for this user")
    ran = door("run", model, "hi", "--max-tokens", "1")
    quick_and_small(ran, 10)
    seen = door("show", model)
    # no template: a base model; no tokenizer_config.json: tokenizer.json says what is needed
    harmless = damage == "missing" and file in ("chat_template.jinja", "tokenizer_config.json")
    if harmless or (damage == "flip" and ran.code == 0):
        assert ran.code == 0 and seen.code == 0
        assert file not in ("config.json", "tokenizer.json", INDEX, "chat_template.jinja") or harmless
        return
    # a path that leads to no file is no damaged model
    codes = (3,) if file == "tiny.gguf" and damage in ("missing", "folder", "loop") else (12,)
    named = (
        (file,) if file != "chat_template.jinja" or damage not in ("half", "flip") else ("model: the chat template",)
    )
    what, hint = refused(ran, *named, codes=codes)
    again = "another copy of the model" in hint or "localllm pull NAME --repair" in hint
    assert again or (codes == (3,) and "localllm ls" in hint)
    if seen.code:
        assert refused(seen, codes=codes) == (what, hint)
    else:  # only what text needs is damaged
        assert "token" in file or "template" in file


def test_whole_models_run(whole: Path, door: Door) -> None:
    assert run(door, whole) == run(door, whole.parent / "tiny.gguf") == 0


def _random_flips(count: int, whole: Path, door: Door, tmp_path: Path) -> dict[int, int]:
    draw, ends = random.Random(count), {}
    for _ in range(count):
        model, path = copy_of(whole, tmp_path, draw.choice(FILES))
        _flip(path, draw.random(), draw.randrange(8))
        end = run(door, model)
        ends[end] = ends.get(end, 0) + 1
        shutil.rmtree(model) if model.is_dir() else model.unlink()
    return ends


def test_a_bit_anywhere(whole: Path, door: Door, tmp_path: Path) -> None:
    assert set(_random_flips(15, whole, door, tmp_path)) <= {0, 2, 12}


@pytest.mark.slow
def test_a_bit_anywhere_many_times(whole: Path, door: Door, tmp_path: Path) -> None:
    ends = _random_flips(400, whole, door, tmp_path)
    assert set(ends) <= {0, 2, 12} and ends[0] > 20 and ends[12] > 20
