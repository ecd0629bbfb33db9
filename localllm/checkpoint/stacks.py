"""Splits stacked tensors: one tensor per expert instead of one for all experts of a layer, as in most safetensors.
Does the same for tensors that stack the heads of a layer or the residual streams of a model.

GGUF                    blk.{i}.ffn_{gate,up,down}_exps.weight [E, N, K], .bias [E, N], .scale [E];
                        ffn_gate_up_exps: gate rows first; in old, unstacked files: ffn_gate.{e}.weight [N, K]
                        attn_k_b, attn_v_b [heads, N, K] -> attn_k_b.{head}.weight
                        altup_proj, altup_unembd_proj [streams - 1, N, K] -> altup_proj.{number}.weight
                        ffn_gate_tid2eid.weight -> ffn_gate_tid2eid.ids: experts by token id, no matrix of weights
                        ffn_gate_inp_shexp [K] -> [1, K]: llama-quantize drops leading dimensions of 1
transformers 5          experts.gate_up_proj [E, 2I, H], gate rows first, or experts.up_proj [E, I, H];
                        experts.down_proj [E, H, I]
    compressed-tensors  experts.gate_up_proj_packed I32 [E, 2I, words], _scale [E, 2I, H/g], down_proj likewise
    FP8                 experts.gate_up_proj [E, 2I, H], _scale_inv [E, 2I/128, H/128]
    ModelOpt FP8        experts.gate_up_proj as in either plain layout, one _weight_scale and _input_scale for all
    ModelOpt NVFP4      experts.gate_up_proj U8 [E, 2I, H/2], _weight_scale [E, 2I, H/16], _weight_scale_2 [E] or [E, 2]
Qwen3-VL MoE            experts.gate_up_proj [E, H, 2I], gate columns first, experts.down_proj [E, I, H]; in FP8,
                        _scale_inv is transposed as well
GraniteMoe              block_sparse_moe.input_linear.weight (gate and up) and output_linear.weight (down); FP8 has a
                        weight_scale [E, N, 1] for each
Step 3.5                moe.{gate,up,down}_proj.weight [E, N, K], FP8 with .weight_scale_inv [E, N/128, K/128]
GLM-5.3, DeepSeek V4    hc_attn_fn, index_kpool_compress_gate, ... -> hc_attn_fn.weight, ...; some GGUF files as well
DeepSeek V4             ffn.gate.bias, which only chooses experts -> ffn.gate.e_score_correction_bias
                        FP8 and MXFP4 (codes as I8): wkv.scale -> wkv.weight_scale
ERNIE 4.5               moe_statics.e_score_correction_bias [1, E] -> gate.e_score_correction_bias [E]
gpt-oss                 experts.{gate_up,down}_proj_bias [E, N]; gate and up rows are interleaved, and either
    plain               experts.gate_up_proj [E, H, 2I], experts.down_proj [E, I, H]
    MXFP4               experts.{gate_up,down}_proj_blocks U8 [E, N, K/32, 16], _scales U8 [E, N, K/32]

Result: `..._exps.{e}.weight` for GGUF, else `experts.{e}.{gate,up,down}_proj.weight` (MXFP4: weight_packed and
weight_scale), with the rows of one projection and inputs along them. No bytes are moved; `TensorInfo.strides` describes
interleaved rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from localllm.errors import UnsupportedFormat

from .fields import MAX_EXPERTS
from .mapped_file import TensorInfo, bad

_GGUF = re.compile(r"(blk\.\d{1,6}\.ffn_)(gate|up|down|gate_up)_exps\.(weight|bias|scale)")
_GGUF_SPLIT = re.compile(r"(blk\.\d{1,6}\.ffn_(?:gate|up|down))\.(\d{1,6})\.(weight|bias)")
_GGUF_MATRICES = re.compile(r"(blk\.\d{1,6}\.attn_[kv]_b|altup_proj|altup_unembd_proj)\.weight")  # per head or stream
_GGUF_ROW = re.compile(r"blk\.\d{1,6}\.ffn_gate_inp_shexp\.weight")
_GGUF_TABLE = re.compile(r"blk\.\d{1,6}\.ffn_gate_tid2eid\.weight")
_GRANITE = re.compile(r"(.+\.block_sparse_moe\.)(input|output)_linear\.(weight|weight_scale)")
_STEP = re.compile(r"(.+\.moe\.)(gate|up|down)_proj\.(weight|weight_scale_inv)")
_BARE = re.compile(
    r"(.+\.)?(hc_(attn|ffn|head|head\.hc)_(fn|base|scale)|index_kpool_compress_(ape|gate)|indexer_compressor_(ape|gate))"
)
_DEEPSEEK_SCALE = re.compile(r"((?:.+\.)?(?:layers|mtp)\.\d{1,6}\.(?:(?:attn|ffn)\..+|[eh]_proj))\.scale")
_DEEPSEEK = re.compile(r"(.+\.)?(?:layers|mtp)\.\d{1,6}\.ffn\.gate\.bias")
_ERNIE = re.compile(r"(.+\.mlp\.)(?:gate\.)?moe_statics(\.e_score_correction_bias)")
_PROJECTION_SUFFIXES = {  # suffix after `experts.gate_up_proj` -> name for one expert, possible dimensions of the stack
    "": ("weight", (3,)),
    "_bias": ("bias", (2,)),
    "_blocks": ("weight_packed", (4,)),
    "_scales": ("weight_scale", (3,)),
    "_packed": ("weight_packed", (3,)),
    "_scale": ("weight_scale", (3,)),
    "_scale_inv": ("weight_scale_inv", (3,)),
    "_weight_scale": ("weight_scale", (3,)),
    "_weight_scale_2": ("weight_scale_2", (1, 2)),
    "_input_scale": ("input_scale", (1, 2)),
}
_HF = re.compile(rf"(.+\.experts\.)(gate_up|up|down)_proj({'|'.join(_PROJECTION_SUFFIXES)})")


def unstacked(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return all tensors, with stacked ones replaced by one per expert. Raises BadModelFile for duplicate names."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        for part in _parts(name, info, tensors):
            if part.name in found or (part.name != name and part.name in tensors):
                raise bad(info.file, f"{part.name} is stored twice", key=name)
            found[part.name] = part
    return found


def _parts(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> Iterator[TensorInfo]:
    dims = len(info.shape)
    alone = math.prod(info.shape) == 1
    if alone and (match := _HF.fullmatch(name)) and match[3] in ("_weight_scale", "_input_scale"):
        weights = tensors.get(f"{match[1]}{match[2]}_proj")
        for expert in range(min(weights.shape[0], MAX_EXPERTS) if weights is not None and weights.shape else 0):
            for kind in match[2].split("_"):
                yield replace(info, name=f"{match[1]}{expert}.{kind}_proj.{_PROJECTION_SUFFIXES[match[3]][0]}")
    elif dims == 1 and _GGUF_ROW.fullmatch(name):
        yield replace(info, shape=(1, *info.shape))
    elif _BARE.fullmatch(name):
        yield replace(info, name=f"{name}.weight")
    elif _GGUF_TABLE.fullmatch(name):
        yield replace(info, name=name.replace(".weight", ".ids"))
    elif (match := _DEEPSEEK_SCALE.fullmatch(name)) and _is_coded(tensors.get(f"{match[1]}.weight")):
        yield replace(info, name=f"{match[1]}.weight_scale")
    elif _DEEPSEEK.fullmatch(name):
        yield replace(info, name=name.replace(".gate.bias", ".gate.e_score_correction_bias"))
    elif not (info.nbytes and 1 <= dims <= 4) or info.shape[0] > MAX_EXPERTS:
        yield info
    elif (match := _GGUF.fullmatch(name)) and dims == {"weight": 3, "bias": 2, "scale": 1}[match[3]]:
        kinds = match[2].split("_")
        for some in ([kind] for kind in kinds) if match[3] == "scale" else (kinds,):
            for expert, kind, part in _split(info, some, turns=False):
                yield replace(part, name=f"{match[1]}{kind}_exps.{expert}.{match[3]}")
    elif match := _GGUF_SPLIT.fullmatch(name):
        yield replace(info, name=f"{match[1]}_exps.{match[2]}.{match[3]}")
    elif (match := _GGUF_MATRICES.fullmatch(name)) and dims == 3:
        for number, _, part in _split(info, ["matrix"], turns=False):
            yield replace(part, name=f"{match[1]}.{number}.weight")
    elif (match := _GRANITE.fullmatch(name)) and dims == 3:
        kinds = ["gate", "up"] if match[2] == "input" else ["down"]
        for expert, kind, part in _split(info, kinds, turns=False):
            yield replace(part, name=f"{match[1]}experts.{expert}.{kind}_proj.{match[3]}")
    elif (match := _STEP.fullmatch(name)) and dims == 3:
        for expert, kind, part in _split(info, [match[2]], turns=False):
            yield replace(part, name=f"{match[1]}experts.{expert}.{kind}_proj.{match[3]}")
    elif (match := _ERNIE.fullmatch(name)) and info.shape[:-1] == (1,):
        yield replace(info, name=f"{match[1]}gate{match[2]}", shape=info.shape[1:])
    elif (match := _HF.fullmatch(name)) and dims in _PROJECTION_SUFFIXES[match[3]][1]:
        yield from _split_projection(info, match, tensors)
    else:
        yield info


def _split_projection(
    info: TensorInfo, match: re.Match[str], tensors: Mapping[str, TensorInfo]
) -> Iterator[TensorInfo]:
    kinds, gpt_oss = match[2].split("_"), f"{match[1]}{match[2]}_proj_bias" in tensors
    columns = _is_transposed(match[1], tensors)
    if match[3] == "_blocks":
        experts, n, groups, width = info.shape
        info = replace(info, shape=(experts, n, groups * width))
    elif (not match[3] and gpt_oss) or (match[3] in ("", "_scale_inv") and columns):
        experts, k, n = info.shape
        item = info.nbytes // math.prod(info.shape)
        info = replace(info, shape=(experts, n, k), strides=(k * n * item, item, n * item))
    if match[3] == "_scale_inv" and len(kinds) > 1:
        _check_blocks(info, tensors.get(f"{match[1]}gate_up_proj"), axis=2 if columns else 1)
    for some in [[kind] for kind in kinds] if len(info.shape) == 1 else [kinds]:  # one number is shared by all of them
        for expert, kind, part in _split(info, some, turns=gpt_oss or match[3] in ("_blocks", "_scales")):
            yield replace(part, name=f"{match[1]}{expert}.{kind}_proj.{_PROJECTION_SUFFIXES[match[3]][0]}")


def _is_coded(weight: TensorInfo | None) -> bool:
    return weight is not None and weight.dtype in ("F8_E4M3", "I8", "U8")


def _check_blocks(scale: TensorInfo, weight: TensorInfo | None, *, axis: int) -> None:
    """Reject an FP8 block that spans gate and up rows: the rows of scales cannot be split there."""
    rows = weight.shape[axis] if weight is not None and len(weight.shape) == 3 else 0
    if scale.shape[1] % 2 or scale.shape[1] * 128 != rows:
        what = f"has {scale.shape[1]} rows per expert for {rows} gate and up rows; only 128 x 128 blocks are supported"
        hint = "download a BF16, NVFP4 or GGUF version of this model"
        raise bad(scale.file, what, key=scale.name, hint=hint, error=UnsupportedFormat)


def _is_transposed(start: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """True if the experts are stored transposed, [E, H, 2I]: only then does gate_up have twice as many columns as down
    has rows.
    """
    wide, down = (tensors.get(f"{start}{kinds}_proj") for kinds in ("gate_up", "down"))
    if wide is None or down is None or len(down.shape) != 3:
        return False
    return wide.shape[1:] == (down.shape[-1], 2 * down.shape[1])


def _split(info: TensorInfo, kinds: list[str], *, turns: bool) -> Iterator[tuple[int, str, TensorInfo]]:
    """Yield (expert, kind, its tensor) of [E, N, ...]; the rows of `kinds` are interleaved (`turns`) or in blocks."""
    experts, *rest = info.shape
    count = len(kinds)
    if rest and rest[0] % count:
        what = f"has {rest[0]} rows per expert, which cannot be split into {' and '.join(kinds)} rows"
        raise bad(info.file, what, key=info.name)
    shape = (rest[0] // count, *rest[1:]) if rest else ()
    size = info.nbytes // experts  # also correct for a transposed tensor
    row = info.strides[1] if info.strides else size // (rest[0] if rest else 1)
    for expert in range(experts):
        for place, kind in enumerate(kinds):
            step = row * (place if turns else place * (shape[0] if shape else 1))
            strides = None
            if info.strides:
                strides = (row * (count if turns else 1), *info.strides[2:])
            elif turns and count > 1:
                inner = [row // math.prod(shape[1 : 1 + axis]) for axis in range(1, len(shape))]
                strides = (row * count, *inner)
            yield (
                expert,
                kind,
                replace(
                    info,
                    shape=shape,
                    nbytes=size // count,
                    offset=info.offset + expert * size + step,
                    strides=strides,
                ),
            )
