"""Hostile and damaged model files, one defect each: `gguf_cases()` and `safetensors_cases()`, name -> bytes.

Every GGUF case is a whole file; every safetensors case is the `model.safetensors` of a folder whose other files are
those of `tiny_models.tiny_safetensors`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from tiny_models import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U32,
    U64,
    array,
    assemble,
    container,
    framed,
    kv,
    safetensors_bytes,
    tensor,
    text,
    tiny_gguf_bytes,
    tiny_hf_tensors,
    tiny_keys,
    tiny_tensors,
    vocabulary,
)

MAX64, HUGE = 2**64 - 1, 2**62
ARCH = kv("general.architecture", STRING, "llama")


def _u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def _header_cases() -> dict[str, bytes]:
    good = tiny_gguf_bytes("Q8_0", layers=1)
    return {
        "empty": b"",
        "one_byte": b"G",
        "magic_only": b"GGUF",
        "magic_wrong": b"GGUX" + good[4:],
        "magic_old_ggml": b"lmgg" + good[4:],
        "text_file": b"<html><body>404: Not Found</body></html>",
        "pickle_named_gguf": b"\x80\x04\x95\x10\x00\x00\x00" + b"\0" * 32,
        "version_0": container([ARCH], [], version=0),
        "version_1": container([ARCH], [], version=1),
        "version_4": container([ARCH], [], version=4),
        "version_max": container([ARCH], [], version=2**32 - 1),
        "big_endian": b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + b"\0" * 32,
        "header_cut": good[:19],
        "n_kv_2e62": container([ARCH], [], num_keys=HUGE),
        "n_kv_max": container([ARCH], [], num_keys=MAX64),
        "n_kv_one_too_many": container([ARCH], [], num_keys=2),
        "n_tensors_2e62": container([ARCH], [], num_tensors=HUGE),
        "n_tensors_max": container([ARCH], [], num_tensors=MAX64),
        "n_tensors_too_many": container([ARCH], [], b"\0" * 64, num_tensors=3),
        "cut_in_keys": good[:200],
        "cut_in_tensor_infos": good[:5100],
        "cut_in_data": good[:-100],
    }


def _key_cases() -> dict[str, bytes]:
    raw = {
        "key_length_2e63": _u64(2**63) + b"x" * 16,
        "key_length_past_end": _u64(200) + b"general.name",
        "key_empty": kv("", U32, 1),
        "key_64k": kv("k" * 65536, U32, 1),
        "key_nul": kv("general\0name", U32, 1),
        "key_not_utf8": kv(b"general.\xff\xfe", U32, 1),
        "kv_type_13": text("x") + struct.pack("<I", 13) + b"\0" * 16,
        "kv_type_max": text("x") + struct.pack("<I", 2**32 - 1) + b"\0" * 16,
        "string_length_max": text("x") + struct.pack("<IQ", STRING, MAX64) + b"\0" * 16,
        "string_past_end": text("x") + struct.pack("<IQ", STRING, 1 << 20) + b"\0" * 16,
        "bool_7": text("x") + struct.pack("<IB", BOOL, 7) + b"\0" * 16,
        "array_bool_7": kv("x", ARRAY, struct.pack("<IQ", BOOL, 4) + b"\x01\x00\x07\x01"),
        "array_nested": kv("x", ARRAY, struct.pack("<IQ", ARRAY, 1) + array(U8, [1, 2, 3])),
        "array_nested_deep": kv("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000),
        "array_u8_2e40": kv("x", ARRAY, struct.pack("<IQ", U8, 2**40)),
        "array_nbytes_wrap": kv("x", ARRAY, struct.pack("<IQ", U64, 2**61) + b"\0" * 16),
        "array_strings_2e60": kv("x", ARRAY, struct.pack("<IQ", STRING, 2**60) + b"\0" * 16),
        "array_string_length_max": kv("x", ARRAY, struct.pack("<IQ", STRING, 1) + _u64(MAX64) + b"\0" * 16),
        "array_type_99": kv("x", ARRAY, struct.pack("<IQ", 99, 1) + b"\0" * 16),
        "align_0": kv("general.alignment", U32, 0),
        "align_3": kv("general.alignment", U32, 3),
        "align_2e31": kv("general.alignment", U32, 2**31),
        "align_text": kv("general.alignment", STRING, "32"),
    }
    cases = {name: container([ARCH, body], []) for name, body in raw.items()}
    strings = kv("x", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("bcdefghijklmnop"))
    cases["array_strings_cut"] = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + strings
    cases["key_duplicate"] = container([ARCH, ARCH], [])
    # The smallest file that sends a reader which trusts the count into a loop of 2^40 steps.
    cases["array_u8_2e40_alone"] = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("x") + struct.pack("<IIQ", 9, 0, 2**40)
    return cases


def _tensor_cases() -> dict[str, bytes]:
    tokens = vocabulary()
    keys = [kv(key, kind, value) for key, (kind, value) in tiny_keys(tokens).items()]
    rows = b"\0" * 1024

    def one(info: bytes, data: bytes = rows, *more: bytes) -> bytes:
        return container(keys, [info, *more], data)

    return {
        "t_name_200": one(tensor("t" * 200, [8], 0, 0)),
        "t_name_nul": one(tensor("a\0b", [8], 0, 0)),
        "t_name_empty": one(tensor("", [8], 0, 0)),
        "t_name_not_utf8": one(tensor(b"\xff\xff", [8], 0, 0)),
        "t_name_length_2e63": one(_u64(2**63) + b"\0" * 64),
        "t_ndims_0": one(tensor("a", [], 0, 0)),
        "t_ndims_5": one(tensor("a", [1, 1, 1, 1, 8], 0, 0)),
        "t_ndims_max": one(tensor("a", [8], 0, 0, num_dims=2**32 - 1)),
        "t_dim_0": one(tensor("a", [32, 0], 0, 0)),
        "t_dim_2e63": one(tensor("a", [2**63], 0, 0)),
        "t_dims_wrap": one(tensor("a", [2**32, 2**32], 0, 0)),
        "t_dims_wrap_small": one(tensor("a", [2**32 + 8, 2**32], 0, 0)),
        "t_nbytes_wrap": one(tensor("a", [2**62 + 2], 0, 0)),
        "t_type_4": one(tensor("a", [32], 4, 0)),
        "t_type_31": one(tensor("a", [32], 31, 0)),
        "t_type_9": one(tensor("a", [32], 9, 0)),
        "t_type_99": one(tensor("a", [32], 99, 0)),
        "t_type_140": one(tensor("a", [32], 140, 0)),
        "t_type_max": one(tensor("a", [32], 2**32 - 1, 0)),
        "t_offset_unaligned": one(tensor("a", [8], 0, 7)),
        "t_offset_past_end": one(tensor("a", [8], 0, 1 << 20)),
        "t_offset_max": one(tensor("a", [8], 0, MAX64 - 31)),
        "t_offset_plus_size_wrap": one(tensor("a", [64], 0, MAX64 - 127)),
        "t_overlap": one(tensor("a", [64], 0, 0), rows, tensor("b", [64], 0, 32)),
        "t_same_place": one(tensor("a", [8], 0, 0), rows, tensor("b", [8], 0, 0)),
        "t_duplicate": one(tensor("a", [8], 0, 0), rows, tensor("a", [8], 0, 32)),
        "t_half_a_block": one(tensor("a", [33], 8, 0)),
        "t_no_data": container(keys, [tensor("a", [8], 0, 0)]),
    }


def _model_cases() -> dict[str, bytes]:
    """Containers that are well formed, around a model that cannot be."""
    tokens = vocabulary()

    def keys(**changes: tuple[int, Any] | None) -> bytes:
        values = {**tiny_keys(tokens, layers=1), **{key.replace("__", "."): item for key, item in changes.items()}}
        return assemble({key: item for key, item in values.items() if item is not None}, _tensors())

    def tensors(change: Callable[[dict[str, tuple]], object]) -> bytes:
        values = _tensors()
        change(values)
        return assemble(tiny_keys(tokens, layers=1), values)

    def _tensors() -> dict[str, tuple]:
        return tiny_tensors(len(tokens), "Q8_0", layers=1)

    name = "blk.0.attn_q.weight"
    control = [3] * len(tokens)
    return {
        "arch_missing": keys(general__architecture=None),
        "arch_as_int": keys(general__architecture=(U32, 7)),
        "arch_unknown": keys(general__architecture=(STRING, "mamba99")),
        "arch_clip": keys(general__architecture=(STRING, "clip")),
        "arch_escapes": keys(general__architecture=(STRING, "\x1b[2Jllama")),
        "type_adapter": keys(general__type=(STRING, "adapter")),
        "type_imatrix": keys(general__type=(STRING, "imatrix")),
        "no_tensors": tiny_gguf_bytes(vocab_only=True),
        "layers_0": keys(llama__block_count=(U32, 0)),
        "layers_2e32": keys(llama__block_count=(U64, 2**32)),
        "layers_text": keys(llama__block_count=(STRING, "1")),
        "layers_array": keys(llama__block_count=(ARRAY, array(F32, [1.0]))),
        "layers_missing": keys(llama__block_count=None),
        "layers_more_than_stored": keys(llama__block_count=(U32, 2)),
        "layers_fewer_than_stored": tensors(lambda values: values.update({"blk.1.attn_q.weight": values[name]})),
        "heads_0": keys(**{"llama.attention.head_count": (U32, 0)}),
        "heads_not_dividing": keys(**{"llama.attention.head_count": (U32, 5)}),
        "heads_per_layer": keys(**{"llama.attention.head_count": (ARRAY, array(U32, [4, 2]))}),
        "kv_heads_not_dividing": keys(**{"llama.attention.head_count_kv": (U32, 3)}),
        "head_size_odd": keys(**{"llama.attention.key_length": (U32, 15)}),
        "hidden_wrong": keys(llama__embedding_length=(U32, 32)),
        "context_2e63": keys(llama__context_length=(U64, 2**63)),
        "context_0": keys(llama__context_length=(U32, 0)),
        "rope_nan": keys(**{"llama.rope.freq_base": (F32, float("nan"))}),
        "rope_negative": keys(**{"llama.rope.freq_base": (F32, -1.0)}),
        "rope_dims_odd": keys(**{"llama.rope.dimension_count": (U32, 7)}),
        "rope_scaling_unknown": keys(
            **{"llama.rope.scaling.type": (STRING, "warp"), "llama.rope.scaling.factor": (F32, 2)}
        ),
        "eps_nan": keys(**{"llama.attention.layer_norm_rms_epsilon": (F32, float("nan"))}),
        "eps_inf": keys(**{"llama.attention.layer_norm_rms_epsilon": (F32, float("inf"))}),
        "experts": keys(llama__expert_count=(U32, 8)),
        "vocab_size_wrong": keys(llama__vocab_size=(U32, 999)),
        "split_without_parts": keys(split__count=(U32, 3)),
        "tokens_missing": keys(**{"tokenizer.ggml.tokens": None}),
        "tokens_as_ints": keys(**{"tokenizer.ggml.tokens": (ARRAY, array(U32, list(range(len(tokens)))))}),
        "tokens_too_few": keys(**{"tokenizer.ggml.tokens": (ARRAY, array(STRING, tokens[:-1]))}),
        "token_types_as_text": keys(**{"tokenizer.ggml.token_type": (ARRAY, array(STRING, tokens))}),
        "token_types_short": keys(**{"tokenizer.ggml.token_type": (ARRAY, array(I32, control[:5]))}),
        "scores_short": keys(**{"tokenizer.ggml.scores": (ARRAY, array(F32, [0.0]))}),
        "scores_nan": keys(**{"tokenizer.ggml.scores": (ARRAY, array(F32, [float("nan")] * len(tokens)))}),
        "eos_out_of_range": keys(**{"tokenizer.ggml.eos_token_id": (U32, 271)}),
        "eos_as_array": keys(**{"tokenizer.ggml.eos_token_id": (ARRAY, array(U32, [1, 2]))}),
        "vocab_size_as_array": keys(llama__vocab_size=(ARRAY, array(U32, [7, 7]))),
        "bos_negative": keys(**{"tokenizer.ggml.bos_token_id": (I32, -5)}),
        "merge_no_space": keys(**{"tokenizer.ggml.merges": (ARRAY, array(STRING, ["t h", "the"]))}),
        "merge_one_side": keys(**{"tokenizer.ggml.merges": (ARRAY, array(STRING, ["t h", "x "]))}),
        "merges_as_ints": keys(**{"tokenizer.ggml.merges": (ARRAY, array(U32, [1, 2]))}),
        "template_as_int": keys(**{"tokenizer.chat_template": (U32, 1)}),
        "template_2mb": keys(**{"tokenizer.chat_template": (STRING, "x" * (2 << 20))}),
        "template_not_utf8": keys(**{"tokenizer.chat_template": (STRING, b"{{ \xff\xfe }}")}),
        "add_bos_as_text": keys(**{"tokenizer.ggml.add_bos_token": (STRING, "yes")}),
        "embedding_missing": tensors(lambda t: t.pop("token_embd.weight")),
        "tensor_missing": tensors(lambda t: t.pop(name)),
        "norm_missing": tensors(lambda t: t.pop("output_norm.weight")),
        "tensor_wrong_shape": tensors(lambda t: t.update({name: ([64, 32], "F32", b"\0" * 8192)})),
        "tensor_one_dim": tensors(lambda t: t.update({name: ([4096], "F32", b"\0" * 16384)})),
        "norm_quantized": tensors(lambda t: t.update({"output_norm.weight": ([64], "Q8_0", b"\0" * 68)})),
        "head_wrong_rows": tensors(lambda t: t.update({"output.weight": ([64, 5], "F32", b"\0" * 1280)})),
    }


def gguf_cases() -> dict[str, bytes]:
    """Name -> a GGUF file with one defect; all must be refused."""
    return {**_header_cases(), **_key_cases(), **_tensor_cases(), **_model_cases()}


def safetensors_cases() -> dict[str, bytes]:
    """Name -> a safetensors file with one defect; all must be refused."""
    whole = tiny_hf_tensors()
    good = safetensors_bytes(whole)

    def entry(changes: dict[str, Any] | None = None, name: str = "a", data: bytes = b"\0" * 16, **more: Any) -> bytes:
        value: dict[str, Any] = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **(changes or {})}
        value = {key: item for key, item in value.items() if item is not ...}
        return framed(json.dumps({name: value, **more}).encode(), data)

    def without(name: str) -> bytes:
        return safetensors_bytes({key: value for key, value in whole.items() if key != name})

    second = {"dtype": "F32", "shape": [4]}
    plain = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    many = {f"z{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
    norm = "model.norm.weight"
    return {
        "empty": b"",
        "seven_bytes": b"\x10\0\0\0\0\0\0",
        "header_length_max": framed(plain, length=MAX64),
        "header_length_2e63": framed(plain, length=2**63),
        "header_length_over_cap": framed(plain, length=100_000_001),
        "header_length_past_end": framed(plain, length=5000),
        "header_length_0": framed(b"", b"\0" * 16),
        "header_length_0_before_a_header": framed(plain, b"\0" * 16, length=0),
        "header_length_1": framed(plain, b"\0" * 16, length=1),
        "header_not_json": framed(b"{hello world}   "),
        "header_leading_space": framed(b" " + plain, b"\0" * 16),
        "header_array": framed(b"[1, 2, 3]       "),
        "header_not_utf8": framed(b'{"\xff\xfe": 1}'),
        "header_cut": framed(plain[:-10], b"\0" * 16),
        "header_trailing_text": framed(plain + b"x", b"\0" * 16),
        "header_trailing_comma": framed(plain[:-1] + b",}", b"\0" * 16),
        "header_nested_10000": framed(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
        "header_arrays_10000": framed(b'{"a":{"dtype":"F32","shape":' + b"[" * 10_000 + b"]" * 10_000 + b"}}"),
        "header_open_string": framed(b'{"' + b"a" * 1_000_000),
        "header_escapes": framed(b'{"' + b"\\n" * 500_000),
        "name_twice": framed(plain[:-1] + b"," + plain[1:], b"\0" * 16),
        "name_100k": entry(name="n" * 100_000),
        "name_traversal": entry(name="../../etc/passwd"),
        "name_nul": entry(name="a\0b"),
        "name_escape": entry(name="a\x1b[2Jb"),
        "name_empty": entry(name=""),
        "dtype_unknown": entry({"dtype": "F8_E4M3FNUZ"}),
        "dtype_number": entry({"dtype": 7}),
        "dtype_missing": entry({"dtype": ...}),
        "shape_missing": entry({"shape": ...}),
        "shape_negative": entry({"shape": [-4]}),
        "shape_float": entry({"shape": [4.0]}),
        "shape_bool": entry({"shape": [True]}),
        "shape_text": entry({"shape": "4"}),
        "shape_huge": entry({"shape": [2**62, 2**62]}),
        "shape_wraps": entry({"shape": [2**62 + 1, 4]}),
        "shape_9_dims": entry({"shape": [1, 1, 1, 1, 1, 1, 1, 1, 4]}),
        "shape_nan": framed(plain.replace(b"[4]", b"[NaN]"), b"\0" * 16),
        "zero_size": entry({"shape": [0], "data_offsets": [0, 0]}, data=b""),
        "zero_size_many": framed(json.dumps(many).encode()),
        "offsets_missing": entry({"data_offsets": ...}),
        "offsets_reversed": entry({"data_offsets": [16, 0]}),
        "offsets_negative": entry({"data_offsets": [-16, 0]}),
        "offsets_three": entry({"data_offsets": [0, 8, 16]}),
        "offsets_float": entry({"data_offsets": [0, 16.0]}),
        "offsets_do_not_fit_shape": entry({"data_offsets": [0, 12]}, data=b"\0" * 12),
        "offsets_past_end": entry({"shape": [400], "data_offsets": [0, 1600]}),
        "offsets_max": entry({"data_offsets": [MAX64 - 16, MAX64]}),
        "overlap": entry(b={**second, "data_offsets": [8, 24]}, data=b"\0" * 24),
        "same_place": entry(b={**second, "data_offsets": [0, 16]}),
        "hole": entry(b={**second, "data_offsets": [32, 48]}, data=b"\0" * 48),
        "hole_at_start": entry({"data_offsets": [16, 32]}, data=b"\0" * 32),
        "data_cut": good[:-7],
        "data_too_long": good + b"\0",
        "entry_extra_key": entry({"color": "red"}),
        "entry_number": framed(b'{"a": 1}        '),
        "metadata_number": framed(b'{"__metadata__": {"a": 1}}'),
        "metadata_twice": framed(b'{"__metadata__":{},"__metadata__":{}}'),
        "half_a_byte": entry({"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}, data=b"\0\0"),
        "pickle": b"\x80\x04\x95\x10\x00\x00\x00" + b"\0" * 64,
        "zip": b"PK\x03\x04" + b"\0" * 64,
        "gguf": tiny_gguf_bytes(layers=1),
        "tensor_missing": without("model.layers.1.self_attn.q_proj.weight"),
        "norm_missing": without(norm),
        "head_missing": without("lm_head.weight"),
        "norm_wrong_shape": safetensors_bytes({**whole, norm: ("F32", [32], b"\0" * 128)}),
        "norm_as_ints": safetensors_bytes({**whole, norm: ("I32", [64], b"\0" * 256)}),
        "embedding_wrong_rows": safetensors_bytes(
            {**whole, "model.embed_tokens.weight": ("F32", [4, 64], b"\0" * 1024)}
        ),
        "scale_missing": safetensors_bytes({**whole, "lm_head.weight": ("F8_E4M3", [271, 64], b"\0" * 271 * 64)}),
    }
