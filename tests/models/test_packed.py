"""Repacked weights from a file: the same bytes as without it, whatever happens to the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from localllm.checkpoint import packed_file
from localllm.kernels import Weight
from localllm.kernels.cpu import build, layout
from localllm.kernels.cpu.linear import run
from localllm.kernels.layer_weights import Linear
from localllm.kernels.verify.selftest import SelfTest
from localllm.models import packed
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, Model, load_model
from localllm.models.packed import Packed

from .test_gguf_models import write_gguf

pytestmark = pytest.mark.skipif(build.library().lib is None, reason="no C compiler")


@pytest.fixture(
    scope="module",
    params=[
        ("llama-packable", "Q8_0"),
        pytest.param(("gemma3", "F16"), marks=pytest.mark.slow),
        pytest.param(("muse-glimmer", ""), marks=pytest.mark.slow),
    ],
    ids=["quantized", "tied", "gates apart"],
)
def source(request: pytest.FixtureRequest, tiny: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model: quantized, or one whose head reads the embedding, or whose queries and gates are joined."""
    name, kind = request.param
    path, model = tmp_path_factory.mktemp("packed") / "tiny.gguf", tiny(name)
    if not kind:
        model.save(path.with_suffix(""))
        return path.with_suffix("")
    return write_gguf(path, model.config, model.tensors, gguf.GGMLQuantizationType[kind])


def load(source: Path, folder: Path, selftest: SelfTest | None = None) -> tuple[Model, Packed]:
    with open_model(source) as checkpoint:
        kept = Packed(folder / "a.packed", [source], 1 << 30)
        model = load_model(checkpoint, LoadOptions(packed=kept, selftest=selftest))
    kept.write()
    return model, kept


def tiles(model: Model) -> list[bytes]:
    """All that products read."""
    found = []
    waiting: list[Any] = [model.head.linear, *model.layers]
    for one in waiting:
        if isinstance(one, Linear):
            for part in one.parts:
                assert isinstance(part.prepared, layout.Prepared)
                fields = layout.stored_struct(part.prepared)
                found += [
                    fields,
                    part.prepared.data.numpy().tobytes(),
                    *(t.numpy().tobytes() for t in part.prepared.kept),
                ]
        elif hasattr(one, "__dataclass_fields__"):
            waiting += [getattr(one, name) for name in one.__dataclass_fields__]
        elif isinstance(one, tuple):
            waiting += one
    return found


def test_the_second_load_reads_what_the_first_repacked(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_model(open_model(source))
    first, kept = load(source, tmp_path)
    assert not kept.note and not kept.read_bytes
    monkeypatch.setattr(layout, "_describe", None)  # nothing is repacked from here on
    second, again = load(source, tmp_path)
    assert not again.note and again.read_bytes > 0
    assert len(tiles(plain)) > 10
    assert tiles(plain) == tiles(first) == tiles(second)
    assert first.kernels == second.kernels == plain.kernels
    assert first.weight_bytes == second.weight_bytes == plain.weight_bytes
    ids = torch.tensor([1, 2, 3])
    assert torch.equal(plain.embedding.rows(ids), second.embedding.rows(ids))


@pytest.mark.slow
def test_nothing_of_the_source_is_kept_and_the_file_may_go(source: Path, tmp_path: Path) -> None:
    before = sorted(source.parent.iterdir()), source.stat().st_mtime_ns
    expected = tiles(load(source, tmp_path)[0])
    second, _ = load(source, tmp_path)
    (tmp_path / "a.packed").unlink()
    assert tiles(second) == expected
    assert (sorted(source.parent.iterdir()), source.stat().st_mtime_ns) == before


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "flipped", "layout", "version"])
def test_a_file_that_is_wrong_is_made_anew_and_said(
    damage: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.packed"
    expected = tiles(load(source, tmp_path)[0])
    whole = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(whole[:-5000])
    elif damage == "flipped":
        whole[100] ^= 1
        path.write_bytes(whole)
    elif damage == "layout":
        monkeypatch.setattr(packed, "layout_name", lambda: "of another CPU")
    else:
        monkeypatch.setattr(packed_file, "VERSION", 77)
    model, kept = load(source, tmp_path)
    assert "rebuilt" in kept.note and tiles(model) == expected
    model, kept = load(source, tmp_path)
    assert not kept.note and kept.read_bytes and tiles(model) == expected


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 3, 1000])
def test_a_disk_that_fills_while_it_is_written(
    after: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwrite, iter(range(100_000))

    def pwrite(*given: Any) -> int:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given)

    def replaced(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "replace", replaced)
    model, kept = load(source, tmp_path)
    assert "the disk is full" in kept.note and not kept.read_bytes
    assert list(tmp_path.iterdir()) == []
    assert tiles(model) == tiles(load_model(open_model(source)))


@pytest.mark.slow
def test_another_process_that_writes_is_not_waited_for(source: Path, tmp_path: Path) -> None:
    other = packed_file.PackedWriter(tmp_path / "a.packed", 1, 1 << 30)
    model, kept = load(source, tmp_path)
    assert "another process" in kept.note and not kept.read_bytes
    other.close()
    assert tiles(model) == tiles(load(source, tmp_path)[0])


@pytest.mark.slow
def test_no_huge_pages_no_difference(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiles(load(source, tmp_path)[0])
    monkeypatch.setattr(packed_file.mmap, "MADV_HUGEPAGE", 9999)  # which the system refuses
    assert tiles(load(source, tmp_path)[0]) == expected
    (tmp_path / "a.packed").unlink()
    assert tiles(load(source, tmp_path)[0]) == expected


@pytest.mark.slow
def test_a_kernel_without_a_verdict_is_tried_on_what_is_stored(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(source, tmp_path)
    selftest = SelfTest()
    model, _ = load(source, tmp_path, selftest)  # the file has no canonical weights to compare with
    assert selftest.num_run > 0 and not selftest.failures
    known = replace(selftest, failures=[], num_run=0)
    monkeypatch.setattr(layout, "_describe", None)
    assert tiles(load(source, tmp_path, known)[0]) == tiles(model)


@pytest.mark.slow
def test_writing_stops_between_weights_and_goes_on(source: Path, tmp_path: Path) -> None:
    """A request that comes in waits for one weight at most; who gives up leaves nothing."""
    for ends in (False, True):
        with open_model(source) as checkpoint:
            kept = Packed(tmp_path / "a.packed", [source], 1 << 30)
            model = load_model(checkpoint, LoadOptions(packed=kept))
        calls = iter(range(1_000))
        assert not kept.write(lambda calls=calls: next(calls) == 2)
        if ends:
            kept.close()
            assert list(tmp_path.iterdir()) == []
        assert kept.write() and kept.write()
        assert (tmp_path / "a.packed").exists() is not ends
        if not ends:
            assert tiles(load(source, tmp_path)[0]) == tiles(model)
            (tmp_path / "a.packed").unlink()


@pytest.mark.slow
def test_a_file_that_is_read_ahead_is_the_same(source: Path, tmp_path: Path) -> None:
    expected = tiles(load(source, tmp_path)[0])
    path = tmp_path / "a.packed"
    ahead = packed_file.read_ahead(path)
    assert ahead is not None
    path.unlink()  # what is read already stays
    with open_model(source) as checkpoint:
        kept = Packed(path, [source], 1 << 30, ahead)
        assert kept.read_bytes and tiles(load_model(checkpoint, LoadOptions(packed=kept))) == expected
    assert packed_file.read_ahead(path) is None
    load(source, tmp_path)
    nobody_asks = packed_file.read_ahead(path)
    assert nobody_asks is not None
    nobody_asks.close()


@pytest.mark.slow
def test_a_weight_that_is_revived_multiplies_as_before() -> None:
    """With an order of inputs, and scales of rows and inputs."""
    k, n = 128, 48
    weight = Weight(
        "int4g",
        (n, k),
        torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
        torch.rand(n, k // 32).half(),
        group_size=32,
        perm=torch.randperm(k),
        pre_scale=torch.rand(k) + 0.5,
    )
    before = layout.prepare(weight)
    assert layout.kept_of(before).keys() == {"perm", "pre_scale"}
    after = layout.revived(layout.stored_struct(before), before.data.clone(), layout.kept_of(before))
    x = torch.randn(3, k)
    assert torch.equal(run(x, before), run(x, after))
