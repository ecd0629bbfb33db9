"""The GGUF reader against gguf's own on the two real models, on every value type, on splits; and its speed."""

from __future__ import annotations

import hashlib
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny

from localllm.checkpoint import Checkpoint, gguf_file
from localllm.checkpoint.gguf_file import read_gguf
from localllm.checkpoint.gguf_types import TENSOR_TYPES
from localllm.checkpoint.mapped_file import MappedFile
from localllm.errors import BadModelFile, UnsupportedModel
from localllm.models.architectures import open_model

# First 16 digits of SHA-256 over the tensor's bytes as gguf 0.19's GGUFReader gives them.
SMOLLM2 = {
    "token_embd.weight": ("Q8_0", (49152, 576), "0d728edd2a012d16"),
    "blk.3.ffn_down.weight": ("Q4_1", (576, 1536), "8cfad97fe7809872"),
    "blk.17.attn_v.weight": ("Q4_1", (192, 576), "fe9f0c0b5934388c"),
    "blk.0.attn_norm.weight": ("F32", (576,), "2469079d969a3618"),
}
GEMMA = {
    "blk.3.ffn_down.weight": ("Q4_K", (640, 2048), "4d49bcfae9792b15"),
    "blk.17.attn_v.weight": ("Q8_0", (256, 640), "4f2995f66cd4d999"),
    "blk.0.attn_norm.weight": ("F32", (640,), "5337a178e02d2e0c"),
}


def assert_views(checkpoint: Checkpoint, wanted: dict[str, tuple[str, tuple[int, ...], str]]) -> None:
    for name, (dtype, shape, digest) in wanted.items():
        info, data = checkpoint.tensors[name], checkpoint.read(name)
        assert (info.dtype, info.shape, info.nbytes) == (dtype, shape, data.nbytes)
        assert data.dtype == np.uint8 and data.ndim == 1 and not data.flags.writeable and not data.flags.owndata
        assert hashlib.sha256(data).hexdigest()[:16] == digest


def decoded(strings: list[bytes]) -> list[str]:
    return [item.decode("utf-8", "replace") for item in strings]


def test_views_of_smollm2(smollm2_path: Path) -> None:
    with open_model(smollm2_path) as checkpoint:
        assert_views(checkpoint, SMOLLM2)
        assert checkpoint.nbytes == 96_576_768
        assert len(checkpoint.tensors) == 272
        tokens = checkpoint.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, gguf_file.StringArray)
        assert (len(tokens), tokens[1], tokens[-1]) == (49152, b"<|im_start|>", tokens[49151])


def test_views_of_gemma(gemma_path: Path) -> None:
    with open_model(gemma_path) as checkpoint:
        assert_views(checkpoint, GEMMA)
        assert checkpoint.metadata["tokenizer.ggml.scores"].dtype == np.float32


@pytest.mark.slow
def test_everything_equals_ggufs_own_reader(smollm2_path: Path, gemma_path: Path) -> None:
    from gguf import GGUFReader

    for path in (smollm2_path, gemma_path):
        theirs = GGUFReader(str(path))
        with open_model(path) as ours:
            assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
            for tensor in theirs.tensors:
                assert ours.tensors[tensor.name].dtype == tensor.tensor_type.name
                assert ours.tensors[tensor.name].shape == tuple(int(dim) for dim in reversed(tensor.shape))
                assert np.array_equal(ours.read(tensor.name), np.asarray(tensor.data).view(np.uint8).reshape(-1))
            for key, field in theirs.fields.items():
                if key.startswith("GGUF."):
                    continue
                value = ours.metadata[key]
                plain = decoded(list(value)) if isinstance(value, list | gguf_file.StringArray) else value
                assert (plain.tolist() if isinstance(plain, np.ndarray) else plain) == field.contents(), key


def test_block_sizes_are_ggufs() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    ours = {type_id: (block, size) for type_id, (_, block, size) in TENSOR_TYPES.items()}
    for kind in GGMLQuantizationType:
        if int(kind) in ours:
            assert ours[int(kind)] == GGML_QUANT_SIZES[kind]


def test_every_value_type_comes_back(tmp_path: Path) -> None:
    scalars = {
        tiny.U8: 255,
        tiny.I8: -128,
        tiny.U16: 65535,
        tiny.I16: -5,
        tiny.U32: 2**32 - 1,
        tiny.I32: -7,
        tiny.F32: 0.5,
        tiny.BOOL: True,
        tiny.STRING: "é ▁",
        tiny.U64: 2**63,
        tiny.I64: -(2**62),
        tiny.F64: 1e300,
    }
    keys = [tiny.kv(f"x.{kind}", kind, value) for kind, value in scalars.items()]
    keys += [tiny.kv(f"a.{k}", tiny.ARRAY, tiny.array(k, [v, v])) for k, v in scalars.items()]
    keys += [tiny.kv("e.strings", tiny.ARRAY, tiny.array(tiny.STRING, []))]
    path = tmp_path / "values.gguf"
    path.write_bytes(tiny.container(keys, []))
    metadata = read_gguf(MappedFile(path))[1]
    for kind, value in scalars.items():
        assert metadata[f"x.{kind}"] == value and type(metadata[f"x.{kind}"]) is type(value)
        found = metadata[f"a.{kind}"]
        assert (decoded(found) if isinstance(found, list) else found.tolist()) == [value, value]
    assert metadata["e.strings"] == []


def test_string_arrays_are_lists_of_bytes(tmp_path: Path) -> None:
    words = [b"a", b"", b"\xff\xfe", "▁the".encode()]
    path = tmp_path / "words.gguf"
    path.write_bytes(tiny.container([tiny.kv("w", tiny.ARRAY, tiny.array(tiny.STRING, words))], []))
    assert read_gguf(MappedFile(path))[1]["w"] == words


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "short": lambda rng: rng.randbytes(rng.randrange(1, 12)),
    "empty": lambda rng: b"",
    "zeros": lambda rng: bytes(rng.randrange(40)),
    "long": lambda rng: rng.randbytes(rng.choice([255, 256, 300])),
    "lengths": lambda rng: rng.randrange(256).to_bytes(8, "little") * rng.randrange(1, 4),
    "mixed": lambda rng: rng.choice([b"", b"a", bytes(9), rng.randbytes(400), b"\x03" + bytes(7) + b"abc"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_large_string_arrays(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their strings look like, and wherever the buffer and what is looked through at once end."""
    rng, path = random.Random(kind), tmp_path / "words.gguf"
    words = [KINDS[kind](rng) for _ in range(3000)]
    arrays = [tiny.kv(name, tiny.ARRAY, tiny.array(tiny.STRING, words)) for name in ("w", "v")]
    path.write_bytes(tiny.container([*arrays, tiny.kv("n", tiny.U64, 7)], []))
    for read, window in ((1 << 20, 1 << 20), (100, 1 << 20), (100, 300), (1 << 20, 40)):
        monkeypatch.setattr(gguf_file, "READ_BYTES", read)
        monkeypatch.setattr(gguf_file, "WINDOW", window)
        found = read_gguf(MappedFile(path))[1]
        assert type(found["w"]) is gguf_file.StringArray and len(found["w"]) == len(words)
        assert list(found["w"]) == list(found["v"]) == words and found["n"] == 7
        assert found["w"][5] == words[5] and found["w"][-2:] == words[-2:]


@pytest.mark.parametrize("keep", [33, 40, 300, 20_000])
def test_a_large_array_may_be_truncated(keep: int, tmp_path: Path) -> None:
    data = tiny.container([tiny.kv("w", tiny.ARRAY, tiny.array(tiny.STRING, [b"word"] * 3000))], [])
    path = tmp_path / "words.gguf"
    path.write_bytes(data[:-keep])
    with pytest.raises(BadModelFile, match=r"the rest of the file holds|is truncated|bytes long;"):
        read_gguf(MappedFile(path))


def test_strings_without_a_byte_inside() -> None:
    words = [b"a b", b" a b", b"a b ", b"   "]
    for wrong in (b"", b"a", b" ", b" a", b"a ", b"  ", b"ab"):
        whole = [*words, wrong, *words]
        ends = np.cumsum([len(word) for word in whole])
        starts = ends - [len(word) for word in whole]
        strings = gguf_file.StringArray(b"".join(whole), starts, ends)
        assert strings.first_undivided(ord(" ")) == len(words), wrong
    assert gguf_file.StringArray(b"a b", np.array([0]), np.array([3])).first_undivided(ord(" ")) is None


def test_a_view_outlives_close(tmp_path: Path) -> None:
    checkpoint = open_model(tiny.tiny_gguf(tmp_path / "a.gguf"))
    view = checkpoint.read("output_norm.weight")
    checkpoint.close()
    assert view.view("<f4").tolist() == [1.0] * 64
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read("output_norm.weight")


def large_vocabulary(path: Path, size: int = 150_000) -> Path:
    """The tiny model with `size` tokens and `size` merges."""
    prefix, count = struct.pack("<Q", 12), struct.pack("<IQ", tiny.STRING, size)
    keys = tiny.tiny_keys(tiny.vocabulary())
    tokens = b"".join([prefix + b"token%07d" % index for index in range(size)])
    merges = b"".join([prefix + b"l%05d r%04d" % (index % 99991, index % 9973) for index in range(size)])
    keys["tokenizer.ggml.tokens"] = (tiny.ARRAY, count + tokens)
    keys["tokenizer.ggml.merges"] = (tiny.ARRAY, count + merges)
    keys["tokenizer.ggml.token_type"] = (tiny.ARRAY, struct.pack("<IQ", tiny.I32, size) + b"\1\0\0\0" * size)
    keys["llama.vocab_size"] = (tiny.U32, size)
    tensors = tiny.tiny_tensors(1, "Q4_0")
    tensors["token_embd.weight"] = tensors["output.weight"] = ([64, size], "Q4_0", b"\0" * (36 * size))
    path.write_bytes(tiny.assemble(keys, tensors))
    return path


def test_150k_tokens_and_merges_read_fast(tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    path = large_vocabulary(tmp_path / "large.gguf")
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        with open_model(path) as checkpoint:
            assert checkpoint.facts.vocab_size == 150_000
        times.append(time.perf_counter() - begin)
    record_property("seconds", min(times))
    # The promise is 0.3 s; ten times that, for machines under load.
    assert min(times) < 3.0


def write_splits(folder: Path, count: int = 3) -> list[Path]:
    """The tiny model in `count` files; only the first has the metadata."""
    tensors = tiny.tiny_tensors(len(tiny.vocabulary()), "Q8_0")
    names = list(tensors)
    paths = []
    for part in range(count):
        keys = tiny.tiny_keys(tiny.vocabulary()) if part == 0 else {}
        keys |= {"split.no": (tiny.U16, part), "split.count": (tiny.U16, count)}
        keys["split.tensors.count"] = (tiny.I32, len(names))
        share = {name: tensors[name] for name in names[part::count]}
        paths.append(folder / f"tiny-{part + 1:05d}-of-{count:05d}.gguf")
        paths[-1].write_bytes(tiny.assemble(keys, share))
    return paths


def test_splits_are_one_model(tmp_path: Path) -> None:
    paths = write_splits(tmp_path)
    file = MappedFile(tiny.tiny_gguf(tmp_path / "whole.gguf", "Q8_0"))
    whole, _ = read_gguf(file)
    for path in (paths[0], paths[2]):
        with open_model(path) as checkpoint:
            assert checkpoint.facts.num_layers == 2
            assert set(checkpoint.tensors) == set(whole)
            assert {info.file for info in checkpoint.tensors.values()} == set(paths)
            for name, info in whole.items():
                assert bytes(checkpoint.read(name)) == bytes(file.view(info.offset, info.nbytes))
    (tmp_path / "whole.gguf").unlink()
    assert open_model(tmp_path).path == paths[0]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p[1].unlink(), "part 2 of 3 is missing"),
        (lambda p: p[2].write_bytes(p[1].read_bytes()), "split.no: is 1, expected 2"),
        (lambda p: p[1].write_bytes(p[1].read_bytes()[:500]), "tiny-00002-of-00003.gguf"),
        (lambda p: p[0].rename(p[0].with_name("other.gguf")), "split.count: is 3; the file name says 1"),
    ],
)
def test_bad_splits(tmp_path: Path, damage: object, words: str) -> None:
    paths = write_splits(tmp_path)
    damage(paths)  # type: ignore[operator]
    first = paths[0] if paths[0].exists() else tmp_path / "other.gguf"
    with pytest.raises(BadModelFile, match=words):
        open_model(first)


def test_a_split_that_repeats_a_tensor(tmp_path: Path) -> None:
    paths = write_splits(tmp_path, 2)
    keys = {"split.no": (tiny.U16, 1), "split.count": (tiny.U16, 2)}
    same = {"token_embd.weight": ([32], "F32", b"\0" * 128)}
    paths[1].write_bytes(tiny.assemble(keys, same))
    with pytest.raises(BadModelFile, match=r"token_embd.weight: the tensor is also in tiny-00001-of-00002.gguf"):
        open_model(paths[0])


def test_a_projector_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="is a vision projector"):
        _ = open_model(tiny.tiny_gguf(tmp_path / "mmproj-F16.gguf")).facts
