"""`StoredFormat`, the stored format of a linear module, and `StoredModule`, its tensors for format detection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localllm.errors import BadModelFile, UnsupportedFormat

from ..checkpoint import Checkpoint
from ..mapped_file import TensorInfo, bad

DENSE = {"BF16": "bf16", "F16": "fp16", "F32": "f32", "F64": "f64"}  # unquantized dtypes -> label
HINT = "download a BF16, FP8, AWQ, GPTQ, NVFP4 or GGUF version of this model"  # for unsupported layouts
POWERS_OF_TWO = ("U8", "F8_E8M0")  # dtypes of MX scales


@dataclass(frozen=True)
class StoredFormat:
    """The stored format of one linear module. `kind` and `params` are documented in the format's file."""

    kind: str  # selects the loader in `quant.load`
    label: str  # common name: bf16, awq, nvfp4, Q4_K, ...
    shape: tuple[int, int]  # (N, K) of the decoded weight, or of one expert's
    params: dict[str, Any] = field(default_factory=dict)  # parameters for the loader; suffixes name tensors


@dataclass(frozen=True)
class StoredModule:
    """A module prefix and the tensors below it; the model's config may resolve ambiguities."""

    model: Checkpoint
    name: str
    tensors: Mapping[str, TensorInfo]  # by their last name component

    def get(self, suffix: str) -> TensorInfo | None:
        return self.tensors.get(suffix)

    def dtype(self, suffix: str) -> str:
        info = self.tensors.get(suffix)
        return info.dtype if info else ""

    def need(self, suffix: str, because: str) -> TensorInfo:
        """The tensor under `suffix`. Raises BadModelFile if it is missing: a scale is never assumed to be 1."""
        info = self.tensors.get(suffix)
        if info is None:
            raise self.bad(self.tensor(suffix), f"is missing; {because} cannot be read without it")
        return info

    def tensor(self, suffix: str) -> str:
        """The full tensor name; a suffix that starts with `_` is appended without a dot."""
        return self.name + (suffix if suffix.startswith("_") else f".{suffix}")

    def ints(self, suffix: str, count: int) -> list[int] | None:
        """The values of a small I64 or I32 tensor; None if it is absent or has another size."""
        info, width = self.tensors.get(suffix), {"I64": 8, "I32": 4}.get(self.dtype(suffix), 0)
        if info is None or width * count != info.nbytes:
            return None
        return np.frombuffer(self.model.read(info.name).tobytes(), f"<i{width}").tolist()

    def suffix(self, *names: str) -> str | None:
        """The first of `names` that exists."""
        return next((name for name in names if name in self.tensors), None)

    def expect(self, suffix: str, *shapes: tuple[int, ...]) -> None:
        """Raise BadModelFile unless the tensor under `suffix` has one of `shapes`."""
        info = self.tensors[suffix]
        if info.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.bad(info.name, f"has shape {list(info.shape)}, expected {wanted}")

    def matrix(self, suffix: str) -> tuple[int, int]:
        """The shape of the tensor under `suffix`, which must have two dimensions."""
        info = self.tensors[suffix]
        if len(info.shape) != 2:
            raise self.bad(info.name, f"has shape {list(info.shape)}, expected two dimensions")
        return info.shape[0], info.shape[1]

    def bad(self, key: str, what: str) -> BadModelFile:
        return bad(next(iter(self.tensors.values())).file, what, key=key)

    def unsupported(self, what: str) -> UnsupportedFormat:
        """The error for an unsupported format, with the supported ones as the hint."""
        return bad(next(iter(self.tensors.values())).file, what, key=self.name, hint=HINT, error=UnsupportedFormat)

    def group_size(self, key: str, k: int, groups: int, stated: Iterable[object]) -> int:
        """Inputs per group (the last group may be shorter): the one of `stated` that results in that many groups.

        If none does, all groups are equal. Raises BadModelFile for tensor `key` if that is impossible or two sizes fit.
        """
        sizes = {size for one in stated if (size := positive(one))}
        found = {min(size, k) for size in sizes if -(-k // size) == groups}
        if len(found) == 1:
            return found.pop()
        if not found and groups > 0 and k % groups == 0:
            return k // groups
        why = f"the stated group sizes {sorted(sizes)} do not determine them" if sizes else "no group size is stated"
        raise self.bad(self.tensor(key), f"has {groups} groups for {k} inputs, and {why}")

    def setting(self, *names: str) -> Any:
        config = self.model.quantization_config
        return next((config[name] for name in names if config.get(name) is not None), None)


def positive(value: object) -> int | None:
    """The setting if it is a whole number above 0, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
