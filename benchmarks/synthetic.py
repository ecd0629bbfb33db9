"""Random models in any GGUF block type: small ones for types without a real model at hand, and real shapes.

Every matrix has random codes with scales that keep activations and logits about as large as in real models.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 3, 4, 2, 64, 1024
# block types with CPU kernels
TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "BF16", "F16"),
)
INDEX_DIM, POOLED = 128, 4
OUT_GROUPS, OUT_RANK = 8, 1024
HYPER_RANK, NGRAM_HEADS, NGRAM_ROWS, NGRAM_LAYER = 320, 16, 1_000_003, 1
MANY = 1 << 24  # from this many weights on a matrix gets random codes: quantizing would take minutes
LOGIT_SCALE = 2.5  # standard deviation of the logits, about that of real models


class Shape(NamedTuple):
    """Dimensions of a llama, a qwen3, a mixture of experts or a hybrid, with latent attention if `latent` is given."""

    hidden: int = HIDDEN
    intermediate: int = INTERMEDIATE
    layers: int = LAYERS
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    arch: str = "llama"
    tied: bool = False  # the embedding is also the output matrix
    context: int = 4096
    experts: int = 0
    top_k: int = 0
    expert_inner: int = 0
    full_every: int = 0  # hybrid: every how many layers have attention; the others are gated delta rules
    key_heads: int = 16
    value_heads: int = 32
    state: int = 128  # inputs of their heads
    latent: int = 0  # elements of a KV latent; the delta rules are then Kimi Delta Attention, with a shared expert
    query_latent: int = 0
    turned: int = 64  # elements of a query with RoPE, if there are latents
    streams: int = 0  # residual streams of hyper-connections, with sparse attention and n-gram embeddings
    value_dim: int = 0  # elements of a value head; 0: head_dim
    mamba_dim: int = 0  # values of a Mamba-2 head; there are `value_heads` of them, in `key_heads` groups


REAL = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, "qwen3", True, 32_768),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 128, "qwen3", True, 32_768),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, "qwen3", True, 32_768),
    "qwen3-8b": Shape(4096, 12_288, 36, 32, 8, 128, "qwen3", False, 32_768),
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 64, "llama", True, 32_768),
    "nanbeige4.2-3b": Shape(3072, 10_752, 22, 48, 8, 128, "nanbeige", False, 32_768),
    "qwen3.5-4b": Shape(2560, 9216, 32, 16, 4, 256, "qwen35", True, 32_768, full_every=4),
    "granite4-h-micro": Shape(
        2048, 8192, 40, 32, 8, 64, "granitehybrid", True, 32_768, key_heads=1, value_heads=64, mamba_dim=64
    ),
    "falcon-h1-0.5b": Shape(
        1024, 2048, 36, 8, 2, 64, "falcon-h1", False, 32_768, key_heads=1, value_heads=24, mamba_dim=64
    ),
    # half of its layers
    "qwen3-30b-a3b": Shape(2048, 6144, 24, 32, 4, 128, "qwen3moe", False, 32_768, 128, 8, 768),
    "ling3-tiny": Shape(
        1536, 4608, 24, 16, 1, 128, "bailingmoe3", False, 32_768, 128, 8, 512, 4, 16, 16, latent=512, query_latent=256
    ),
    # half of its layers
    "kimi-linear-48b-a3b": Shape(
        2304, 9216, 14, 32, 1, 128, "kimi-linear", False, 32_768, 256, 8, 1024, 4, 32, 32, latent=512
    ),
    # a sixth of its layers, and a twentieth of its n-gram table
    "qwen3.8-flash-next": Shape(
        2560, 640, 8, 24, 2, 256, "qwen4exp", False, 32_768, 512, 10, 640, 4, value_heads=48, streams=4
    ),
    # 25 of its 49 layers
    "north-mini-30b-a3b": Shape(2048, 3072, 25, 32, 4, 128, "cohere2moe", True, 32_768, 128, 8, 768),
    # 8 of its 45 layers, a ninth of their experts
    "glm5.3-flash": Shape(
        4096,
        12_288,
        8,
        64,
        1,
        256,
        "glm5-next",
        False,
        32_768,
        32,
        8,
        2048,
        4,
        64,
        64,
        latent=512,
        query_latent=1536,
        turned=0,
        streams=4,
    ),
    # 7 of its 48 layers, a quarter of their experts
    "mimo-v2.5": Shape(4096, 16_384, 7, 64, 4, 192, "mimo2", False, 32_768, 64, 8, 2048, value_dim=128),
    # 6 of its 43 layers, a quarter of their experts
    "deepseek-v4-flash": Shape(
        4096, 2048, 6, 64, 1, 512, "deepseek4", False, 32_768, 64, 6, 2048, query_latent=1024, turned=64, streams=4
    ),
    "gpt-oss-20b": Shape(2880, 2880, 12, 64, 8, 64, "gpt-oss", False, 32_768, 32, 4, 2880),
}


def write_model(
    path: Path, block_type: str, seed: int = 0, shape: Shape = Shape(), vocabulary_of: Path | None = None
) -> Path:
    """Write a model of some three million weights whose matrices are random blocks of `block_type`.

    block_type      or "Q4_K_M": Q4_K, with Q6_K as in llama.cpp's mixture; "MXFP4": experts only, Q8_0 elsewhere
    shape           other sizes
    vocabulary_of   a GGUF file whose tokenizer is copied
    """
    written = _Writer(path, block_type, seed, shape)
    vocab = add_vocabulary(written.file, vocabulary_of)
    written.sizes()
    # scaled as an embedding, or as an output matrix
    written.matrix("token_embd", vocab, shape.hidden, LOGIT_SCALE if shape.tied else 16.0, written.better)
    for layer in range(shape.layers):
        written.layer(layer)
    if shape.arch == "deepseek4":
        wide = shape.streams * shape.hidden
        written.vector("output_hc_fn.weight", shape.streams, wide, deviation=wide**-0.5)
        written.vector("output_hc_base.weight", shape.streams)
        written.file.add_tensor("output_hc_scale.weight", np.ones(1, np.float32))
    if shape.streams and not shape.latent and shape.arch != "deepseek4":
        written.hyper("output_hc", outer=True)
        rows = NGRAM_HEADS * NGRAM_ROWS
        written.matrix("per_layer_token_embd", rows, shape.hidden // NGRAM_HEADS, kind="IQ4_NL", size=16.0)
    else:
        written.norm("output_norm")
    if not shape.tied:
        written.matrix("output", vocab, shape.hidden, LOGIT_SCALE, written.better)
    written.file.write_header_to_file()
    written.file.write_kv_data_to_file()
    written.file.write_tensors_to_file()
    written.file.close()
    return path


class _Writer:
    """Writer of one file."""

    def __init__(self, path: Path, block_type: str, seed: int, shape: Shape) -> None:
        self.file, self.shape = gguf.GGUFWriter(path, shape.arch), shape
        self.random = np.random.default_rng(seed)
        self.usual, self.better = ("Q4_K", "Q6_K") if block_type == "Q4_K_M" else (block_type, block_type)
        self.of_experts = self.usual
        if block_type == "MXFP4" and shape.experts:
            self.usual = self.better = "Q8_0"

    def sizes(self) -> None:
        s, w = self.shape, self.file
        w.add_block_count(s.layers)
        w.add_context_length(s.context)
        w.add_embedding_length(s.hidden)
        w.add_feed_forward_length(s.intermediate)
        w.add_head_count(s.heads)
        if not s.latent:
            uneven = s.value_dim or s.mamba_dim
            w.add_head_count_kv([self.kv_heads(layer) for layer in range(s.layers)] if uneven else s.kv_heads)
            w.add_key_length(s.head_dim)
            w.add_value_length(s.value_dim or s.head_dim)
            turned = (
                s.turned if s.arch == "deepseek4" else s.head_dim // (4 if s.full_every else 3 if s.value_dim else 1)
            )
            w.add_rope_dimension_count(turned)
        w.add_rope_freq_base(10_000.0)
        w.add_layer_norm_rms_eps(1e-5)
        if s.experts:
            w.add_expert_count(s.experts)
            w.add_expert_used_count(s.top_k)
            w.add_expert_feed_forward_length(s.expert_inner)
        if s.arch == "gpt-oss":
            w.add_sliding_window(128)
        if s.arch == "nanbeige":
            w.add_uint32("nanbeige.num_loops", 2)
        if s.arch == "mimo2":
            w.add_sliding_window(128)
            w.add_sliding_window_pattern([self.kv_heads(layer) > s.kv_heads for layer in range(s.layers)])
            w.add_float32("mimo2.attention.value_scale", 0.707)
        if s.arch == "cohere2moe":
            w.add_sliding_window(4096)
            w.add_sliding_window_pattern(4)
            w.add_leading_dense_block_count(1)
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            w.add_logit_scale(1.0)
        if s.arch == "granitehybrid":
            for name, scale in (("embedding", 12.0), ("residual", 0.22), ("attention", 1 / 64), ("logit", 8.0)):
                key = "attention.scale" if name == "attention" else f"{name}_scale"
                w.add_float32(f"{s.arch}.{key}", scale)
            w.add_rope_scaling_finetuned(False)
        if s.latent:
            self.latent_sizes()
        elif s.full_every or s.mamba_dim:
            if s.full_every:
                w.add_full_attention_interval(s.full_every)
                w.add_rope_dimension_sections([s.head_dim // 32 + 3, s.head_dim // 32 + 3, s.head_dim // 32 + 2, 0])
            w.add_ssm_conv_kernel(4)
            w.add_ssm_state_size(s.state)
            w.add_ssm_group_count(s.key_heads)
            w.add_ssm_time_step_rank(s.value_heads)
            w.add_ssm_inner_size(s.value_heads * (s.mamba_dim or s.state))
        if s.arch == "glm5-next":
            self.mixed_sizes()
        elif s.arch == "deepseek4":
            self.compressed_sizes()
        elif s.streams:
            self.stream_sizes()

    def compressed_sizes(self) -> None:
        s, w = self.shape, self.file
        w.add_sliding_window(128)
        w.add_q_lora_rank(s.query_latent)
        w.add_expert_shared_count(1)
        w.add_expert_weights_scale(1.5)
        w.add_expert_weights_norm(True)
        numbers = {"head_count": 64, "key_length": INDEX_DIM, "top_k": 512}
        numbers = {f"attention.indexer.{name}": number for name, number in numbers.items()}
        numbers |= {"hyper_connection.count": s.streams, "hyper_connection.sinkhorn_iterations": 20}
        numbers |= {"attention.output_group_count": OUT_GROUPS, "attention.output_lora_rank": OUT_RANK}
        for name, number in (numbers | {"hash_layer_count": 0, "expert_gating_func": 4}).items():
            w.add_uint32(f"deepseek4.{name}", number)
        w.add_float32("deepseek4.hyper_connection.epsilon", 1e-6)
        w.add_float32("deepseek4.attention.compress_rope_freq_base", 160_000.0)
        w.add_array("deepseek4.attention.compress_ratios", [self.ratio(layer) for layer in range(s.layers)])
        w.add_array("deepseek4.swiglu_clamp_exp", [10.0] * s.layers)

    def ratio(self, layer: int) -> int:
        """Tokens of an entry; as in the real model, but that one layer has none, not two."""
        return 0 if layer == 0 else 4 if layer % 2 else 128

    def compressed_attention(self, base: str, layer: int) -> None:
        s, ratio = self.shape, self.ratio(layer)
        self.matrix(f"{base}.attn_q_a", s.query_latent, s.hidden)
        self.norm(f"{base}.attn_q_a_norm", s.query_latent)
        self.matrix(f"{base}.attn_q_b", s.heads * s.head_dim, s.query_latent)
        self.matrix(f"{base}.attn_kv", s.head_dim, s.hidden)
        self.norm(f"{base}.attn_kv_a_norm", s.head_dim)
        self.matrix(f"{base}.attn_output_a", OUT_GROUPS * OUT_RANK, s.heads * s.head_dim // OUT_GROUPS, kind="Q8_0")
        self.matrix(f"{base}.attn_output_b", s.hidden, OUT_GROUPS * OUT_RANK)
        self.vector(f"{base}.attn_sinks.weight", s.heads)
        for name, width in (("attn", s.head_dim), ("indexer", INDEX_DIM))[: 2 if ratio == 4 else ratio > 0]:
            sets = width * (2 if ratio == 4 else 1)
            for part in ("kv", "gate"):
                self.matrix(f"{base}.{name}_compressor_{part}", sets, s.hidden, kind="Q8_0")
            self.vector(f"{base}.{name}_compressor_ape.weight", ratio, sets)
            self.norm(f"{base}.{name}_compressor_norm", width)
        if ratio == 4:
            self.matrix(f"{base}.indexer.attn_q_b", 64 * INDEX_DIM, s.query_latent)
            self.vector(f"{base}.indexer.proj.weight", 64, s.hidden, deviation=s.hidden**-0.5)

    def mixed_sizes(self) -> None:
        s, w, key = self.shape, self.file, f"{self.shape.arch}."
        numbers = {"head_count": 32, "key_length": INDEX_DIM, "top_k": 2048, "kpool": POOLED}
        numbers = {f"attention.indexer.{name}": number for name, number in numbers.items()}
        numbers |= {"hyper_connection.count": s.streams, "hyper_connection.sinkhorn_iterations": 20}
        for name, number in numbers.items():
            w.add_uint32(key + name, number)
        w.add_float32(f"{key}hyper_connection.epsilon", 1e-6)
        w.add_float32(f"{key}kda.gate_lower_bound", -5.0)
        for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
            w.add_array(key + name, [10.0] * s.layers)

    def mixed(self, base: str) -> None:
        rows, wide = (2 + self.shape.streams) * self.shape.streams, self.shape.streams * self.shape.hidden
        self.vector(f"{base}_fn.weight", rows, wide, deviation=wide**-0.5)
        self.vector(f"{base}_base.weight", rows, deviation=0.5)
        self.file.add_tensor(f"{base}_scale.weight", np.ones(3, np.float32))

    def kv_heads(self, layer: int) -> int:
        """MiMo-V2's windowed layers have twice as many, Granite's Mamba-2 layers none."""
        if self.shape.arch == "granitehybrid":
            return self.shape.kv_heads * (layer % 10 == 5)
        windowed = self.shape.arch == "mimo2" and layer > 0 and layer % 6 != 5
        return self.shape.kv_heads * (2 if windowed else 1)

    def stream_sizes(self) -> None:
        s, w, key = self.shape, self.file, f"{self.shape.arch}."
        numbers = {"hyper_connection.count": s.streams, "hyper_connection.low_rank": HYPER_RANK}
        numbers |= {"attention.indexer.head_count": 4, "attention.indexer.key_length": 128}
        numbers |= {"attention.indexer.top_k": 2048, "ple.ngram_size": 3, "ple.heads_per_ngram": NGRAM_HEADS // 2}
        numbers |= {"ple.conv_kernel": 4, "ple.eos_token_id": 0}
        for name, number in numbers.items():
            w.add_uint32(key + name, number)
        w.add_array(f"{key}attention.compress_ratios", [4 * ((n + 1) % s.full_every == 0) for n in range(s.layers)])
        w.add_array(f"{key}ple.layers", [NGRAM_LAYER])
        w.add_expert_shared_feed_forward_length(s.expert_inner)
        w.add_embedding_length_per_layer_input(s.hidden // NGRAM_HEADS)
        lists = {"layer_multipliers": [23703573157769, 20109073645365, 8052911324071]}
        lists |= {"head_vocab_sizes": [NGRAM_ROWS] * NGRAM_HEADS}
        lists |= {"head_offsets": [NGRAM_ROWS * head for head in range(NGRAM_HEADS)]}
        for name, values in lists.items():
            w.add_key_value(f"{key}ple.{name}", values, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)

    def hyper(self, base: str, *, outer: bool = False) -> None:
        s = self.shape
        wide = s.streams * s.hidden
        self.norm(f"{base}_norm", wide)
        self.matrix(f"{base}_down", HYPER_RANK, wide)
        self.matrix(f"{base}_up", wide, HYPER_RANK, kind="Q8_0")
        if not outer:
            self.vector(f"{base}_inject.weight", s.streams, wide, deviation=wide**-0.5)

    def ngrams(self, base: str) -> None:
        wide = self.shape.streams * self.shape.hidden
        self.matrix(f"{base}.ple_key", wide, self.shape.hidden)
        self.matrix(f"{base}.ple_value", self.shape.hidden, self.shape.hidden)
        for name in ("key", "query", "conv"):
            self.norm(f"{base}.ple_norm_{name}", wide)
        self.vector(f"{base}.ple_conv1d.weight", wide, 4, deviation=0.5)

    def latent_sizes(self) -> None:
        s, w = self.shape, self.file
        w.add_head_count_kv([int((layer + 1) % s.full_every == 0) for layer in range(s.layers)])
        w.add_kv_lora_rank(s.latent)
        if s.query_latent:
            w.add_q_lora_rank(s.query_latent)
        w.add_key_length(s.latent + s.turned)
        w.add_value_length(s.latent)
        w.add_key_length_mla(s.head_dim + s.turned)
        w.add_value_length_mla(s.head_dim)
        w.add_rope_dimension_count(s.turned)
        w.add_ssm_conv_kernel(4)
        w.add_kda_head_dim(s.state)
        w.add_leading_dense_block_count(1)
        w.add_expert_shared_count(1)
        w.add_expert_weights_scale(2.5)
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if s.arch == "bailingmoe3":
            w.add_expert_weights_norm(True)
            w.add_expert_group_count(8)
            w.add_expert_group_used_count(4)
            w.add_float32("bailingmoe3.kda.gate_lower_bound", -5.0)
            w.add_bool("bailingmoe3.kda.safe_gate", True)

    def matrix(self, name: str, rows: int, columns: int, size: float = 1.0, kind: str = "", experts: int = 0) -> None:
        kind = kind or self.usual
        values = blocks(self.random, kind, max(experts, 1) * rows, columns, size * columns**-0.5)
        stored = values.reshape(experts, rows, -1) if experts else values
        self.file.add_tensor(f"{name}.weight", stored, raw_dtype=gguf.GGMLQuantizationType[kind])

    def norm(self, name: str, width: int = 0, *, suffix: bool = True) -> None:
        weight = self.random.uniform(0.5, 1.5, width or self.shape.hidden).astype(np.float32)
        weight[:4] *= 8  # outlier channels, as trained models have them
        self.file.add_tensor(f"{name}.weight" if suffix else name, weight)

    def vector(self, name: str, *dims: int, deviation: float = 0.01) -> None:
        self.file.add_tensor(name, (self.random.standard_normal(dims) * deviation).astype(np.float32))

    def layer(self, layer: int) -> None:
        s, base, eighth = self.shape, f"blk.{layer}", self.shape.layers // 8
        more = layer < eighth or layer >= 7 * s.layers // 8 or (layer - eighth) % 3 == 2
        if s.arch in ("glm5-next", "deepseek4"):
            for block in ("attn", "ffn"):
                self.mixed(f"{base}.hc_{block}")
            self.norm(f"{base}.attn_norm")
        elif s.streams:
            for block in ("attn", "ffn"):
                self.hyper(f"{base}.hc_{block}")
            if layer == NGRAM_LAYER:
                self.ngrams(base)
        else:
            self.norm(f"{base}.attn_norm")
        if s.arch == "falcon-h1":  # beside attention
            self.mamba(base)
        if not self.kv_heads(layer):
            self.mamba(base)
        elif s.full_every and (layer + 1) % s.full_every:
            (self.kimi_delta if s.latent else self.delta_rule)(base)
        elif s.latent:
            self.latent_attention(base)
        elif s.arch == "deepseek4":
            self.compressed_attention(base, layer)
        else:
            self.attention(base, layer, self.better if more else self.usual)
        late = (s.full_every and not s.latent) or s.arch == "gpt-oss"
        if (not s.streams or s.latent or s.arch == "deepseek4") and s.arch != "cohere2moe":
            self.norm(f"{base}.{'post_attention_norm' if late else 'ffn_norm'}", suffix=s.arch != "falcon-h1")
        if s.experts and not (layer == 0 and (s.latent or s.arch in ("cohere2moe", "mimo2"))):
            of_down = self.better if more and self.of_experts == self.usual else self.of_experts
            self.experts(base, "Q5_1" if s.expert_inner % 256 else of_down)
        else:
            self.matrix(f"{base}.ffn_gate", s.intermediate, s.hidden)
            self.matrix(f"{base}.ffn_up", s.intermediate, s.hidden)
            self.matrix(f"{base}.ffn_down", s.hidden, s.intermediate, kind=self.better if more else self.usual)

    def attention(self, base: str, layer: int, of_values: str) -> None:
        s, kv_heads = self.shape, self.kv_heads(layer)
        values = s.value_dim or s.head_dim
        rows = {"q": s.heads * s.head_dim, "k": kv_heads * s.head_dim, "v": kv_heads * values}
        for name, count in rows.items():
            gated = 2 if name == "q" and s.full_every else 1
            self.matrix(f"{base}.attn_{name}", gated * count, s.hidden, kind=of_values if name == "v" else "")
        self.matrix(f"{base}.attn_output", s.hidden, s.heads * values)
        if s.streams:
            for name, count in (("q", 4 * 128), ("k", 128)):
                self.matrix(f"{base}.indexer.{name}_proj", count, s.hidden, kind="Q8_0")
                self.norm(f"{base}.indexer.{name}_norm", 128)
        if s.arch == "gpt-oss":
            for name, count in (rows | {"output": s.hidden}).items():
                self.vector(f"{base}.attn_{name}.bias", count)
            self.vector(f"{base}.attn_sinks.weight", s.heads)
        elif s.arch == "mimo2" and kv_heads > s.kv_heads:
            self.vector(f"{base}.attn_sinks.weight", s.heads)
        elif s.arch not in ("llama", "nanbeige", "cohere2moe", "mimo2", "granitehybrid", "falcon-h1"):
            self.norm(f"{base}.attn_q_norm", s.head_dim)
            self.norm(f"{base}.attn_k_norm", s.head_dim)

    def delta_rule(self, base: str) -> None:
        s = self.shape
        values, inputs = s.value_heads * s.state, (2 * s.key_heads + s.value_heads) * s.state
        self.matrix(f"{base}.attn_qkv", inputs, s.hidden)
        self.matrix(f"{base}.attn_gate", values, s.hidden)
        self.matrix(f"{base}.ssm_alpha", s.value_heads, s.hidden, kind="Q8_0")
        self.matrix(f"{base}.ssm_beta", s.value_heads, s.hidden, kind="Q8_0")
        self.matrix(f"{base}.ssm_out", s.hidden, values)
        self.vector(f"{base}.ssm_conv1d.weight", inputs, 4, deviation=0.5)
        self.vector(f"{base}.ssm_dt.bias", s.value_heads, deviation=1.0)
        self.file.add_tensor(f"{base}.ssm_a", -self.random.uniform(0.5, 8, s.value_heads).astype(np.float32))
        self.norm(f"{base}.ssm_norm", s.state)

    def mamba(self, base: str) -> None:
        s = self.shape
        inner, shared = s.value_heads * s.mamba_dim, 2 * s.key_heads * s.state
        self.matrix(f"{base}.ssm_in", 2 * inner + shared + s.value_heads, s.hidden)
        self.matrix(f"{base}.ssm_out", s.hidden, inner)
        self.vector(f"{base}.ssm_conv1d.weight", inner + shared, 4, deviation=0.5)
        self.vector(f"{base}.ssm_conv1d.bias", inner + shared, deviation=0.1)
        self.vector(f"{base}.ssm_dt.bias", s.value_heads, deviation=1.0)
        self.file.add_tensor(f"{base}.ssm_a", -self.random.uniform(0.5, 8, (s.value_heads, 1)).astype(np.float32))
        self.vector(f"{base}.ssm_d", s.value_heads, 1, deviation=1.0)
        if s.arch != "falcon-h1":
            self.file.add_tensor(f"{base}.ssm_norm.weight", np.ones((s.key_heads, inner // s.key_heads), np.float32))

    def latent_attention(self, base: str) -> None:
        s = self.shape
        rows = s.heads * (s.head_dim + s.turned)
        if s.query_latent:
            self.matrix(f"{base}.attn_q_a", s.query_latent, s.hidden)
            self.norm(f"{base}.attn_q_a_norm", s.query_latent)
            self.matrix(f"{base}.attn_q_b", rows, s.query_latent)
        else:
            self.matrix(f"{base}.attn_q", rows, s.hidden)
        self.matrix(f"{base}.attn_kv_a_mqa", s.latent + s.turned, s.hidden, kind="Q8_0")
        self.norm(f"{base}.attn_kv_a_norm", s.latent)
        self.matrix(f"{base}.attn_k_b", s.latent, s.head_dim, kind="Q8_0", experts=s.heads)
        self.matrix(f"{base}.attn_v_b", s.head_dim, s.latent, kind="Q8_0", experts=s.heads)
        self.matrix(f"{base}.attn_output", s.hidden, s.heads * s.head_dim)
        if s.arch == "bailingmoe3":
            self.matrix(f"{base}.attn_gate", s.heads, s.hidden, kind="Q8_0")
        if s.arch == "glm5-next":
            self.matrix(f"{base}.indexer.attn_q_b", 32 * INDEX_DIM, s.query_latent)
            self.matrix(f"{base}.indexer.attn_k", INDEX_DIM, s.hidden)
            self.vector(f"{base}.indexer.proj.weight", 32, s.hidden, deviation=s.hidden**-0.5)
            self.norm(f"{base}.indexer.k_norm", INDEX_DIM)
            self.vector(f"{base}.indexer.k_norm.bias", INDEX_DIM)
            self.vector(f"{base}.indexer_compressor_gate.weight", INDEX_DIM, s.hidden, deviation=s.hidden**-0.5)
            self.vector(f"{base}.indexer_compressor_ape.weight", POOLED, INDEX_DIM)

    def kimi_delta(self, base: str) -> None:
        s = self.shape
        inner, ling = s.value_heads * s.state, s.arch == "bailingmoe3"
        for name in "qkv":
            self.matrix(f"{base}.attn_{name}", inner, s.hidden)
            self.vector(f"{base}.ssm_conv1d_{name}.weight", 1, inner, 1, 4, deviation=0.5)
        for name in "fg":
            self.matrix(f"{base}.ssm_{name}_a", inner if ling else s.state, s.hidden)
            if not ling:
                self.matrix(f"{base}.ssm_{name}_b", inner, s.state, kind="Q8_0")
        self.matrix(f"{base}.ssm_beta", s.value_heads, s.hidden, kind="Q8_0")
        rates = self.random.uniform(0.5, 8, (s.value_heads, 1)[: 1 + (s.arch != "glm5-next")]).astype(np.float32)
        self.file.add_tensor(f"{base}.ssm_a", rates if ling else -rates)
        self.vector(f"{base}.ssm_dt.bias", inner, deviation=1.0)
        self.norm(f"{base}.ssm_norm", s.state)
        self.matrix(f"{base}.attn_output", s.hidden, inner)

    def experts(self, base: str, of_down: str) -> None:
        s = self.shape
        self.vector(f"{base}.ffn_gate_inp.weight", s.experts, s.hidden, deviation=s.hidden**-0.5)
        for name in ("gate", "up"):
            self.matrix(f"{base}.ffn_{name}_exps", s.expert_inner, s.hidden, kind=self.of_experts, experts=s.experts)
        self.matrix(f"{base}.ffn_down_exps", s.hidden, s.expert_inner, kind=of_down, experts=s.experts)
        if s.streams and not s.latent and s.arch != "deepseek4":
            self.vector(f"{base}.ffn_gate_inp_shexp.weight", s.hidden, deviation=s.hidden**-0.5)
        if s.latent or s.arch in ("mimo2", "deepseek4"):
            self.vector(f"{base}.exp_probs_b.bias", s.experts)
        if s.latent or s.streams:
            for name, shape in (("gate", (s.expert_inner, s.hidden)), ("up", (s.expert_inner, s.hidden))):
                self.matrix(f"{base}.ffn_{name}_shexp", *shape)
            self.matrix(f"{base}.ffn_down_shexp", s.hidden, s.expert_inner, kind=of_down)
        if s.arch == "gpt-oss":
            self.vector(f"{base}.ffn_gate_inp.bias", s.experts)
            for name, rows in (("gate", s.expert_inner), ("up", s.expert_inner), ("down", s.hidden)):
                self.vector(f"{base}.ffn_{name}_exps.bias", s.experts, rows)


def add_vocabulary(writer: gguf.GGUFWriter, source: Path | None) -> int:
    """Add made-up tokens, or those of a file; return their number."""
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
    """Return rows of blocks with values around zero and about this standard deviation."""
    stored = gguf.GGMLQuantizationType[block_type]
    if rows * columns < MANY:
        wanted = (random.standard_normal((rows, columns)) * deviation).astype(np.float32)
        try:
            return gguf.quants.quantize(wanted, stored)
        except NotImplementedError:  # use random codes instead
            pass
    elements, size = gguf.GGML_QUANT_SIZES[stored]
    data = random.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    if block_type == "NVFP4":  # E4M3 scales: eight steps per power of two
        middle = 64 + round(8 * np.log2(deviation / 7.0))
        data[:, :, :4] = np.clip(random.integers(middle - 8, middle + 8, (rows, columns // elements, 4)), 1, 126)
        return data.reshape(rows, -1)
    if block_type == "MXFP4":  # scales are powers of two
        middle = 127 + round(np.log2(deviation / 3.0))
        data[:, :, 0] = random.integers(middle - 1, middle + 2, (rows, columns // elements))
        return data.reshape(rows, -1)
    scales = random.uniform(0.5, 1.5, (rows, columns // elements, 1))

    def with_scales(factor: float) -> np.ndarray:
        for at, centre in SCALES.get(block_type, ((0, 1.0),)):
            data[:, :, at : at + 2] = (scales * centre * factor).astype(np.float16).view(np.uint8)
        return data.reshape(rows, -1)

    found = gguf.quants.dequantize(with_scales(1.0)[:64], stored)
    return with_scales(deviation / float(found.std()))


# positions of a block's float16 scales, and factors that centre its values: scale of the codes, then of the mins
SCALES = {
    "Q4_1": ((0, 1.0), (2, -7.5)),
    "Q5_1": ((0, 1.0), (2, -15.5)),
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "Q3_K": ((108, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
}
