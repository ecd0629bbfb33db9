"""What a Ling 2.0 checkpoint has, of GLM-4.5, which transformers knows."""

from __future__ import annotations

import torch
from torch import Tensor


def as_ling2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of GLM-4.5 under the names of Ling 2.0, with queries, keys and values in one module."""
    words = {
        "embed_tokens": "word_embeddings",
        "self_attn.o_proj": "attention.dense",
        "shared_head.norm": "final_layernorm",
    }
    words |= {f"self_attn.{part[0]}_norm": f"attention.{part}_layernorm" for part in ("query", "key")}
    words |= {"gate.e_score_correction_bias": "gate.expert_bias"}
    found = {}
    for name, tensor in tensors.items():
        start, part, _ = name.partition("self_attn.q_proj")
        if part:
            rows = [tensors[f"{start}self_attn.{kind}_proj.weight"] for kind in "qkv"]
            found[f"{start}attention.query_key_value.weight"] = torch.cat(rows)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            for theirs, ours in words.items():
                name = name.replace(theirs, ours)
            found[name] = tensor
    return found
