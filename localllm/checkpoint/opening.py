"""Opens a `Checkpoint` from a path: finds the files that belong to it and rejects unsupported kinds by name.

Files named by other files (shards) or found in a folder must be inside that folder, except in the Hugging Face cache,
whose snapshots link to blobs of the same repository. Nothing is unpickled, and Python code next to a model is never
imported.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from localllm.errors import REPAIR, BadModelFile, ModelNotFound, UnsupportedFormat
from localllm.paths import are_models

from .checkpoint import Checkpoint
from .fields import Fields
from .gguf_file import read_gguf
from .json_file import read_json_object
from .mapped_file import MappedFile, TensorInfo, bad, pickle_error, read_small, shown
from .safetensors_file import read_safetensors
from .shards import unsharded
from .stacks import unstacked
from .text_modules import MODULES_NAME, TextModules, read_text_modules

PICKLES = (
    ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".msgpack", ".h5", ".onnx", ".zip", ".tar",
)  # fmt: skip
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model",
)  # fmt: skip
INDEX_NAME, WHOLE_NAME = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 32 << 20
MAX_INDEX_ENTRIES = 1 << 17
MAX_PARTS = 1000
MAX_FOLDER_ENTRIES = 20_000
_COPY = f"copy the file itself into the folder, or {REPAIR}"
_PART = re.compile(r"^(.*)-(\d{5})-of-(\d{5})(\.gguf|\.safetensors)$")
_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open the model at `path`: a .gguf file (with its splits), or a folder with safetensors or one .gguf.

    Raises ModelNotFound when there is none, UnsupportedFormat or UnsupportedModel for unsupported kinds, BadModelFile
    for damaged files. Hyperparameters and tensors are compared later, when `facts` is read.
    """
    found = _open(Path(path).expanduser())
    tensors = {name: info for name, info in found.tensors.items() if info.nbytes}  # some are empty
    found.tensors = unstacked(unsharded(tensors, found.config))
    return found


def _open(path: Path) -> Checkpoint:
    if "\0" in str(path) or len(os.fsencode(path.name)) > 255:
        raise ModelNotFound(f"{shown(path)} is not a file name", "`localllm ls` lists the models on this machine")
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(PICKLES):
        raise pickle_error(path)
    if path.suffix == ".safetensors":
        return _open_safetensors_file(path)
    return _open_gguf(path)


def _open_folder(folder: Path) -> Checkpoint:
    names = _names(folder)
    if INDEX_NAME in names:
        return _open_sharded(folder, names)
    safetensors = [name for name in names if name.endswith(".safetensors")]
    if WHOLE_NAME in names and "config.json" in names:
        return _open_parts(folder, [folder / WHOLE_NAME], names)
    models = are_models(names)
    firsts = [name for name in models if not (found := _PART.match(name)) or int(found[2]) == 1]
    if len(firsts) == 1:
        return _open_gguf(inside(folder, firsts[0]), _tokenizer_files(folder, names))
    if len(firsts) > 1:
        listed = ", ".join(shown(name, 60) for name in sorted(firsts)[:6])
        raise ModelNotFound(
            f"{shown(folder)} holds {len(firsts)} GGUF models: {listed}",
            "give the path of one of the files",
            context={"files": firsts},
        )
    if models:
        raise bad(folder, f"holds parts of a GGUF model without the first part: {shown(models[0])}")
    return _open_other_safetensors(folder, names, safetensors)


def _open_other_safetensors(folder: Path, names: set[str], safetensors: list[str]) -> Checkpoint:
    """Open a folder without the usual file names: one safetensors file under another name, else raise why not."""
    if "params.json" in names and any(name.startswith("consolidated") for name in safetensors):
        what = "holds a model in Mistral's own layout (params.json, consolidated.safetensors), which is not supported"
        hint = "download the files with config.json from the same repository"
        raise bad(folder, what, hint=hint, error=UnsupportedFormat)
    if "adapter_config.json" in names:
        what = "holds a LoRA adapter, not a model"
        hint = "give its base model, and the adapter with --adapter NAME=PATH"
        raise bad(folder, what, hint=hint, error=UnsupportedFormat)
    if safetensors and "config.json" not in names:
        raise bad(folder, "is missing next to the safetensors files", key="config.json")
    if len(safetensors) == 1 and not _PART.match(safetensors[0]):
        return _open_parts(folder, [folder / safetensors[0]], names)
    if safetensors:
        raise bad(folder, f"is missing next to {len(safetensors)} safetensors files", key=INDEX_NAME)
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if pickles:
        raise pickle_error(folder / pickles[0])
    raise ModelNotFound(
        f"{shown(folder, 500)} holds no model (no .safetensors or .gguf)",
        "`localllm ls` lists the models on this machine",
    )


def _names(folder: Path) -> set[str]:
    names: set[str] = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names.add(entry.name)
                if len(names) > MAX_FOLDER_ENTRIES:
                    what = f"holds more than {MAX_FOLDER_ENTRIES:,} files"
                    raise bad(folder, what, hint="give the model's own folder")
    except OSError as error:
        raise bad(folder, f"cannot be listed: {error.strerror}", hint="check its owner and permissions") from error
    return names


def inside(folder: Path, name: str) -> Path:
    """Return `folder / name` if it resolves to a file in the folder or in the blobs of its repository in the hub cache.

    Raises BadModelFile otherwise.
    """
    path = folder / name
    try:
        home, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise bad(path, f"is a link that leads nowhere: {error}", hint=_COPY) from error
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if any(target.is_relative_to(root) for root in allowed):
        return path
    raise bad(path, f"is a link that leaves the folder: {shown(target)}", hint=_COPY)


def _open_gguf(path: Path, beside: dict[str, Path] | None = None) -> Checkpoint:
    """Open a GGUF file with its splits; `beside` are the tokenizer files in its folder."""
    part = _PART.match(path.name)
    named = max(int(part[3]), 1) if part else 1
    if part:
        path = path.with_name(f"{part[1]}-00001-of-{part[3]}.gguf")
    files = {path: MappedFile(path)}
    tensors, metadata = read_gguf(files[path])
    count = max(Fields(path, metadata).integer("split.count", 0, MAX_PARTS, 1), 1)
    if count != named:
        raise bad(path, f"is {count}; the file name says {named}", key="split.count")
    if count > 1:
        _check_split(path, metadata, {"split.no": 0})
    for number in range(2, count + 1):
        other = path.with_name(path.name.replace("-00001-of-", f"-{number:05d}-of-"))
        if not other.exists():
            what = f"part {number} of {count} is missing: {shown(other.name)}"
            raise bad(path, what, hint="download all parts of the model")
        files[other] = MappedFile(other)
        more, values = read_gguf(files[other])
        _check_split(other, values, {"split.no": number - 1, "split.count": count})
        _add(tensors, more)
    if count > 1 and "split.tensors.count" in metadata:
        _check_split(path, metadata, {"split.tensors.count": len(tensors)})
    return Checkpoint(path, "gguf", tensors, files, metadata, tokenizer_files=beside or {})


def _check_split(path: Path, metadata: dict[str, Any], expected: dict[str, int]) -> None:
    fields = Fields(path, metadata)
    for key, value in expected.items():
        found = fields.integer(key, 0, 1 << 31)
        if found != value:
            raise fields.fail(key, f"is {found:,}, expected {value:,}")


def _add(tensors: dict[str, TensorInfo], more: dict[str, TensorInfo]) -> None:
    """Add another file's tensors. Raises BadModelFile for a tensor that is in both."""
    for name, info in more.items():
        if name in tensors:
            raise bad(info.file, f"the tensor is also in {tensors[name].file.name}", key=name)
        tensors[name] = info


def _open_safetensors_file(path: Path) -> Checkpoint:
    folder = path.parent
    names = _names(folder) if folder.is_dir() else set()
    if _PART.match(path.name) and INDEX_NAME in names:
        return _open_sharded(folder, names)
    if "config.json" not in names:
        read_safetensors(MappedFile(path))  # report damage first
        what = "is missing next to it: the tensors alone do not identify the model"
        raise bad(path, what, key="config.json", hint="give the folder of the whole model", error=UnsupportedFormat)
    return _open_parts(folder, [path], names)


def _open_sharded(folder: Path, names: set[str]) -> Checkpoint:
    index_path = inside(folder, INDEX_NAME)
    index = read_json_object(index_path, MAX_INDEX_BYTES, 4 * MAX_INDEX_ENTRIES, unique=True)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad(index_path, "must map tensor names to files", key="weight_map")
    if len(weight_map) > MAX_INDEX_ENTRIES:
        raise bad(index_path, f"has {len(weight_map):,} entries; the limit is {MAX_INDEX_ENTRIES:,}", key="weight_map")
    for name, shard in weight_map.items():
        # must be a plain file name that cannot lead elsewhere on any system
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and shard.isprintable()
        if not plain or "/" in shard or "\\" in shard or ":" in shard or shard.startswith(".") or len(shard) > 255:
            what = f"'{shown(shard)}' is not the name of a safetensors file in the folder"
            raise bad(index_path, what, key=f"weight_map.{name}")
    shards = sorted(set(weight_map.values()))
    if WHOLE_NAME in names and WHOLE_NAME not in shards:  # an index left over from another model
        return _open_parts(folder, [folder / WHOLE_NAME], names)
    if len(shards) > MAX_PARTS:
        raise bad(index_path, f"names {len(shards):,} files; the limit is {MAX_PARTS:,}", key="weight_map")
    missing = [shard for shard in shards if shard not in names]
    if missing:
        what = f"{len(missing)} of {len(shards)} files are missing, first {shown(missing[0])}"
        raise bad(index_path, what, key="weight_map", hint="`localllm pull NAME --repair` fetches the missing files")
    checkpoint = _open_parts(folder, [folder / shard for shard in shards], names)
    for name, shard in weight_map.items():
        info = checkpoint.tensors.get(name)
        if info is None or info.file.name != shard:
            raise bad(folder / shard, f"{INDEX_NAME} lists the tensor, but it is not in this file", key=name)
    return checkpoint


def _open_parts(folder: Path, paths: list[Path], names: set[str]) -> Checkpoint:
    for path in paths:
        inside(folder, path.name)
    if "config.json" not in names:
        raise bad(folder, "is missing next to the safetensors files", key="config.json")
    config = read_json_object(inside(folder, "config.json"), infinite=True)
    generation: dict[str, Any] = {}
    if "generation_config.json" in names:
        generation = read_json_object(inside(folder, "generation_config.json"))
    quantization = _quantization_config(folder, names, config)
    files, tensors = {path: MappedFile(path) for path in paths}, dict[str, TensorInfo]()
    for file in files.values():
        _add(tensors, read_safetensors(file))
    modules = TextModules()
    if MODULES_NAME in names:
        modules = read_text_modules(inside(folder, MODULES_NAME), partial(inside, folder))
    for projection in modules.projections:
        part = projection.name.partition(".")[0]
        path = inside(folder, f"{part}/model.safetensors")
        files[path] = MappedFile(path)
        found = {f"{part}.{name}": info for name, info in read_safetensors(files[path]).items()}
        _add(tensors, {name: replace(info, name=name) for name, info in found.items()})
    return Checkpoint(
        folder,
        "safetensors",
        tensors,
        files,
        config=config,
        generation_config=generation,
        quantization_config=quantization,
        tokenizer_files=_tokenizer_files(folder, names),
        license=_license(folder, names),
        text_modules=modules,
    )


def _quantization_config(folder: Path, names: set[str], config: dict[str, Any]) -> dict[str, Any]:
    """The quantization config from the first of the places where tools write it; {} for none."""
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, dict) else {}
    places = (("quantization_config", config), ("quantization_config", inner), ("compression_config", config))
    for key, holder in places:
        if holder.get(key) is not None:
            if not isinstance(holder[key], dict):
                raise bad(folder / "config.json", "must be an object", key=key)
            return dict(holder[key])
    for name in _QUANTIZATION_FILES:
        if name in names:
            found = read_json_object(inside(folder, name))
            return {"source_file": name, **found}
    return {}


def _tokenizer_files(folder: Path, names: set[str]) -> dict[str, Path]:
    return {name: inside(folder, name) for name in TOKENIZER_FILES if name in names}


def _license(folder: Path, names: set[str]) -> str:
    """The `license:` line in the model card's front matter; "" when there is none."""
    if "README.md" not in names:
        return ""
    try:
        text = read_small(inside(folder, "README.md"), 1 << 20)[: 1 << 14].decode("utf-8", "replace")
    except (BadModelFile, ModelNotFound):
        return ""  # the model is usable without a readable card
    front = re.match(r"---\r?\n(.*?)\n---", text, re.DOTALL)
    line = re.search(r"^license(?:_name)?:[ \t]*([^\r\n]{1,100})", front[1], re.MULTILINE) if front else None
    return shown(line[1].strip().strip("'\"")) if line else ""
