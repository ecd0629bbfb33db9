"""What a model is, in numbers: `ModelFacts`, from config.json or GGUF metadata, checked against limits and tensors.

No torch, no weights: plan, listing and loader all decide on these values. `hf_facts.py` and `gguf_facts.py` fill
them in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
RUNNABLE = "Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3, Gemma 3 (text)"
"""What this version runs, in the words people know the families by."""

KV_BYTES = {"f32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class RopeFacts:
    """Rotary positions of one kind of layer: inv_freq = theta^(-2j/dim), changed by `scaling`."""

    theta: float
    dim: int
    """Rotated elements of a head, even; the rest passes through."""
    scaling: str = "none"
    """none | linear (positions / factor) | llama3 | yarn | factors (inv_freq / tensor)"""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    """Tokens the model was trained on before scaling (llama3, yarn), else 0."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn); already worked out from the factor."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    interleaved: bool = False
    """True: pairs (2j, 2j + 1), GGUF of the llama family, whose Q and K rows are permuted; else (j, j + dim/2)."""
    factors_tensor: str | None = None
    """Name of the stored tensor [dim/2] that divides inv_freq; then no other scaling applies."""
    truncate: bool = True
    """yarn: whether the ramp's ends are rounded to whole dimensions."""


@dataclass(frozen=True)
class ModelFacts:
    """One model's hyper-parameters, within the limits of `limits.py`; and what its files say about using it."""

    architecture: str
    """Canonical: one of ARCHITECTURES."""
    source_architecture: str
    """As the file names it: LlamaForCausalLM, mistral, llama, ..."""
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding."""
    max_context: int
    """Tokens."""
    rms_norm_eps: float
    rope: RopeFacts
    hidden_act: str = "silu"
    """silu | gelu_tanh"""
    attention_bias: bool = False
    """Biases on q, k and v."""
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    """Added to every RMSNorm weight at load: 1.0 for Gemma's safetensors, 0.0 elsewhere (GGUF has it baked in)."""
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    tied_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    """Per layer: a query sees this many positions, itself included; None = all."""
    local_rope: RopeFacts | None = None
    """Used by the windowed layers when present (Gemma 3)."""
    post_norms: bool = False
    """Gemma: a second norm behind attention and behind the MLP."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    """temperature, top_k, top_p, min_p, as far as the files recommend them."""
    has_chat_template: bool = False
    licence: str = ""
    stored_format: str = ""
    """Q4_1, Q4_K_M, bf16, awq, gptq, nvfp4, fp8, ..."""
    num_params: int = 0
    weight_bytes: int = 0
    """Stored bytes of the text model's tensors."""
    decoded_bytes: int = 0
    """What those of them take on top that are decoded to bfloat16 while loading."""


def linear_shapes(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """(N, K) of a layer's linear modules, by canonical name below `model.layers.{i}.`."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    q, kv = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    return {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def norm_shapes(facts: ModelFacts) -> dict[str, tuple[int]]:
    """Shapes of a layer's norm weights, by canonical name below `model.layers.{i}.`."""
    shapes: dict[str, tuple[int]] = {
        "input_layernorm": (facts.hidden_size,),
        "post_attention_layernorm": (facts.hidden_size,),
    }
    if facts.post_norms:
        shapes["pre_feedforward_layernorm"] = shapes["post_feedforward_layernorm"] = (facts.hidden_size,)
    if facts.qk_norm:
        shapes["self_attn.q_norm"] = shapes["self_attn.k_norm"] = (facts.head_dim,)
    return shapes


def count_params(facts: ModelFacts) -> int:
    """Parameters of the text model, a tied head counted once."""
    shapes = linear_shapes(facts)
    layer = sum(n * k for n, k in shapes.values()) + sum(size for (size,) in norm_shapes(facts).values())
    if facts.attention_bias:
        layer += sum(shapes[f"self_attn.{name}_proj"][0] for name in "qkv")
    layer += facts.hidden_size if facts.o_bias else 0
    layer += 2 * facts.intermediate_size + facts.hidden_size if facts.mlp_bias else 0
    embedding = facts.vocab_size * facts.hidden_size
    return facts.num_layers * layer + embedding * (1 if facts.tied_embeddings else 2) + facts.hidden_size


def kv_bytes_per_token(facts: ModelFacts, dtype: str, layers: int | None = None) -> int:
    """KV cache bytes one token takes over `layers` layers (all by default); 8-bit forms keep a float32 scale per head.

    Windowed layers keep only a window's worth of tokens: multiply per group of layers (`facts.windows`).
    """
    head = facts.head_dim * KV_BYTES[dtype] + (4 if dtype in ("int8", "fp8") else 0)
    return 2 * facts.num_kv_heads * head * (facts.num_layers if layers is None else layers)
