"""MiMo-V2: configurations as published, fused projections of GGUF files, and every KV format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from localllm.engine.mtp import HeadDrafter
from localllm.errors import BadModelFile, UnsupportedModel
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model
from localllm.models.predictor import MtpHead
from localllm.request import Request, SamplingParams

from .test_decode_graphs import answers, engine_of, requests
from .test_gguf_models import ARCHITECTURE, gguf_logits
from .test_predictor import Checked, own_logits

SINKS = "self_attn.sinks", "self_attn.attention_sink_bias"


def published(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration under the keys of the hub's files."""
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    ropes = config["rope_parameters"]
    left_out = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "routed_scaling_factor")
    found = {key: value for key, value in config.items() if key not in left_out}
    return found | {
        "hybrid_layer_pattern": [int(one) for one in windowed],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
        "rope_theta": ropes["full_attention"]["rope_theta"],
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": config["rms_norm_eps"],
        "sliding_window": config["sliding_window"] - 1,
        "sliding_window_size": config["sliding_window"] - 1,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": None,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


@pytest.mark.parametrize("model_type", ["mimo_v2_flash", "mimo_v2"])
def test_published_files(model_type: str, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny("mimo"), torch.randint(0, 99, (30,)).tolist()
    tensors = {name.replace(*SINKS): tensor for name, tensor in model.tensors.items()}
    tensors |= {"model.mtp.layers.0.enorm.weight": torch.ones(42), "visual.x.weight": torch.ones(2, 2)}
    config = published(model.config) | {"model_type": model_type}
    folder = replace(model, config=config, tensors=tensors).save(tmp_path)
    with open_model(folder) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True))
    plain = model.config | {"routed_scaling_factor": 1.0}
    with open_model(replace(model, config=plain).save(tmp_path / "plain")) as checkpoint:
        expected = load_model(checkpoint, LoadOptions(exact=True))
    assert ours.facts.layers == expected.facts.layers
    assert torch.equal(paged(ours).all_logits(ids, [20]), paged(expected).all_logits(ids, [20]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"swa_v_head_dim": 12}, "other values in windowed layers"),
        ({"swa_num_attention_heads": 3}, "other query heads in windowed layers"),
        ({"add_full_attention_sink_bias": True}, "sinks in other layers"),
        ({"n_shared_experts": 1}, "shared experts"),
        ({"scoring_func": "softmax"}, "with a router of type noaux_tc over softmax"),
        ({"topk_method": "greedy"}, "with a router of type greedy over sigmoid"),
        ({"hybrid_layer_pattern": [0.0, 1.0, 1.0]}, "hybrid_layer_pattern: must list 0 or 1 for each layer"),
        ({"hybrid_layer_pattern": [0, 1, 2]}, "hybrid_layer_pattern: must list 0 or 1 for each layer"),
        ({"moe_layer_freq": 1}, "moe_layer_freq: must list 0 or 1 for each layer"),
        ({"hybrid_layer_pattern": [0, 1]}, "layer_types: must list"),
        ({"sliding_window_size": 0}, "sliding_window_size: must be 1 to"),
    ],
)
def test_what_it_lacks_is_refused(changes: dict[str, Any], said: str, tiny: Callable, tmp_path: Path) -> None:
    model = tiny("mimo")
    folder = replace(model, config=published(model.config) | changes).save(tmp_path)
    with pytest.raises((BadModelFile, UnsupportedModel), match=said), open_model(folder) as checkpoint:
        assert checkpoint.facts


def test_windows_of_one_token(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny("mimo"), torch.randint(0, 99, (30,)).tolist()
    folder = replace(model, config=model.config | {"sliding_window": 1}).save(tmp_path)
    with open_model(folder) as checkpoint:
        assert set(checkpoint.facts.windows) == {None, 1}
        assert paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [20]).isfinite().all()


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_the_plan_counts_weights_under_other_prefixes(prefix: str, tiny: Callable, tmp_path: Path) -> None:
    model, sizes = tiny("mimo"), []
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in model.tensors.items()}
    for number, tensors in enumerate((model.tensors, renamed)):
        tensors = tensors | {"visual.x.weight": torch.ones(2, 2)}
        with open_model(replace(model, tensors=tensors).save(tmp_path / str(number))) as checkpoint:
            sizes.append(checkpoint.facts.weight_bytes)
    assert sizes[0] == sizes[1] == sum(tensor.nbytes for tensor in model.tensors.values())


def with_head(tiny_of: Callable, model: Any) -> tuple[Any, Callable[[list[int]], torch.Tensor]]:
    """The model with one more layer, which its checkpoint has as the first MTP head; the head's logits."""
    given = {key: value for key, value in model.config.items() if key not in ("model_type", "architectures")}
    lists = {"layer_types": "sliding_attention", "mlp_layer_types": "dense"}
    changes = {key: [*given[key], kind] for key, kind in lists.items()}
    changes |= {"num_hidden_layers": 8, "routed_scaling_factor": 1.0}
    more, draw = tiny_of("mimo_v2_flash", given | changes), torch.Generator().manual_seed(4)
    names = ("enorm", "hnorm", "final_layernorm")
    head = {f"{name}.weight": 1 + 0.2 * torch.randn(42, generator=draw) for name in names}
    head["eh_proj.weight"] = torch.randn(42, 84, generator=draw) * 0.2
    tensors = {name.replace("model.layers.7.", "model.mtp.layers.0."): one for name, one in more.tensors.items()}
    tensors = {name.replace("mtp.layers.0.post_attention_layernorm", "mtp.layers.0.pre_mlp_layernorm"): one
               for name, one in tensors.items()}  # fmt: skip
    tensors = {name.replace(*SINKS): one for name, one in tensors.items()}
    tensors |= {f"model.mtp.layers.0.{name}": one for name, one in head.items()}
    inner, norm = more.reference.model, torch.nn.functional.rms_norm
    layer = inner.layers[7]
    inner.config.num_hidden_layers = 7

    def run(ids: list[int]) -> torch.Tensor:
        positions, eps = torch.arange(len(ids) - 1)[None], model.config["rms_norm_eps"]
        with torch.no_grad():
            hidden = inner(torch.tensor([ids]), use_cache=False).last_hidden_state[0, :-1]
            pair = zip(names, (inner.embed_tokens(torch.tensor(ids[1:])), hidden), strict=False)
            both = torch.cat([norm(part, (42,), head[f"{name}.weight"], eps) for name, part in pair], -1)
            x = (both @ head["eh_proj.weight"].T)[None]
            apart = positions.T - positions
            mask = torch.zeros(apart.shape).masked_fill((apart < 0) | (apart >= 12), float("-inf"))[None, None]
            turned = inner.rotary_emb(x, positions, "sliding_attention")
            x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=turned)
            return more.reference.lm_head(norm(x, (42,), head["final_layernorm.weight"], eps))[0]

    kept = {key: given[key] for key in lists} | {"num_hidden_layers": 7}
    return replace(more, config=published(more.config | kept), tensors=tensors), run


def test_its_mtp_head_predicts_as_transformers_modules_do(
    tiny: Callable, tiny_of: Callable, paged: Any, tmp_path: Path
) -> None:
    one, run = with_head(tiny_of, tiny("mimo"))
    ids = torch.randint(0, 99, (50,)).tolist()
    with open_model(one.save(tmp_path)) as checkpoint:
        assert checkpoint.facts.predictor_flaw == "" and checkpoint.facts.predictor_bytes > 0
        ours = load_model(checkpoint, LoadOptions(exact=True, predictor=True))
    wanted = run(ids)
    found = own_logits(ours, paged, ids, [20, 1, 28])
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4
    expected = answers(engine_of(ours), requests(1))
    engine = engine_of(ours, (1, 2))
    checked = Checked(engine, 3)
    assert answers(engine, requests(1)) == expected and checked.seen
    engine = engine_of(ours, (1, 2))
    engine.runner.listener = HeadDrafter(engine.runner, MtpHead(engine.runner.model, engine.runner.cache, 99), 0.1)
    long = [Request([3, 5], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))]
    assert len(answers(engine, long)[0]) == 90  # nobody asks: the head reads before pages leave the window
    assert engine.runner.listener is not None  # it did not fail


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Queries, keys and values of each layer in one matrix, as V2.5 has them."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            found[name] = tensor
    return found


def test_fused_projections(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny("mimo"), torch.randint(0, 99, (40,)).tolist()
    one = replace(model, tensors=fused(model.tensors))
    rows = gguf_logits(one, paged, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32, ids)
    expected = model.logits(ids)
    assert float((rows - expected).abs().max() / expected.abs().max()) < 1e-4
    folder = one.save(tmp_path / "fused")
    with pytest.raises(UnsupportedModel, match="with fused QKV in this layout"), open_model(folder) as checkpoint:
        assert checkpoint.facts
    assert ARCHITECTURE[model.config["model_type"]] == "mimo2"


E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_blocks(shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 codes, one scale for each block of 128 x 128, and the values they stand for."""
    rows, columns = shard.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = shard[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
            scales[row, column] = block.abs().max() / 448
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (shard / wide).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def as_published(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors as in V2.6 (fused projections in shards of FP8 blocks, MXFP4 experts), and what they stand for."""
    stored, plain = dict(model.tensors), dict(model.tensors)
    draw, shards = torch.Generator().manual_seed(3), model.config["num_key_value_heads"]
    for name in model.tensors:
        if name.endswith("q_proj.weight"):
            names = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
            parts = [stored.pop(one).chunk(shards) for one in names]
            made = [in_blocks(torch.cat(shard)) for shard in zip(*parts, strict=True)]
            fused = name.replace("q_proj", "qkv_proj")
            stored[fused] = torch.cat([codes for codes, _, _ in made])
            stored[f"{fused}_scale_inv"] = torch.cat([scales for _, scales, _ in made])
            sizes = [part[0].shape[0] for part in parts]
            whole = zip(*(values.split(sizes) for _, _, values in made), strict=True)
            plain |= {one: torch.cat(values) for one, values in zip(names, whole, strict=True)}
        elif ".experts." in name:
            count, rows, k = stored.pop(name).shape
            start, kinds = name.rpartition(".")[0], name.rpartition(".")[2].removesuffix("_proj").split("_")
            for expert, kind in product(range(count), kinds):
                n, one = rows // len(kinds), f"{start}.{expert}.{kind}_proj.weight"
                codes = torch.randint(0, 256, (n, k // 2), generator=draw, dtype=torch.uint8)
                scales = torch.randint(122, 125, (n, k // 32), generator=draw, dtype=torch.uint8)
                stored |= {one: codes, f"{one}_scale": scales}
                numbers = E2M1[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(1)
                plain[one] = numbers * torch.ldexp(torch.ones(n, k // 32), scales.int() - 127).repeat_interleave(32, 1)
            del plain[name]
    return stored, plain


def test_projections_in_shards_and_experts_of_four_bits(tiny_of: Callable, paged: Any, tmp_path: Path) -> None:
    """A layer without a window has rows of keys and values that do not begin with a block; its file is V2.6's."""
    kinds = [f"{kind}_attention" for kind in ("full", "sliding", "full")]
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334}
    model = tiny_of(
        "mimo_v2_flash",
        {"vocab_size": 99, "hidden_size": 192, "intermediate_size": 64, "moe_intermediate_size": 64}
        | {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "n_routed_experts": 5}
        | {"num_experts_per_tok": 2, "layer_types": kinds, "sliding_window": 12, "max_position_embeddings": 256}
        | {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), rope)},
    )
    config, ids = published(model.config), torch.randint(0, 99, (40,)).tolist()
    stored, plain = as_published(model)
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "store_dtype": "mxfp4"}
    changes = {"model_type": "mimo_v2", "attention_projection_layout": "fused_qkv", "quantization_config": quantized}
    own = [name for name in stored if "1.self_attn" in name]
    head = {name.replace("layers.1.", "mtp.layers.0."): stored[name].clone() for name in own}
    folder = replace(model, config=config | changes, tensors=stored | head).save(tmp_path / "stored")
    with open_model(folder) as checkpoint:
        assert checkpoint.formats["model.mtp.layers.0.self_attn.k_proj"].params == {"scale": "weight_scale_inv"}
        assert checkpoint.formats["model.layers.1.self_attn.k_proj"].params == {"scale": "weight_scale_inv"}
        assert checkpoint.formats["model.layers.2.self_attn.k_proj"].params["rows"] == 64
        assert checkpoint.formats["model.layers.1.mlp.experts.0.up_proj"].kind == "mxfp4"
        ours = load_model(checkpoint, LoadOptions(exact=True))
    with open_model(replace(model, config=config, tensors=plain).save(tmp_path / "plain")) as checkpoint:
        expected = load_model(checkpoint, LoadOptions(exact=True))
    found, wanted = paged(ours).all_logits(ids, [20]), paged(expected).all_logits(ids, [20])
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4
    other, scale = {"num_key_value_heads": 2, "swa_num_key_value_heads": 4}, "2.self_attn.qkv_proj.weight_scale_inv"
    without = {name: tensor for name, tensor in stored.items() if not name.endswith(scale)}
    for number, (given, tensors) in enumerate([(other, stored), ({}, without)]):
        folder = replace(model, config=config | changes | given, tensors=tensors).save(tmp_path / f"other-{number}")
        with open_model(folder) as checkpoint, pytest.raises(UnsupportedModel, match="with fused QKV in this layout"):
            _ = checkpoint.facts
    kinds = {key: model.config[key] for key in ("layer_types", "mlp_layer_types")}
    names = ("num_key_value_heads", "head_dim", "v_head_dim")
    left_out = dict.fromkeys(["hybrid_layer_pattern", "moe_layer_freq", *names[1:], *(f"swa_{one}" for one in names)])
    folder = replace(model, config=config | changes | left_out | kinds, tensors=stored).save(tmp_path / "left-out")
    with open_model(folder) as checkpoint:
        again = load_model(checkpoint, LoadOptions(exact=True))
    assert torch.equal(paged(again).all_logits(ids, [20]), found)


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8"])
def test_kv_formats(kv_format: str, tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Zeros after a value change no scale, so most logits stay close to those over float32 pages."""
    model, ids = tiny("mimo"), torch.randint(0, 99, (60,)).tolist()
    with open_model(model.save(tmp_path)) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True))
    rows = paged(ours, kv=kv_format).all_logits(ids, [20, 40])
    expected = model.logits(ids)
    most = {"bf16": 0.01, "int8": 0.03, "fp8": 0.15}[kv_format]
    difference = float((rows - expected).abs().median() / expected.abs().median())
    assert difference < most
