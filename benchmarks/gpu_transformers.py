"""Decoding speed of `transformers` on the same GPU, with random weights in the same shapes."""

from __future__ import annotations

import statistics
import time

import gpu_models
import torch
from gpu_place import Place


def decode_tps(size: str, batch: int, ctx: int, place: Place) -> float:
    """Tokens per second of all `batch` sequences at `ctx` tokens: bfloat16, SDPA attention, its dynamic cache."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    hidden, inner, layers, heads, kv_heads, tied = gpu_models.SIZES[size]
    device, tokens = place.device, place.sizes.steps
    config = Qwen3Config(
        vocab_size=gpu_models.vocab_size(size),
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=gpu_models.head_dim(size),
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to_empty(device=device).eval()
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.normal_(0, gpu_models.STD) if parameter.dim() > 1 else parameter.fill_(1.0)
        for module in model.modules():  # buffers of an empty model are uninitialized: recompute RoPE's frequencies
            if hasattr(module, "inv_freq") and hasattr(module, "rope_init_fn"):
                module.inv_freq.copy_(module.rope_init_fn(config, device)[0])
        ids = torch.randint(3, config.vocab_size, (batch, ctx), device=device)
        cache = None
        for start in range(0, ctx, 1024):
            out = model(ids[:, start : start + 1024], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        rounds = []
        for _ in range(3):
            place.wait()
            started = time.perf_counter()
            for _ in range(tokens // 3):
                out = model(token, past_key_values=cache, use_cache=True)
                cache, token = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            place.wait()
            rounds.append((time.perf_counter() - started) / (tokens // 3))
    del model, cache, out
    place.free()
    return batch / statistics.median(rounds)
