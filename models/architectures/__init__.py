"""What a model's files mean, without torch: one file per family, listed in `registry.py` and used by `open_model`.

model = open_model("model.gguf")        a `Checkpoint` with facts, names and stored formats
model.facts.layers[0].mixer.num_heads, model.names.source("model.layers.0.self_attn.q_proj")
"""

from .facts import ModelFacts, kv_bytes_per_token
from .layers import Dense, Experts, LayerFacts, Norms
from .mixers import Attention, GatedDelta, KimiDelta, LatentAttention, Mamba2, RopeFacts, SplitDelta
from .model import OpenModel, open_model

__all__ = [
    "Attention",
    "Dense",
    "Experts",
    "GatedDelta",
    "KimiDelta",
    "LatentAttention",
    "LayerFacts",
    "Mamba2",
    "ModelFacts",
    "Norms",
    "OpenModel",
    "RopeFacts",
    "SplitDelta",
    "kv_bytes_per_token",
    "open_model",
]
