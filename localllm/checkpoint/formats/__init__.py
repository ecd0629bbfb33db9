"""Which stored format each linear module has: the tensors decide, the config only resolves what they leave open.

A module is named as in the file, without the last component ("model.layers.0.self_attn.q_proj", "blk.0.attn_q").
Only names, dtypes and shapes are looked at, and compressed-tensors' two-number `weight_shape`.
"""

from __future__ import annotations

from collections import Counter

from .checkpoint import Checkpoint
from .detect_int import awq_or_gptq, compressed_ints
from .stored_format import Module, StoredFormat
from .tensor_info import TensorInfo

DENSE = ("BF16", "F16", "F32", "F64")
_FLOATS = (*DENSE, "F8_E4M3")
_FOREIGN = {
    # last name component -> the tool whose layout it belongs to
    "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "nested_absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
    "W_q": "HQQ",
    "codebooks": "AQLM",
    "trellis": "EXL3",
    "q_weight": "EXL2",
    "q_groups": "EXL2",
    "qscale_weight": "Mistral's own FP8",
    "tlut": "HIGGS or QTIP",
}
_LABELS = {
    "awq_gemm": "awq",
    "awq_gemv": "awq",
    "awq_gemv_fast": "awq",
    "gptq": "gptq",
    "modelopt_int4": "w4a16",
    "ct_nvfp4": "nvfp4",
    "modelopt_nvfp4": "nvfp4",
    "ct_mxfp4": "mxfp4",
    "gptoss_mxfp4": "mxfp4",
    "ct_int8": "int8",
    "fp8": "fp8",
    "ct_fp8": "fp8",
    "mxfp8": "mxfp8",
}
_DENSE_LABELS = {"BF16": "bf16", "F16": "fp16", "F32": "f32", "F64": "f64"}


def stored_formats(model: Checkpoint) -> dict[str, StoredFormat]:
    """Module -> format, for everything stored as a matrix (embedding and head included).

    Raises BadModelFile for a packed weight whose scale is missing or misshapen, UnsupportedFormat for layouts not read.
    """
    groups: dict[str, dict[str, TensorInfo]] = {}
    for name, info in model.tensors.items():
        module, _, suffix = name.rpartition(".")
        groups.setdefault(module, {})[suffix] = info
    decide = _gguf if model.kind == "gguf" else _safetensors
    found: dict[str, StoredFormat] = {}
    for name, tensors in groups.items():
        found.update(decide(Module(model, name, tensors)))
    return found


def format_label(formats: dict[str, StoredFormat]) -> str:
    """The word people know for the format most of the layers' modules have: bf16, awq, nvfp4, Q4_K, ..."""
    votes: Counter[str] = Counter()
    for name, stored in formats.items():
        size = stored.shape[0] * stored.shape[1] if stored.shape else 1
        # Embedding and head stay dense in most quantised checkpoints and say nothing about the layers.
        if "layers." in name or name.startswith("blk."):
            votes[_label(stored)] += size
    if not votes:
        return _label(next(iter(formats.values()))) if formats else ""
    return votes.most_common(1)[0][0]


def _label(stored: StoredFormat) -> str:
    if stored.kind == "dense":
        return _DENSE_LABELS.get(stored.params["dtype"], stored.params["dtype"])
    if stored.kind == "gguf":
        return str(stored.params["type"])
    if stored.kind == "ct_pack":
        return f"w{stored.params['bits']}a16"
    return _LABELS[stored.kind]


def _gguf(module: Module) -> dict[str, StoredFormat]:
    weight = module.get("weight")
    if weight is None or len(weight.shape) != 2:
        return {}
    if weight.dtype in ("I8", "I16", "I32", "I64"):
        raise module.unsupported(f"is a matrix of integers ({weight.dtype}) without scales")
    sidecar = f"{module.name}.scale" if weight.dtype == "NVFP4" and module.get("scale") else None
    bias = "bias" if module.get("bias") else None
    params = {"type": weight.dtype, "scale": sidecar, "bias": bias, "pre_quant_scale": None, "input_scale": None}
    return {module.name: StoredFormat("gguf", (weight.shape[0], weight.shape[1]), params)}


def _safetensors(module: Module) -> dict[str, StoredFormat]:
    for suffix in module.tensors:
        tool = _FOREIGN.get(suffix) or ("bitsandbytes" if suffix.startswith("bitsandbytes__") else None)
        if tool:
            raise module.unsupported(f"is stored in the layout of {tool}, which is not read")
    found = _blocks(module)
    if module.get("weight_packed") is not None:
        found[module.name] = _packed(module)
    elif module.get("qweight") is not None:
        found[module.name] = awq_or_gptq(module)
    elif (weight := module.get("weight")) is not None:
        stored = _plain(module, weight)
        if stored is not None:
            found[module.name] = stored
    return found


def _blocks(module: Module) -> dict[str, StoredFormat]:
    """gpt-oss: `x_blocks` U8 [E, N, K/32, 16] with `x_scales` U8 [E, N, K/32]."""
    found: dict[str, StoredFormat] = {}
    for suffix, info in module.tensors.items():
        if not suffix.endswith("_blocks") or info.dtype != "U8" or len(info.shape) != 4:
            continue
        stem = suffix.removesuffix("_blocks")
        module.need(f"{stem}_scales", "an MXFP4 weight")
        module.expect(f"{stem}_scales", info.shape[:3])
        experts, n, groups, _ = info.shape
        names = {"blocks": info.name, "scales": f"{module.name}.{stem}_scales"}
        found[f"{module.name}.{stem}"] = module.made("gptoss_mxfp4", (n, groups * 32), experts=experts, **names)
    return found


def _packed(module: Module) -> StoredFormat:
    """compressed-tensors `weight_packed`: I32 holds integers, U8 NVFP4 or MXFP4."""
    packed = module.tensors["weight_packed"]
    scale = module.need("weight_scale", "a packed weight")
    if packed.dtype == "I32":
        return compressed_ints(module)
    if packed.dtype != "U8":
        raise module.unsupported(f"weight_packed is stored as {packed.dtype}; I32 and U8 are read")
    n, half = module.matrix("weight_packed")
    if scale.dtype in ("U8", "F8_E8M0"):
        return _mxfp4(module, "weight_packed", n, half * 2)
    if scale.dtype != "F8_E4M3":
        raise module.unsupported(f"has 4-bit codes with {scale.dtype} scales; NVFP4 and MXFP4 are read")
    module.need("weight_global_scale", "an NVFP4 weight")
    module.expect("weight_scale", (n, half // 8))
    _one_number(module, "weight_global_scale")
    return module.made("ct_nvfp4", (n, half * 2))


def _plain(module: Module, weight: TensorInfo) -> StoredFormat | None:
    """`weight`: its dtype and the scales beside it tell the format; None for what is no matrix."""
    if weight.dtype in DENSE:
        if len(weight.shape) != 2:
            return None
        return module.made("dense", (weight.shape[0], weight.shape[1]), dtype=weight.dtype)
    if weight.dtype == "F8_E4M3":
        return _fp8(module)
    if weight.dtype == "I8":
        return _int8(module)
    if weight.dtype == "U8":
        return _bytes(module)
    if len(weight.shape) != 2:
        return None
    raise module.unsupported(f"is a matrix of {weight.dtype}, which is not read")


def _bytes(module: Module) -> StoredFormat:
    """ModelOpt: U8 codes [N, K/2] with NVFP4 or MX scales, or INT4 AWQ, packed along N, with float scales."""
    rows, columns = module.matrix("weight")
    scale = module.need("weight_scale", "a packed weight")
    if scale.dtype in ("U8", "F8_E8M0"):
        return _mxfp4(module, "weight", rows, columns * 2)
    if scale.dtype == "F8_E4M3":
        module.need("weight_scale_2", "an NVFP4 weight")
        module.expect("weight_scale", (rows, columns // 8))
        _one_number(module, "weight_scale_2")
        if module.get("svdquant_lora_a") is not None:
            raise module.unsupported("is NVFP4 with a low-rank branch (NVFP4_SVD), which is not read")
        return module.made("modelopt_nvfp4", (rows, columns * 2))
    n, groups = module.matrix("weight_scale")
    if n != rows * 2 or columns % groups:
        what = f"has shape {[n, groups]}, [{rows * 2}, groups that divide {columns}] is expected"
        raise module.bad(scale.name, what)
    return module.made("modelopt_int4", (n, columns), group_size=columns // groups)


def _mxfp4(module: Module, codes: str, n: int, k: int) -> StoredFormat:
    module.expect("weight_scale", (n, k // 32))
    return module.made("ct_mxfp4", (n, k), weight=codes)


def _int8(module: Module) -> StoredFormat:
    n, k = module.matrix("weight")
    module.need("weight_scale", "an INT8 weight")
    module.expect("weight_scale", (n, 1), (n,), (1,), (), (1, 1))
    return module.made("ct_int8", (n, k), scale="weight_scale")


def _fp8(module: Module) -> StoredFormat:
    """E4M3 with `weight_scale_inv` or `weight_scale`, both multiply; the scale's shape and dtype tell the scheme."""
    n, k = module.matrix("weight")
    suffix = module.suffix("weight_scale_inv", "weight_scale") or "weight_scale"
    scale = module.need(suffix, "an FP8 weight")
    if scale.shape == (n, k // 32) and scale.dtype in ("U8", "F8_E8M0") and k % 32 == 0:
        return module.made("mxfp8", (n, k), scale=suffix)
    block = _fp8_block(module, suffix, n, k)
    known = (*_FLOATS, "F8_E8M0", "U8")
    if scale.dtype not in known:
        raise module.unsupported(f"has FP8 scales of {scale.dtype}; {', '.join(known)} are read")
    method = str(module.setting("quant_method") or "").lower()
    kind = "ct_fp8" if method == "compressed-tensors" else "fp8"
    return module.made(kind, (n, k), scale=suffix, block=block)


def _fp8_block(module: Module, suffix: str, n: int, k: int) -> tuple[int, int] | None:
    """The block size, None when the scale is per tensor or per row."""
    shape = module.tensors[suffix].shape
    if shape in ((), (1,), (1, 1), (n,), (n, 1)):
        return None
    size = module.setting("weight_block_size")
    rows, columns = size if isinstance(size, list) and len(size) == 2 else (128, 128)
    if type(rows) is not int or type(columns) is not int or rows < 1 or columns < 1:
        raise module.bad(f"{module.name}.{suffix}", f"weight_block_size is {size}, two positive numbers are expected")
    blocks = (-(-n // rows), -(-k // columns))
    module.expect(suffix, blocks, (blocks[0], 1, blocks[1], 1))
    if (rows, columns) != (128, 128):
        raise module.unsupported(f"is FP8 in blocks of {rows} x {columns}; 128 x 128 are read")
    return rows, columns


def _one_number(module: Module, suffix: str) -> None:
    module.expect(suffix, (), (1,), (1, 1))
