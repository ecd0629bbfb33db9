"""Tiny valid models, written byte by byte: a GGUF file and a safetensors folder that load and can generate.

The writers take every value as an argument, so that `bad_files.py` makes each defect by one change.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from localllm.checkpoint import Checkpoint

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
TENSOR_TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q8_0": (8, 32, 34)}
TENSOR_TYPES |= {"Q4_K": (12, 256, 144), "BF16": (30, 1, 2), "F64": (28, 1, 8)}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "a n", "an d", "Ġ and", "e r", "o n", "Ġ i", "r e", "Ġ a"]


def byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte value."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, spare = {b: chr(b) for b in plain}, 256
    for value in range(256):
        if value not in letters:
            letters[value] = chr(spare)
            spare += 1
    return [letters[value] for value in range(256)]


def vocabulary() -> list[str]:
    """3 control tokens, 256 bytes, one token per merge."""
    return [*SPECIALS, *byte_letters(), *("".join(merge.split(" ")) for merge in MERGES)]


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(kind: int, value: Any) -> bytes:
    """One GGUF scalar or string."""
    return text(value) if kind == STRING else struct.pack("<" + _CODES[kind], value)


def array(kind: int, values: list[Any]) -> bytes:
    """The payload of a GGUF array."""
    return struct.pack("<IQ", kind, len(values)) + b"".join(value_bytes(kind, value) for value in values)


def kv(key: str | bytes, kind: int, value: Any) -> bytes:
    """One key with its value; for ARRAY, `value` is the payload."""
    return text(key) + struct.pack("<I", kind) + (value if kind == ARRAY else value_bytes(kind, value))


def tensor(name: str | bytes, dims: list[int], type_id: int, offset: int, num_dims: int | None = None) -> bytes:
    """One tensor info, dims innermost first."""
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, type_id, offset)


def container(
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file from its parts; the counts may lie."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def encode(values: np.ndarray, kind: str) -> bytes:
    """float32 rows as GGUF blocks; the 4-bit kinds are crude, and finite."""
    if kind == "F32":
        return values.astype("<f4").tobytes()
    if kind == "F16":
        return values.astype("<f2").tobytes()
    _, block, _ = TENSOR_TYPES[kind]
    rows = values.reshape(-1, block)
    if kind == "Q8_0":
        d = np.abs(rows).max(1, keepdims=True) / 127 + 1e-8
        codes = np.rint(rows / d).astype(np.int8)
        return np.concatenate([d.astype("<f2").view(np.uint8), codes.view(np.uint8)], 1).tobytes()
    if kind in ("Q4_0", "Q4_1"):
        low = np.full((len(rows), 1), 0.0) if kind == "Q4_0" else rows.min(1, keepdims=True)
        span = np.abs(rows).max(1, keepdims=True) / 7 if kind == "Q4_0" else np.ptp(rows, axis=1, keepdims=True) / 15
        codes = np.clip(np.rint((rows - low) / (span + 1e-8)) + (8 if kind == "Q4_0" else 0), 0, 15).astype(np.uint8)
        parts = [span.astype("<f2").view(np.uint8)] + ([] if kind == "Q4_0" else [low.astype("<f2").view(np.uint8)])
        return np.concatenate([*parts, codes[:, :16] | codes[:, 16:] << 4], 1).tobytes()
    assert kind == "Q4_K"
    block_bytes = np.zeros((len(rows), 144), np.uint8)
    scale = np.abs(rows).max(1, keepdims=True) / 8
    block_bytes[:, 0:2] = scale.astype("<f2").view(np.uint8)
    block_bytes[:, 2:4] = (scale * 8).astype("<f2").view(np.uint8)
    block_bytes[:, 4:16] = [1, 1, 1, 1, 1, 1, 1, 1, 0x11, 0x11, 0x11, 0x11]
    codes = np.clip(np.rint(rows / (scale + 1e-8)) + 8, 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    block_bytes[:, 16:] = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)
    return block_bytes.tobytes()


def tiny_keys(tokens: list[str], *, hidden: int = 64, layers: int = 2, context: int = 256, arch: str = "llama") -> dict:
    """Metadata of the tiny model: key -> (value type, value)."""
    control = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS))
    return {
        "general.architecture": (STRING, arch),
        "general.name": (STRING, "Tiny"),
        "general.license": (STRING, "apache-2.0"),
        "general.alignment": (U32, 32),
        f"{arch}.block_count": (U32, layers),
        f"{arch}.context_length": (U32, context),
        f"{arch}.embedding_length": (U32, hidden),
        f"{arch}.feed_forward_length": (U32, 2 * hidden),
        f"{arch}.attention.head_count": (U32, 4),
        f"{arch}.attention.head_count_kv": (U32, 2),
        f"{arch}.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        f"{arch}.rope.freq_base": (F32, 10000.0),
        f"{arch}.vocab_size": (U32, len(tokens)),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "smollm"),
        "tokenizer.ggml.tokens": (ARRAY, array(STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, array(I32, control)),
        "tokenizer.ggml.merges": (ARRAY, array(STRING, MERGES)),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
        "tokenizer.chat_template": (STRING, TEMPLATE),
    }


def tiny_tensors(vocab: int, quant: str, *, hidden: int = 64, layers: int = 2, seed: int = 0) -> dict[str, tuple]:
    """Tensors of the tiny model: name -> (dims innermost first, type name, bytes)."""
    draw = np.random.default_rng(seed)
    half, inner = hidden // 2, 2 * hidden
    tensors: dict[str, tuple] = {}

    def matrix(name: str, n: int, k: int) -> None:
        values = draw.standard_normal((n, k)) / np.sqrt(k)
        tensors[f"{name}.weight"] = ([k, n], quant, encode(values, quant))

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = ([hidden], "F32", np.ones(hidden, "<f4").tobytes())

    matrix("token_embd", vocab, hidden)
    for layer in range(layers):
        norm(f"blk.{layer}.attn_norm")
        for name, n, k in (("attn_q", hidden, hidden), ("attn_k", half, hidden), ("attn_v", half, hidden)):
            matrix(f"blk.{layer}.{name}", n, k)
        matrix(f"blk.{layer}.attn_output", hidden, hidden)
        norm(f"blk.{layer}.ffn_norm")
        matrix(f"blk.{layer}.ffn_gate", inner, hidden)
        matrix(f"blk.{layer}.ffn_up", inner, hidden)
        matrix(f"blk.{layer}.ffn_down", hidden, inner)
    norm("output_norm")
    matrix("output", vocab, hidden)
    return tensors


def assemble(keys: dict, tensors: dict[str, tuple], alignment: int = 32) -> bytes:
    """The file of `tiny_keys` and `tiny_tensors` values, tensors one after another."""
    infos, data = [], b""
    for name, (dims, kind, raw) in tensors.items():
        infos.append(tensor(name, dims, TENSOR_TYPES[kind][0], len(data)))
        data += raw + b"\0" * (-len(raw) % alignment)
    return container([kv(key, kind, value) for key, (kind, value) in keys.items()], infos, data, alignment=alignment)


def tiny_gguf_bytes(quant: str = "F32", *, vocab_only: bool = False, hidden: int | None = None, **sizes: int) -> bytes:
    """A valid model of the llama architecture: 271 tokens (byte-level BPE), 2 layers, untied head, a chat template."""
    hidden = hidden or (256 if quant == "Q4_K" else 64)
    layers = sizes.get("layers", 2)
    tokens = vocabulary()
    keys = tiny_keys(tokens, hidden=hidden, layers=layers, context=sizes.get("context", 256))
    tensors = {} if vocab_only else tiny_tensors(len(tokens), quant, hidden=hidden, layers=layers)
    return assemble(keys, tensors)


def tiny_gguf(path: Path, quant: str = "F32", **options: Any) -> Path:
    """Write `tiny_gguf_bytes` to `path`. quant: F32, F16, Q8_0, Q4_0, Q4_1 or Q4_K; layers=, context=, hidden=."""
    path.write_bytes(tiny_gguf_bytes(quant, **options))
    return path


def safetensors_bytes(
    tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None = None
) -> bytes:
    """A safetensors file from name -> (dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return framed(json.dumps(header).encode(), data)


def framed(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file from a raw header; the length may lie."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tiny_hf_tensors(
    hidden: int = 64, layers: int = 2, vocab: int | None = None
) -> dict[str, tuple[str, list[int], bytes]]:
    """The tiny llama's tensors under their Hugging Face names, F32."""
    draw = np.random.default_rng(0)
    vocab = vocab or len(vocabulary())
    shapes: dict[str, list[int]] = {"model.embed_tokens": [vocab, hidden]}
    for layer in range(layers):
        for name, n, k in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", hidden // 2, hidden),
            ("self_attn.v_proj", hidden // 2, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", 2 * hidden, hidden),
            ("mlp.up_proj", 2 * hidden, hidden),
            ("mlp.down_proj", hidden, 2 * hidden),
        ):
            shapes[f"model.layers.{layer}.{name}"] = [n, k]
        shapes[f"model.layers.{layer}.input_layernorm"] = [hidden]
        shapes[f"model.layers.{layer}.post_attention_layernorm"] = [hidden]
    shapes |= {"model.norm": [hidden], "lm_head": [vocab, hidden]}
    tensors = {}
    for name, shape in shapes.items():
        values = draw.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) == 2 else np.ones(shape)
        tensors[f"{name}.weight"] = ("F32", shape, values.astype("<f4").tobytes())
    return tensors


def tiny_config(hidden: int = 64, layers: int = 2, **changes: Any) -> dict[str, Any]:
    """config.json of the tiny llama; a change to None removes the key."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(vocabulary()),
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return {key: value for key, value in {**config, **changes}.items() if value is not None}


def tokenizer_json() -> dict[str, Any]:
    """tokenizer.json of the tiny vocabulary: byte-level BPE, three special tokens."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": name, **special} for index, name in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: index for index, name in enumerate(vocabulary())},
            "merges": [merge.split(" ") for merge in MERGES],
        },
    }


def tiny_safetensors(folder: Path, *, shards: int = 1, hidden: int = 64, layers: int = 2, **changes: Any) -> Path:
    """Write a whole model folder: weights (sharded with an index for shards > 1), config, tokenizer, template."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tiny_hf_tensors(hidden, layers)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    else:
        names, weight_map = list(tensors), {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[shard::shards]}
            weight_map.update(dict.fromkeys(part, file))
            (folder / file).write_bytes(safetensors_bytes(part))
        index = {"metadata": {"total_size": sum(len(raw) for _, _, raw in tensors.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(tiny_config(hidden, layers, **changes)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    settings = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def as_read(metadata: dict[str, Any]) -> dict[str, Any]:
    """Lists as the GGUF reader hands them over: of bytes, or numpy arrays."""
    return {key: _as_read(value) if isinstance(value, list) else value for key, value in metadata.items()}


def _as_read(values: list[Any]) -> Any:
    if all(isinstance(value, str | bytes) for value in values):
        return [value.encode() if isinstance(value, str) else value for value in values]
    return np.array(values, np.float32 if any(isinstance(value, float) for value in values) else np.int32)


def gguf_checkpoint(metadata: dict[str, Any]) -> Checkpoint:
    """A GGUF file that has only these keys."""
    return Checkpoint(Path("tiny.gguf"), "gguf", {}, {}, as_read(metadata))


def tiny_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A LoRA adapter of all linear modules of a model, in PEFT's format; random, and strong enough to be noticed."""
    import json

    import torch
    from safetensors.torch import save_file

    from localllm.models.architectures import open_model
    from localllm.models.architectures.facts import linear_shapes

    with open_model(model) as checkpoint:
        facts = checkpoint.facts
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    tensors = {}
    for index, layer in enumerate(facts.layers):
        for module, (rows, inputs) in linear_shapes(layer, facts.hidden_size).items():
            start = f"base_model.model.model.layers.{index}.{module}."
            tensors[f"{start}lora_A.weight"] = torch.randn(2, inputs)
            tensors[f"{start}lora_B.weight"] = torch.randn(rows, 2)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    return folder
