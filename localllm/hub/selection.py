"""Selects the files of a repository or folder that make up one model, by name only; opens no file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from localllm.errors import BadModelFile, DownloadError, ModelNotFound, UnsupportedFormat
from localllm.paths import are_models, is_projector, projector_rank

from .listing import RepoFile, RepoInfo
from .names import check_no_collision, shown

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_QUANT_LABEL = re.compile(
    r"(?:^|[-_./])"
    r"((?:UD-)?(?:IQ\d_[A-Z]+|TQ\d_\d|Q\d(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|MXFP4(?:_MOE)?|NVFP4))"
    r"(?=[-_./]|$)",
    re.IGNORECASE,
)
# default choice when no quant is named: 4-bit first, because decode speed depends on the bytes read
_QUANT_ORDER = (
    "Q4_K_M UD-Q4_K_XL Q4_1 Q4_K_S Q4_0 IQ4_NL IQ4_XS MXFP4 Q5_K_M Q5_K_S Q5_1 Q5_0 Q6_K Q8_0 Q3_K_M Q3_K_L BF16 F16"
)
_RANKS = {label: rank for rank, label in enumerate(_QUANT_ORDER.split())}

_SMALL = re.compile(
    r"[^/]+\.(json|jinja)|(tokenizer|tiktoken)\.model|merges\.txt|vocab\.txt"
    r"|(additional_chat_templates|chat_templates)/[^/]+\.jinja|\d+_\w+/config\.json|(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)[^/]*",
    re.IGNORECASE,
)
_DENSE = re.compile(r"\d+_Dense/model\.safetensors")  # dense layers after pooling: `checkpoint.text_modules`
_DRAFTER = re.compile(r"mtp-gemma-?4[^/]*$", re.IGNORECASE)
MAX_SMALL_BYTES = 128 << 20  # limit for a file other than weights; the largest tokenizers have 35 MB


class GgufSet(NamedTuple):
    """One GGUF model: a single file, or its splits in order."""

    label: str  # the quant in the file name, upper case, or ""
    files: tuple[str, ...]


def quant_label(file_name: str) -> str:
    """The quant in a GGUF file name, in upper case: "model-Q4_K_M.gguf" -> "Q4_K_M"; "" when there is none."""
    stem = re.sub(r"\.gguf$", "", _SPLIT.sub("", file_name), flags=re.IGNORECASE)
    found = _QUANT_LABEL.findall(stem)
    return found[-1].upper() if found else ""


def gguf_sets(names: Iterable[str], where: str) -> list[GgufSet]:
    """Group GGUF file names into models, splits in order; leaves out projectors, drafters and calibration data.

    Raises BadModelFile when a split is missing.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(are_models(names)):
        if name.count("/") < 2 and "imatrix" not in name.rsplit("/", 1)[-1].lower():
            groups.setdefault(_SPLIT.sub("", name), []).append(name)
    for stem, files in groups.items():
        parts = [_SPLIT.search(f) for f in files]
        if parts[0] and [int(p[1]) for p in parts if p] != list(range(1, int(parts[0][2]) + 1)):
            raise BadModelFile(
                f"{where}: {shown(stem)} has {len(files)} of its {int(parts[0][2])} parts",
                "`localllm pull NAME --repair` fetches the missing parts",
            )
    return [GgufSet(quant_label(files[0]), tuple(files)) for files in groups.values()]


def choose_gguf(sets: Sequence[GgufSet], quant: str | None, where: str) -> GgufSet:
    """Return the set matching `quant`, or the default choice for None. Raises ModelNotFound, listing the options."""
    if quant is None:
        return min(sets, key=lambda s: (_RANKS.get(s.label, len(_RANKS)), len(s.files[0]), s.files[0]))
    wanted = quant.casefold()
    found = [s for s in sets if s.label.casefold() == wanted]
    found = found or [s for s in sets if wanted in s.files[0].rsplit("/", 1)[-1].casefold()]
    if len(found) == 1:
        return found[0]
    if not found:
        labels = ", ".join(sorted({s.label or s.files[0] for s in sets}))
        raise ModelNotFound(f"{where} has no {shown(quant)}; it has {labels}", f"localllm pull {where}:{sets[0].label}")
    names = ", ".join(s.files[0] for s in found[:6])
    raise ModelNotFound(f"{where}:{shown(quant)} matches {len(found)} files: {names}", "give more of the file name")


def projector_for(chosen: GgufSet, names: Iterable[str]) -> tuple[str, ...]:
    """The mmproj file (image encoder) that belongs to a model, or () when there is none.

    A file in the model's own folder is preferred to one at the top level.
    """
    folder = chosen.files[0].rpartition("/")[0]
    found = [n for n in names if n.lower().endswith(".gguf") and is_projector(n.rpartition("/")[2])]
    near = [n for n in found if n.rpartition("/")[0] in (folder, "")]
    return tuple(sorted(near, key=lambda n: ("/" not in n and bool(folder), projector_rank(n), n))[:1])


def drafter_for(names: Iterable[str]) -> tuple[str, ...]:
    """The file at the top level that drafts for the repository's Gemma 4 models, or () when there is none.

    Files of other families have a head that is not supported in a file of its own.
    """
    return tuple(sorted(n for n in names if _DRAFTER.match(n) and n.lower().endswith(".gguf"))[:1])


def safetensors_names(names: Iterable[str]) -> list[str]:
    """The weight files at the top level of a model folder, without a second copy in the vendor's own layout."""
    top = [n for n in names if n.endswith(".safetensors") and "/" not in n]
    return sorted([n for n in top if not n.startswith("consolidated")] or top)


def select_files(info: RepoInfo, quant: str | None) -> tuple[str, tuple[RepoFile, ...]]:
    """Return (quant label or "", files to download). Never selects pickles or Python code.

    Raises ModelNotFound, UnsupportedFormat when no weights are in a supported format, DownloadError when a file has no
    size and digest.
    """
    names = [f.name for f in info.files]
    sets, tensors = gguf_sets(names, info.repo), safetensors_names(names)
    label = ""
    if sets and (quant is not None or not tensors or "config.json" not in names):
        chosen = choose_gguf(sets, quant, info.repo)
        label = chosen.label or (quant or "").upper()
        wanted = {
            *chosen.files,
            *projector_for(chosen, names),
            *drafter_for(names),
            *(n for n in names if _SMALL.fullmatch(n) and not n.endswith((".json", ".jinja"))),
        }
    elif tensors and quant is None:
        wanted = {*tensors, *(n for n in names if _SMALL.fullmatch(n) or _DENSE.fullmatch(n))}
        if "config.json" not in wanted:
            raise UnsupportedFormat(f"{info.repo} has weights but no config.json", "use a repository that has both")
    elif tensors:
        raise ModelNotFound(
            f"{info.repo} has no {shown(quant or '')}; it has safetensors", f"localllm pull {info.repo}"
        )
    elif any(n.endswith(PICKLED) for n in names):
        raise UnsupportedFormat(f"{info.repo} has only pickled weights (.bin, .pt), which are never loaded",
                                "use a safetensors or GGUF version of the model")  # fmt: skip
    else:
        raise ModelNotFound(f"{info.repo} contains no model weights", "`localllm ls` lists the models on this machine")
    check_no_collision(wanted, info.repo)
    heavy = (".gguf", ".safetensors")
    files = tuple(f for f in info.files if f.name in wanted and (f.name.endswith(heavy) or f.size <= MAX_SMALL_BYTES))
    unknown = next((f for f in files if f.size < 0), None)
    if unknown:
        raise DownloadError(
            f"the hub lists no size and checksum for {shown(unknown.name)}", "set HF_ENDPOINT to a hub that does"
        )
    return label, files
