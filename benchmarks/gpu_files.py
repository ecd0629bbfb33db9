"""Models in files: one with random W4A16 weights, one copied in pieces, and the time to a first token."""

from __future__ import annotations

import json
import time
from pathlib import Path

import gpu_models
import torch
from gpu_place import Place
from gpu_rows import Bench

from localllm.kernels.cpu.build import cache_folder
from localllm.kernels.verify.records import Records, identity
from localllm.kernels.verify.selftest import COMPILING_THREADS, SelfTest, compiler
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import linear_shapes
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model
from localllm.quant.encode import Target
from localllm.quant.export import configuration, tensors

PIECE_BYTES = 48 << 20  # with a checkout of 8 MiB, below a copy limit of 64 MiB


STORED = {
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.int32: "I32",
    torch.int64: "I64",
}  # fmt: skip


def save_tensors(found: dict[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file without the safetensors package."""
    header: dict[str, object] = {}
    parts: list[bytes] = []
    end = 0
    for name, tensor in found.items():
        parts.append(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
        begin, end = end, end + len(parts[-1])
        header[name] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(words).to_bytes(8, "little") + words)
        for part in parts:
            out.write(part)


def write_checkpoint(folder: Path, size: str, form: str, place: Place) -> int:
    """Write a Qwen3 in the compressed-tensors layout of int4 or fp8, one file per four layers; return its bytes."""
    facts = gpu_models.facts_of(size, form)
    device = torch.device(place.device)
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}

    def save(name: str, found: dict[str, torch.Tensor]) -> None:
        save_tensors(found, folder / name)
        places.update(dict.fromkeys(found, name))

    hidden, dim = facts.hidden_size, facts.head_dim
    table = (facts.vocab_size, hidden)
    names = ["model.embed_tokens"] + ([] if facts.tied_embeddings else ["lm_head"])
    found = {f"{name}.weight": gpu_models.random_weight("bf16", table, device).qweight for name in names}
    save("model-tables.safetensors", found | {"model.norm.weight": torch.ones(hidden).bfloat16()})
    pending: dict[str, torch.Tensor] = {}
    for index in range(facts.num_layers):
        base = f"model.layers.{index}."
        for name, shape in linear_shapes(facts.layers[index], hidden).items():
            weight = gpu_models.random_weight(form, shape, device)
            pending |= {f"{base}{name}.{suffix}": part for suffix, part in tensors(weight).items()}
        for name, width in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            pending[f"{base}{name}.weight"] = torch.ones(width).bfloat16()
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            pending[f"{base}{name}.weight"] = torch.ones(dim).bfloat16()
        if index % 4 == 3 or index == facts.num_layers - 1:
            save(f"model-{index:03}.safetensors", pending)
            pending = {}
    target = Target("int4-sym", gpu_models.INT4_GROUP) if form == "int4" else Target(form)
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
        "quantization_config": configuration(target, ["lm_head"]),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def load_file(path: Path, place: Place, kv: str, test: SelfTest, deterministic: bool = False) -> Model:
    """Load the model of a file or folder onto the GPU."""
    with open_model(path) as checkpoint:
        options = LoadOptions(place.device, place.dtype, kv, deterministic=deterministic, selftest=test)
        return load_model(checkpoint, options)


def first_token(path: Path, place: Place, kv: str, started: float) -> dict[str, float]:
    """Load, build pages and graphs, prefill a short prompt; seconds since `started` (time.time) at each stage."""
    stages = {"imports": time.time() - started}
    records = Records("selftest", identity(place.device, place.machine().driver), cache_folder())
    test = SelfTest(records, None if place.is_dry else compiler(place.device, COMPILING_THREADS))  # as Boot does
    model = load_file(path, place, kv, test)
    stages["weights"] = time.time() - started
    bench = Bench(model, place, kv, place.sizes.ctx * 2, min(4, place.sizes.batches[-1]))
    stages["graphs"] = time.time() - started
    bench.answer(min(32, place.sizes.ctx), 2)
    stages["first_token"] = time.time() - started
    bench.close()
    return stages


def cut(path: Path, folder: Path, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Cut a file into pieces: NAME.000, NAME.001, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = []
    with path.open("rb") as file:
        while data := file.read(piece_bytes):
            pieces.append(folder / f"{path.name}.{len(pieces):03}")
            pieces[-1].write_bytes(data)
    return pieces


def joined(path: Path) -> Path:
    """Join a folder of pieces into one file next to them, once; a file or a model folder is returned as is."""
    pieces = sorted(path.glob("*.[0-9][0-9][0-9]"))
    if not pieces:
        return path
    whole = pieces[0].with_suffix("")
    if not whole.exists() or whole.stat().st_size != sum(piece.stat().st_size for piece in pieces):
        with whole.open("wb") as file:
            for piece in pieces:
                file.write(piece.read_bytes())
    return whole
