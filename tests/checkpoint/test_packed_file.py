"""Files of repacked weights: whole or passed over, bounded, and never written to in their place."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from localllm.checkpoint import packed_file
from localllm.checkpoint.packed_file import (
    PackedFile,
    PackedWriter,
    Unusable,
    make_room,
    of_models,
    remove,
    stored_packs,
)

LAYOUT = "here-1"
LIMIT = 1 << 30
WORDS = bytes(range(256)) * 40


def put(writer: PackedWriter, data: np.ndarray) -> tuple[int, int]:
    at, pieces = writer.pieces(data)
    for piece in pieces:
        writer.append(piece)
    return at, data.nbytes


def written(path: Path, data: bytes = WORDS, source: Path = Path(__file__), layout: str = LAYOUT) -> Path:
    writer = PackedWriter(path, len(data), LIMIT)
    assert put(writer, array(data)) == (0, len(data))
    assert put(writer, array(b"more"))[0] % packed_file.ALIGN == 0
    writer.finish({"layout": layout, "files": [str(source)], "entries": {"a": [1]}})
    return path


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


def why(path: Path, layout: str = LAYOUT) -> str:
    with pytest.raises(Unusable) as caught:
        PackedFile(path).check(layout)
    return str(caught.value)


def test_what_is_written_is_found(tmp_path: Path) -> None:
    found = PackedFile(written(tmp_path / "packed/a.packed"))
    data = found.check(LAYOUT)
    assert data[: len(WORDS)].tobytes() == WORDS
    assert found.entries == {"a": [1]}
    assert not data.flags.writeable
    assert stat_mode(tmp_path / "packed") == 0o700 and stat_mode(found_path := tmp_path / "packed/a.packed") == 0o600
    assert [one.path for one in of_models([Path(__file__)])] == []  # that folder is another one
    assert [one.files for one in stored_packs(found_path.parent)] == [(Path(__file__),)]
    with pytest.raises(FileNotFoundError):
        PackedFile(tmp_path / "none")


@pytest.mark.parametrize("is_huge", [True, False])
def test_huge_pages_of_the_file_are_used_and_copied_in_an_idle_moment(
    is_huge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([0, 1 << 40 if is_huge else 0])
    monkeypatch.setattr(packed_file, "_huge_file_bytes", lambda: next(counts))
    monkeypatch.setattr(packed_file, "SETTLED", packed_file.HUGE)
    words = np.random.default_rng(0).integers(0, 256, 5 << 20, dtype=np.uint8).tobytes()
    path = written(tmp_path / "a.packed", words)
    found = PackedFile(path)
    data = found.check(LAYOUT)
    assert data[: len(words)].tobytes() == words
    assert found.copied == (0 if is_huge else len(data))
    stops = iter([False, True])
    assert found.settle(lambda: next(stops)) == (not is_huge)
    assert found.copied == (packed_file.HUGE if is_huge else len(data))
    assert data[: len(words)].tobytes() == words
    assert found.settle(lambda: False) and found.copied == len(data)
    os.truncate(path, 0)  # of the file nothing is left that anybody reads
    assert data[: len(words)].tobytes() == words


def stat_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_file_that_is_wrong_says_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.packed")
    whole = path.read_bytes()
    assert "another CPU or version" in why(path, "there-1")
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert why(path) == "is truncated"
    for at in (0, 5000, len(WORDS) - 1, len(whole) - 100):  # bytes of weights, and of the header
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        assert why(path) == "is damaged"
    path.write_bytes(bytes(len(whole) - 44) + whole[-44:])  # a name whose bytes never reached the disk
    assert why(path) == "is damaged"
    path.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr(packed_file, "VERSION", 77)
        assert why(path) == "is from another version"
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in why(path)
    path.unlink()
    path.symlink_to(__file__)
    assert why(path).startswith("cannot be read")


@pytest.mark.parametrize(
    ("code", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EIO, "cannot be")]
)
def test_a_disk_that_refuses_leaves_nothing(
    code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PackedWriter(tmp_path / "a.packed", 1, LIMIT)

    def refuse(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(Unusable, match=said):
        put(writer, array(b"x"))
        writer.finish({"layout": LAYOUT, "files": []})
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_no_room_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unusable, match="the limit is 10"):
        PackedWriter(tmp_path / "a.packed", 11, 10)
    (tmp_path / "file").touch()
    with pytest.raises(Unusable, match="cannot be written"):
        PackedWriter(tmp_path / "file/a.packed", 1, LIMIT)

    class Usage(NamedTuple):
        free: int = packed_file.SPARE_BYTES

    monkeypatch.setattr(packed_file.shutil, "disk_usage", lambda folder: Usage())
    with pytest.raises(Unusable, match="nearly full"):
        PackedWriter(tmp_path / "a.packed", 1, LIMIT)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(Unusable, match="Read-only file system"):
        PackedWriter(tmp_path / "a.packed", 1, LIMIT)


def test_one_process_writes_and_who_maps_a_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "a.packed"
    first = PackedWriter(path, 1, LIMIT)
    with pytest.raises(Unusable, match="another process") as caught:
        PackedWriter(path, 1, LIMIT)
    assert not caught.value.is_damaged
    assert not remove(path.with_suffix(".part"))  # it is being written
    put(first, array(b"first"))
    first.finish({"layout": LAYOUT, "files": []})
    found = PackedFile(path)
    written(path)  # replaced, and then removed, under the eyes of who has the first one
    assert remove(path)
    assert found.check(LAYOUT)[:5].tobytes() == b"first"


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    killed = PackedWriter(tmp_path / "a.packed", 1, LIMIT)
    put(killed, array(WORDS * 3))
    os.close(killed._file)  # as the system does
    found = PackedFile(written(tmp_path / "a.packed")).check(LAYOUT)
    assert found[: len(WORDS)].tobytes() == WORDS
    assert [path.name for path in tmp_path.iterdir()] == ["a.packed"]


def test_the_longest_unused_goes_first_and_before_it_what_has_no_model(tmp_path: Path) -> None:
    gone = tmp_path / "gone.gguf"
    for age, (name, source) in enumerate(
        {"new": Path(__file__), "used": Path(__file__), "old": Path(__file__), "orphan": gone}.items()
    ):
        path = written(tmp_path / f"{name}.packed", source=source)
        os.utime(path, (1000 - age, 1000 - age) if name != "orphan" else None)
    size = path.stat().st_size
    os.utime(tmp_path / "used.packed", (1, 1))
    PackedFile(tmp_path / "used.packed").check(LAYOUT)  # to use it makes it the youngest

    def left() -> set[str]:
        return {one.path.stem for one in stored_packs(tmp_path)}

    os.close(PackedWriter(tmp_path / "killed.packed", 1, LIMIT)._file)
    assert "killed" in left()
    make_room(tmp_path, 100 * size)
    assert left() == {"new", "used", "old"}
    make_room(tmp_path, 2 * size + 100)
    assert left() == {"new", "used"}
    make_room(tmp_path, 0, keep=tmp_path / "used.packed")
    assert left() == {"used"}
