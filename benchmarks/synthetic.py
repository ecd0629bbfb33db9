"""Random models in any GGUF block type: small ones for types that no real model at hand is stored in, and real shapes.

Every matrix holds random codes under scales that keep activations and logits about as large as real models have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 3, 4, 2, 64, 1024
# block types that the CPU kernels take
TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "BF16", "F16"),
)
MANY = 1 << 24  # weights of a matrix whose blocks are random codes: quantizing them would take minutes
LOGIT_SCALE = 2.5  # standard deviation of the logits: a real model is about as sure of its next token


class Shape(NamedTuple):
    """Sizes of a llama or a qwen3."""

    hidden: int = HIDDEN
    intermediate: int = INTERMEDIATE
    layers: int = LAYERS
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    arch: str = "llama"
    tied: bool = False  # the embedding is the output matrix
    context: int = 4096


REAL = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, "qwen3", True, 32_768),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 128, "qwen3", True, 32_768),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, "qwen3", True, 32_768),
    "qwen3-8b": Shape(4096, 12_288, 36, 32, 8, 128, "qwen3", False, 32_768),
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 64, "llama", True, 32_768),
}


def write_model(
    path: Path, block_type: str, seed: int = 0, shape: Shape = Shape(), vocabulary_of: Path | None = None
) -> Path:
    """A model of some three million weights, its matrices random blocks of `block_type`.

    block_type      or "Q4_K_M": Q4_K with Q6_K where llama.cpp's mixture has it
    shape           other sizes
    vocabulary_of   a GGUF file whose tokenizer it has
    """
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab = add_vocabulary(writer, vocabulary_of)
    mixed = block_type == "Q4_K_M"
    usual, better = ("Q4_K", "Q6_K") if mixed else (block_type, block_type)

    def matrix(name: str, rows: int, columns: int, size: float = 1.0, kind: str = usual) -> None:
        values = blocks(random, kind, rows, columns, size * columns**-0.5)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=gguf.GGMLQuantizationType[kind])

    def norm(name: str, width: int = shape.hidden) -> None:
        weight = random.uniform(0.5, 1.5, width).astype(np.float32)
        weight[:4] *= 8  # outlier channels, as trained models have them
        writer.add_tensor(f"{name}.weight", weight)

    # as large as an embedding, or as small as an output matrix
    matrix("token_embd", vocab, shape.hidden, LOGIT_SCALE if shape.tied else 16.0, better)
    for layer in range(shape.layers):
        base, eighth = f"blk.{layer}", shape.layers // 8
        more = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
        norm(f"{base}.attn_norm")
        matrix(f"{base}.attn_q", shape.heads * shape.head_dim, shape.hidden)
        matrix(f"{base}.attn_k", shape.kv_heads * shape.head_dim, shape.hidden)
        matrix(f"{base}.attn_v", shape.kv_heads * shape.head_dim, shape.hidden, kind=better if more else usual)
        matrix(f"{base}.attn_output", shape.hidden, shape.heads * shape.head_dim)
        norm(f"{base}.ffn_norm")
        matrix(f"{base}.ffn_gate", shape.intermediate, shape.hidden)
        matrix(f"{base}.ffn_up", shape.intermediate, shape.hidden)
        matrix(f"{base}.ffn_down", shape.hidden, shape.intermediate, kind=better if more else usual)
        if shape.arch == "qwen3":
            norm(f"{base}.attn_q_norm", shape.head_dim)
            norm(f"{base}.attn_k_norm", shape.head_dim)
    norm("output_norm")
    if not shape.tied:
        matrix("output", vocab, shape.hidden, LOGIT_SCALE, better)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter, source: Path | None) -> int:
    """Made-up tokens, or those of a file; how many."""
    if source is None:
        writer.add_vocab_size(VOCAB)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, VOCAB))])
        writer.add_token_scores([-float(i) for i in range(VOCAB)])
        writer.add_token_types([2, 3, 3, *[1] * (VOCAB - 3)])
        return VOCAB
    fields = gguf.GGUFReader(source).fields
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    count = len(fields["tokenizer.ggml.tokens"].data)
    writer.add_vocab_size(count)
    return count


def blocks(random: np.random.Generator, block_type: str, rows: int, columns: int, deviation: float) -> np.ndarray:
    """Rows of blocks whose values lie around zero with about this standard deviation."""
    stored = gguf.GGMLQuantizationType[block_type]
    if rows * columns < MANY:
        wanted = (random.standard_normal((rows, columns)) * deviation).astype(np.float32)
        try:
            return gguf.quants.quantize(wanted, stored)
        except NotImplementedError:  # random codes, then
            pass
    elements, size = gguf.GGML_QUANT_SIZES[stored]
    data = random.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    if block_type == "NVFP4":  # E4M3 scales: a number's magnitude moves them by eight steps a power of two
        middle = 64 + round(8 * np.log2(deviation / 7.0))
        data[:, :, :4] = np.clip(random.integers(middle - 8, middle + 8, (rows, columns // elements, 4)), 1, 126)
        return data.reshape(rows, -1)
    scales = random.uniform(0.5, 1.5, (rows, columns // elements, 1))

    def with_scales(factor: float) -> np.ndarray:
        for at, centre in SCALES.get(block_type, ((0, 1.0),)):
            data[:, :, at : at + 2] = (scales * centre * factor).astype(np.float16).view(np.uint8)
        return data.reshape(rows, -1)

    found = gguf.quants.dequantize(with_scales(1.0)[:64], stored)
    return with_scales(deviation / float(found.std()))


# where a block's float16 scales lie, and what centres its values: scale of the codes, then that of the mins
SCALES = {
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "Q3_K": ((108, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
}
