"""How weights are stored: one file a format, which tells it by its tensors; `quant/` turns it into a `Weight`.

The tensors decide, the config only resolves what they leave open. A module is named as in the file, without the last
component ("model.layers.0.self_attn.q_proj", "blk.0.attn_q"). Only names, dtypes and shapes are looked at, and
compressed-tensors' two-number `weight_shape`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from localllm.errors import UnsupportedFormat

from ..checkpoint import Checkpoint
from ..mapped_file import TensorInfo, bad, shown
from . import awq, compressed_tensors, dense, fp8, gguf, gptq, int8, modelopt_int4, mxfp4, nvfp4
from .module import HINT, StoredFormat, StoredModule

FORMATS = (
    # asked in this order: the first that knows a module's tensors has it
    mxfp4,
    nvfp4,
    modelopt_int4,
    compressed_tensors,
    gptq,
    awq,
    fp8,
    int8,
    dense,
)
_FOREIGN = {
    # last name component -> the tool whose layout it belongs to
    "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "nested_absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
    "W_q": "HQQ",
    "biases": "MLX",
    "codebooks": "AQLM",
    "trellis": "EXL3",
    "q_weight": "EXL2",
    "q_groups": "EXL2",
    "qscale_weight": "Mistral's own FP8",
    "tlut": "HIGGS or QTIP",
}


def stored_formats(model: Checkpoint) -> dict[str, StoredFormat]:
    """Module -> format, for everything stored as a matrix (embedding and head included).

    Raises BadModelFile for a packed weight whose scale is missing or misshapen, UnsupportedFormat for layouts not read.
    """
    groups: dict[str, dict[str, TensorInfo]] = {}
    for name, info in model.tensors.items():
        module, _, suffix = name.rpartition(".")
        groups.setdefault(module, {})[suffix] = info
    turned = _turned(model.quantization_config)
    if turned:
        what = f"has layers whose inputs or outputs are rotated at run time ({shown(turned)}), which is not computed"
        raise bad(model.path, what, key="transform_config", hint=HINT, error=UnsupportedFormat)
    detect = gguf.detect if model.kind == "gguf" else _detect
    found = {name: detect(StoredModule(model, name, tensors)) for name, tensors in groups.items()}
    return {name: stored for name, stored in found.items() if stored is not None}


def _turned(config: Mapping[str, Any]) -> str:
    """The first rotation of compressed-tensors (QuIP, SpinQuant) that is not wholly in the weights; "" for none."""
    transforms = config.get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    for name, scheme in groups.items() if isinstance(groups, dict) else ():
        steps = scheme.get("apply") if isinstance(scheme, dict) else None
        places = [step.get("location") for step in (steps if isinstance(steps, list) else ()) if isinstance(step, dict)]
        if not all(place in ("weight_input", "weight_output") for place in places):
            return str(name)
    return ""


def _detect(module: StoredModule) -> StoredFormat | None:
    for suffix in module.tensors:
        tool = _FOREIGN.get(suffix) or ("bitsandbytes" if suffix.startswith("bitsandbytes__") else None)
        if suffix == "weight" and module.dtype(suffix) == "U32" and "scales" in module.tensors:
            tool = "MLX"  # of its floating formats, which have no biases
        if tool:
            raise module.unsupported(f"is stored in the layout of {tool}, which is not read")
    return next((stored for one in FORMATS if (stored := one.detect(module)) is not None), None)


def format_label(formats: dict[str, StoredFormat]) -> str:
    """The word people know for the format most of the layers' modules have: bf16, awq, nvfp4, Q4_K, ..."""
    votes: Counter[str] = Counter()
    for name, stored in formats.items():
        # Embedding and head stay dense in most quantized checkpoints and say nothing about the layers.
        if "layers." in name or name.startswith("blk."):
            votes[stored.label] += stored.shape[0] * stored.shape[1]
    return votes.most_common(1)[0][0] if votes else next((stored.label for stored in formats.values()), "")
