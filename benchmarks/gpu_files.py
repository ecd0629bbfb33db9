"""A checkpoint of random W4A16 weights on disk, and the time from a process's start to a first token from it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import gpu_models
import torch

from localllm.models.architectures.facts import linear_shapes
from localllm.quant.encode import Target
from localllm.quant.export import configuration, tensors


def write_checkpoint(folder: Path, size: str, device: str) -> int:
    """Qwen3 of a size in compressed-tensors' int4 layout, a file per four layers; its bytes."""
    from safetensors.torch import save_file

    facts = gpu_models.facts_of(size, "int4")
    place = torch.device(device)
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}

    def save(name: str, found: dict[str, torch.Tensor]) -> None:
        save_file({key: tensor.contiguous().cpu() for key, tensor in found.items()}, folder / name)
        places.update(dict.fromkeys(found, name))

    hidden, dim = facts.hidden_size, facts.head_dim
    table = (facts.vocab_size, hidden)
    names = ["model.embed_tokens"] + ([] if facts.tied_embeddings else ["lm_head"])
    found = {f"{name}.weight": gpu_models.random_weight("bf16", table, place).qweight for name in names}
    save("model-tables.safetensors", found | {"model.norm.weight": torch.ones(hidden).bfloat16()})
    pending: dict[str, torch.Tensor] = {}
    for index in range(facts.num_layers):
        base = f"model.layers.{index}."
        for name, shape in linear_shapes(facts.layers[index], hidden).items():
            weight = gpu_models.random_weight("int4", shape, place)
            pending |= {f"{base}{name}.{suffix}": part for suffix, part in tensors(weight).items()}
        for name, width in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            pending[f"{base}{name}.weight"] = torch.ones(width).bfloat16()
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            pending[f"{base}{name}.weight"] = torch.ones(dim).bfloat16()
        if index % 4 == 3 or index == facts.num_layers - 1:
            save(f"model-{index:03}.safetensors", pending)
            pending = {}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": facts.intermediate_size,
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": dim,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_context,
        "rms_norm_eps": facts.rms_norm_eps,
        "rope_theta": facts.ropes[0].theta,
        "hidden_act": "silu",
        "tie_word_embeddings": facts.tied_embeddings,
        "torch_dtype": "bfloat16",
        "quantization_config": configuration(Target("int4-sym", gpu_models.INT4_GROUP), ["lm_head"]),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def first_token(folder: Path, device: str, kv: str, started: float) -> dict[str, float]:
    """Load, make pages and graphs, read a short prompt: seconds since `started` (time.time) at each stage."""
    stages = {"imports": time.time() - started}
    from gpu_rows import Bench

    from localllm.config import EngineOptions
    from localllm.device import machine
    from localllm.kernels.cpu.build import cache_folder
    from localllm.kernels.verify.records import Records, identity
    from localllm.kernels.verify.selftest import SelfTest
    from localllm.models.architectures import open_model
    from localllm.models.loader import LoadOptions, load_model
    from localllm.plan.planner import Planner

    facts_of_machine = machine()
    with open_model(folder) as checkpoint:
        options = EngineOptions(device=device, kv=kv, ctx=8192, quant="")
        made = Planner(facts_of_machine, options).plan(checkpoint.facts)
        test = SelfTest(Records("selftest", identity(device, facts_of_machine.driver), cache_folder()))
        load = LoadOptions(made.device, made.dtype, kv, deterministic=False, selftest=test)
        model = load_model(checkpoint, load)
    stages["weights"] = time.time() - started
    bench = Bench(model, facts_of_machine, kv, 8192, 4, device)
    stages["graphs"] = time.time() - started
    bench.answer(32, 2)
    stages["first_token"] = time.time() - started
    bench.close()
    return stages
