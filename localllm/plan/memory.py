"""The plan's arithmetic: bytes of weights, pages and work, term by term. Pure; no choice is made here.

`engine.proof` runs the worst steps and compares what they took with these terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.models.architectures.facts import cache_layers, count_linear_params, kv_bytes_per_token

if TYPE_CHECKING:
    from localllm.models.architectures.facts import ModelFacts

MIB = 1 << 20
HOST_BYTES = 150 * MIB
"""Python, torch and the engine imported: 147 MiB with torch 2.13 for the CPU"""
CUDA_HOST_BYTES = 350 * MIB
"""the same with a torch that was built with CUDA"""
TOKEN_BYTES = 550
"""of the tokenizer for each token of the vocabulary: 36 MiB for 49,152 (smollm2), 134 MiB for 262,144 (gemma3)"""
CONTEXT_BYTES = 600 * MIB
"""a CUDA context, loaded kernels and library workspaces, which torch's allocator does not count"""
GRAPH_BYTES = 8 * MIB
"""what the driver keeps of one captured decode step beside the memory its tensors take"""
DECODE_SPLITS = 129
"""most pieces that decode attention cuts a sequence into (`kernels.triton.attention_tiles`), summed up afterwards"""
SPLIT_PART_BYTES = 64 * MIB
"""most results of pieces held at once where prompts go through the decode kernels, too (`triton_invariant`)"""
SAMPLED_BYTES = 4 * 2048 * 8
"""of a row's cuts while it is sampled on a GPU: `kernels.triton.sampling`"""
WISH_BYTES = 320 * 8
"""of a row's biases: `kernels.sampling.SamplingInputs`"""
INT4_FORMATS = ("Q4_0", "Q4_1", "awq", "gptq", "compressed-tensors")
DENSE_FORMATS = {"bf16": 2, "fp16": 2, "f16": 2, "f32": 4, "BF16": 2, "F16": 2, "F32": 4}
"""stored formats of plain numbers -> bytes each"""
QUANTISED_EMBEDDING = 34 / 32
"""bytes a value of a Q8_0 table: what quantised files keep the embedding in, at most"""
TARGET_BYTES = {
    "int8": 1.0,
    "fp8": 1.0,
    "fp8-block": 1.0,
    "int4": 0.5 + 5 / 64,
    "int4-sym": 0.5 + 4 / 64,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}
"""target of a quantisation -> bytes of a weight with its scales"""
ROPE_BLOCK = 1024
"""positions that a RoPE table grows by"""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that keep the same tokens, in the order of `models.kv_cache.cache_groups`."""

    window: int | None
    page_bytes: int
    needed: int
    """pages one sequence takes at full context"""


def graph_buckets(most: int) -> tuple[int, ...]:
    """Batch sizes that decode steps are captured for: 1, 2, 4, 8, ... and `most` itself."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return tuple(sizes)


def weights_in_use(facts: ModelFacts, device: str, dtype: str, has_compiler: bool, quant: str = "") -> tuple[int, int]:
    """(bytes the loaded weights take, bytes of them that decoding one token reads).

    quant   what linear layers become while loading (a key of TARGET_BYTES); "" keeps them as they are stored

    Our kernels, in C and in Triton, keep the stored bits, and look rows of a tied embedding up in the head; so does
    what takes their place on a card. Without a compiler for the C ones, quantised weights are multiplied as float32
    beside the stored table; int4 goes through torch's own product.
    """
    table = facts.vocab_size * facts.hidden_size
    per_value = facts.weight_bytes / max(1, facts.num_params)
    table_bytes = int(table * (max(per_value, QUANTISED_EMBEDDING) if per_value < 1.6 else per_value))
    tables = 1 if facts.tied_embeddings else 2
    inner = facts.num_params - table * tables
    if quant and (device != "cpu" or has_compiler):
        layers = count_linear_params(facts)
        held = facts.weight_bytes - int(layers * per_value) + int(layers * TARGET_BYTES[quant])
        return held, held - (0 if facts.tied_embeddings else table_bytes)
    if device != "cpu" or has_compiler:
        held = facts.weight_bytes + facts.decoded_bytes
        if device != "cpu" and DENSE_FORMATS.get(facts.stored_format) == 4 and dtype != "float32":
            held, table_bytes = held // 2, table_bytes // 2
        return held, held - (0 if facts.tied_embeddings else table_bytes)
    if not quant and facts.stored_format == "bf16" and dtype == "bfloat16":
        held = facts.weight_bytes + (table_bytes if facts.tied_embeddings else 0)
    elif (quant or facts.stored_format).startswith((*INT4_FORMATS, "int4")):
        held = int(inner * 0.75) + table * 4 + table_bytes
    else:
        held = (inner + table) * 4 + table_bytes
    return held, held - table_bytes


def page_groups(facts: ModelFacts, kv: str, ctx: int, page_size: int, prefill_budget: int) -> tuple[PageGroup, ...]:
    """The cache groups, in the order of `models.kv_cache.cache_groups`: full attention first, then the widest window.

    A window group keeps the window, the chunk being computed, and a page for where both start.
    """
    groups = []
    for layers in cache_layers(facts):
        window = facts.windows[layers[0]]
        page_bytes = page_size * kv_bytes_per_token((facts.layers[layer] for layer in layers), kv)
        tokens = ctx if window is None else min(ctx, window + prefill_budget)
        groups.append(PageGroup(window, page_bytes, -(-tokens // page_size) + 1))
    return tuple(groups)


def activation_bytes(facts: ModelFacts, rows: int, width: int) -> int:
    """The most that a step of `rows` tokens holds of intermediate results of `width` bytes, in a layer's worst moment.

    What is alive while queries and keys are turned, and while the feed-forward layer multiplies: the decoder keeps the
    residual stream, the (last layer's) queries and what attention gave; gate and up lie beside their product.
    """
    hidden, inner = facts.hidden_size, facts.intermediate_size
    q, kv = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    attention = 2 * hidden + 2 * q + (q + 2 * kv) + 2 * q + kv
    mlp = 2 * hidden + 2 * q + 3 * inner
    embedding = hidden * (4 + width)  # rows come out as float32 first
    turned = sum(rope.dim // 2 * 8 for rope in facts.ropes)
    return rows * (max(embedding, width * max(attention, mlp)) + turned)


def rope_bytes(facts: ModelFacts, ctx: int) -> int:
    """Cosines and sines of every position, twice while a table grows."""
    return sum(-(-ctx // ROPE_BLOCK) * ROPE_BLOCK * rope.dim // 2 * 8 * 2 for rope in facts.ropes)


def work_terms(
    facts: ModelFacts,
    device: str,
    ctx: int,
    rows: int,
    max_parallel: int,
    *,
    page_size: int = 16,
    has_compiler: bool = True,
    torch_cuda: bool = False,
    unified: bool = False,
) -> dict[str, int]:
    """What a step holds at most beside weights and pages, by name.

    rows      prompt tokens of a step
    unified   the GPU shares the machine's RAM, so what the process itself takes counts, too
    """
    vocab, windows = facts.vocab_size, len(cache_layers(facts))
    host = (CUDA_HOST_BYTES if torch_cuda else HOST_BYTES) + TOKEN_BYTES * vocab
    if device == "cpu":
        terms = {
            "program": host,
            "activations": activation_bytes(facts, rows, 4) + rope_bytes(facts, ctx),
            "logits": 3 * max_parallel * vocab * 4,
        }
        if not has_compiler:  # the twin of attention gathers keys and values, and holds tiles of scores
            terms["gathered"] = 4 * ctx * facts.num_kv_heads * facts.head_dim * 4 + 16 * MIB
        return terms
    buckets = graph_buckets(max_parallel)
    outputs = sum(size * (vocab * 4 + facts.hidden_size * 2) for size in buckets)
    merged = max_parallel * facts.num_heads * DECODE_SPLITS * (facts.head_dim + 2) * 4
    tables = windows * max_parallel * -(-ctx // page_size) * 4
    decoding = activation_bytes(facts, max_parallel, 2) + merged
    sampled = max_parallel * (vocab * (2 + 4) + SAMPLED_BYTES)  # 16-bit logits, and what sampling makes of them
    wishes = max_parallel * (vocab * 4 + vocab // 8 + WISH_BYTES)  # tokens counted, masks, biases
    terms = {
        "context": CONTEXT_BYTES,
        "activations": activation_bytes(facts, rows, 2) + max(merged, SPLIT_PART_BYTES),
        "logits": decoding + sampled + max_parallel * vocab * 4,
        "graphs": outputs + decoding + sampled + wishes + GRAPH_BYTES * len(buckets),
        "tables": rope_bytes(facts, ctx) + tables,
    }
    if unified:
        terms["program"] = host
    return terms
