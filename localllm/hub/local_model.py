"""`LocalModel`, a model on disk, and how a folder's file names are grouped into models. Opens no file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from localllm import paths
from localllm.errors import BadModelFile, ConfigError

from .names import bare, shown
from .selection import GgufSet, gguf_sets, safetensors_names

if TYPE_CHECKING:
    from localllm.models.architectures import ModelFacts

# `localllm quantize` writes this file next to the weights, with their source and errors
QUANTIZED = "localllm-quantize.json"

Source = Literal["hub", "index", "folder", "ollama", "lmstudio", "llama.cpp", "hf"]
# display names; models that other programs keep are never changed
PLACES: dict[Source, str] = {
    "hub": "Hugging Face cache",
    "index": "from the package index",
    "folder": "models folder",
    "ollama": "Ollama",
    "lmstudio": "LM Studio",
    "llama.cpp": "llama.cpp's cache",
    "hf": "another Hugging Face cache",
}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on disk: the facts its file names give and, after `describe`, those read from the files."""

    name: str  # as a user types it: "Qwen/Qwen3-8B", "org/repo:Q4_K_M", "smollm2", "ollama/llama3.2:3b"
    path: Path  # to open: a GGUF file (the first split) or a folder
    source: Source
    repo: str = ""  # only for models in our cache
    quant: str = ""
    revision: str = ""
    # weight files, relative to the snapshot or model folder; for a folder in the models folder, all its files
    files: tuple[str, ...] = ()
    size_bytes: int = 0
    problem: str = ""  # why it is incomplete, "" when the file names show no problem
    remove_with: str = ""  # for another program's model: that program's command

    format: str = ""
    architecture: str = ""
    params: int = 0
    max_context: int = 0
    license: str = ""
    chat: bool = False  # has a chat template
    supported: bool = True  # this version can run it
    broken: bool = False  # files are damaged or incomplete
    reason: str = ""  # why it is broken or unsupported
    last_used: float | None = None  # seconds since the epoch
    facts: ModelFacts | None = None

    @property
    def base(self) -> str:
        return self.name.partition(":")[0]

    @property
    def short(self) -> str:
        """The base name used by the hub or by the program that keeps the model."""
        return bare(self.base.partition("/")[2] if self.is_foreign else self.base)

    @property
    def is_foreign(self) -> bool:
        """True when another program keeps the model; localllm reads it and never changes it."""
        return self.source not in ("hub", "index", "folder")

    def refusal(self, verb: str = "rm") -> ConfigError:
        """The error for `rm`, repair (`pull`) or `cp` of a foreign model, with its program's command as the hint."""
        way = self.remove_with
        if self.source == "ollama":
            way = way.replace("ollama rm", f"ollama {verb}", 1)
        elif verb != "rm":
            way = "use the program that keeps it"
        return ConfigError(f"{self.name} belongs to {PLACES[self.source]} and is read-only here", way)

    @property
    def folder(self) -> Path:
        """The folder that `files` are relative to, for models in the models folder."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def derived(self) -> bool:
        """True when `localllm quantize` made it from another model."""
        return self.source == "folder" and (self.folder / QUANTIZED).is_file()


def models_in(folder: Path, names: list[str], base: str, source: Source, **more: Any) -> list[LocalModel]:
    """Return the models among a folder's file names: one for its safetensors, and `base:quant` for each GGUF."""
    found = []
    tensors = safetensors_names(names)
    if tensors:
        missing = missing_shards(folder, names) if "config.json" in names else "config.json is missing"
        found.append(LocalModel(base, folder, source, files=tuple(tensors), problem=missing, **more))
    for group in sets_in(names, base):
        quant = group.label or Path(group.files[0]).stem
        path = folder / group.files[0]
        found.append(LocalModel(f"{base}:{quant}", path, source, quant=quant, files=group.files, **more))
    return [with_size(one, folder) for one in found]


def sets_in(names: list[str], where: str) -> list[GgufSet]:
    """Group GGUF files into sets; if a split is missing, each file becomes its own set, to be listed as broken."""
    try:
        return gguf_sets(names, where)
    except BadModelFile:
        return [GgufSet("", (n,)) for n in names if n.endswith(".gguf")]


def with_size(found: LocalModel, folder: Path) -> LocalModel:
    """Return the model with the size of its files in that folder, and the first problem with them."""
    size, problem = 0, found.problem
    for file in found.files:
        try:
            size += (folder / file).stat().st_size
        except OSError as error:
            problem = problem or f"{file}: {(error.strerror or 'cannot be read').lower()}"
    return replace(found, size_bytes=size, problem=problem)


def missing_shards(folder: Path, names: list[str]) -> str:
    """Describe the shards that the index names and the folder lacks, or return "".

    A damaged index is reported when the model is opened. An index is ignored if it does not name the
    `model.safetensors` next to it, which then holds the whole model.
    """
    index = folder / "model.safetensors.index.json"
    if index.name not in names:
        return ""
    try:
        shards = set(paths.read_json(index, 32 << 20)["weight_map"].values())
        whole = "model.safetensors" in names and "model.safetensors" not in shards
        missing = sorted(str(s) for s in shards if s not in names and not whole)
    except (TypeError, KeyError, AttributeError):
        return ""
    return f"{len(missing)} of {len(shards)} weight files are missing, first {shown(missing[0])}" if missing else ""
