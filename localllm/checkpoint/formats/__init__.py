"""Stored weight formats: one file per format, which detects it by its tensors; `quant/` turns it into a `Weight`.

The tensors decide; the config only resolves ambiguities. A module is named as in the file, without the last component
("model.layers.0.self_attn.q_proj", "blk.0.attn_q"). Only names, dtypes and shapes are used, and the two numbers in
compressed-tensors' `weight_shape`.
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
    # tried in this order; the first that recognizes a module's tensors wins
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
NGRAMS = ".ngram_embedding."
_FOREIGN = {
    # last name component -> the tool that uses this layout
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
    """Map each module stored as a matrix to its format (including embedding and head).

    Raises BadModelFile for a packed weight whose scale is missing or has the wrong shape, UnsupportedFormat for an
    unsupported layout.
    """
    groups: dict[str, dict[str, TensorInfo]] = {}
    for name, info in model.tensors.items():
        module, _, suffix = name.rpartition(".")
        if NGRAMS in name:  # a table of rows, whose parts share one scale: `Architecture` reads it
            continue
        groups.setdefault(module, {})[suffix] = info
    turned = _unmerged_rotation(model.quantization_config)
    if turned:
        what = f"has layers whose inputs or outputs are rotated at run time ({shown(turned)}), which is not supported"
        raise bad(model.path, what, key="transform_config", hint=HINT, error=UnsupportedFormat)
    detect = gguf.detect if model.kind == "gguf" else _detect
    found = {name: detect(StoredModule(model, name, tensors)) for name, tensors in groups.items()}
    return {name: stored for name, stored in found.items() if stored is not None}


def _unmerged_rotation(config: Mapping[str, Any]) -> str:
    """The first rotation of compressed-tensors (QuIP, SpinQuant) not fully merged into the weights; "" for none."""
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
            tool = "MLX"  # one of its floating-point formats, which have no biases
        if tool:
            raise module.unsupported(f"is stored in the layout of {tool}, which is not supported")
    return next((stored for one in FORMATS if (stored := one.detect(module)) is not None), None)


def format_label(formats: dict[str, StoredFormat]) -> str:
    """The common name of the format that most of the layers' weights have: bf16, awq, nvfp4, Q4_K, ..."""
    votes: Counter[str] = Counter()
    for name, stored in formats.items():
        # embedding and head stay dense in most quantized checkpoints and say nothing about the layers
        if "layers." in name or name.startswith("blk."):
            votes[stored.label] += stored.shape[0] * stored.shape[1]
    return votes.most_common(1)[0][0] if votes else next((stored.label for stored in formats.values()), "")
