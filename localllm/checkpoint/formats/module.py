"""`StoredFormat`: how one linear module is stored; and the module's tensors as detection sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localllm.errors import BadModelFile, UnsupportedFormat

from .checkpoint import Checkpoint
from .mapped_file import bad
from .tensor_info import TensorInfo

WOULD_WORK = "fetch a BF16, FP8, AWQ, GPTQ, NVFP4 or GGUF version of this model"


@dataclass(frozen=True)
class StoredFormat:
    """How one linear module is stored. Suffixes in `params` name the tensor `module.suffix`.

    kind             params (beside what `shape` says)
    dense            dtype
    gguf             type; scale: name of the NVFP4 sidecar tensor, or None
    awq_gemm         bits 4, group_size, zero_point: bool (False: z = 8)
    awq_gemv         the same
    awq_gemv_fast    the same; qzeros holds -(scale * zero)
    gptq             bits, group_size, sym: bool | None (None: unknown, look at qzeros), v2: bool, g_idx: bool
    ct_pack          bits, group_size, zero_point: None | "packed" | "plain" (int8 [N, K/g]), g_idx: bool,
                     dense: bool (False: floor(32 / bits) values a word)
    ct_nvfp4         weight_packed, weight_scale, weight_global_scale (divides)
    modelopt_nvfp4   weight, weight_scale, weight_scale_2 (multiplies)
    ct_mxfp4         weight: suffix of the codes ("weight_packed"); weight_scale U8
    modelopt_int4    group_size; weight U8 [N/2, K]
    ct_int8          scale: suffix
    fp8, ct_fp8      scale: suffix (multiplies); block: (rows, columns) | None
    mxfp8            scale: suffix, U8 [N, K/32]
    gptoss_mxfp4     blocks, scales: names of the tensors; shape is one expert's, experts their number
    All may have     bias, pre_quant_scale, input_scale: suffix or None
    """

    kind: str
    shape: tuple[int, int] | None = None
    """(N, K) of the weight it stands for; None where the tensors alone do not say."""
    params: dict[str, Any] = field(default_factory=dict)


class Module:
    """One module prefix with the tensors below it, and the config that may resolve ambiguities."""

    def __init__(self, model: Checkpoint, name: str, tensors: Mapping[str, TensorInfo]) -> None:
        """`tensors` by their last name component."""
        self.model = model
        self.name = name
        self.tensors = tensors
        self.config = model.quantization_config

    def get(self, suffix: str) -> TensorInfo | None:
        """The tensor under `suffix`, if stored."""
        return self.tensors.get(suffix)

    def need(self, suffix: str, because: str) -> TensorInfo:
        """The tensor under `suffix`; BadModelFile when missing: a scale is never assumed to be 1."""
        info = self.tensors.get(suffix)
        if info is None:
            raise self.bad(f"{self.name}.{suffix}", f"is missing, {because} cannot be read without it")
        return info

    def ints(self, suffix: str, count: int) -> list[int] | None:
        """The values of a small I64 or I32 tensor; None when it is absent or of another size."""
        info = self.tensors.get(suffix)
        width = {"I64": 8, "I32": 4}.get(info.dtype, 0) if info else 0
        if info is None or width * count != info.nbytes:
            return None
        return np.frombuffer(self.model.read(info.name).tobytes(), f"<i{width}").tolist()

    def suffix(self, *names: str) -> str | None:
        """The first of `names` that is stored."""
        return next((name for name in names if name in self.tensors), None)

    def common(self) -> dict[str, Any]:
        """The optional companions every kind may have."""
        return {
            "bias": self.suffix("bias"),
            "pre_quant_scale": self.suffix("pre_quant_scale"),
            "input_scale": self.suffix("input_scale", "input_global_scale", "activation_scale"),
        }

    def made(self, kind: str, shape: tuple[int, int] | None, **params: Any) -> StoredFormat:
        """A StoredFormat with the common params added."""
        return StoredFormat(kind, shape, {**self.common(), **params})

    def expect(self, suffix: str, *shapes: tuple[int, ...]) -> None:
        """Refuse `module.suffix` when its shape is none of `shapes`."""
        info = self.tensors[suffix]
        if info.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.bad(info.name, f"has shape {list(info.shape)}, {wanted} is expected")

    def matrix(self, suffix: str) -> tuple[int, int]:
        """The shape of `module.suffix`, which must have two dimensions."""
        info = self.tensors[suffix]
        if len(info.shape) != 2:
            raise self.bad(info.name, f"has shape {list(info.shape)}, two dimensions are expected")
        return info.shape[0], info.shape[1]

    def bad(self, key: str, what: str) -> BadModelFile:
        """The error for a damaged module."""
        file = next(iter(self.tensors.values())).file
        return bad(file, what, key=key)

    def unsupported(self, what: str) -> UnsupportedFormat:
        """The refusal of a format by name, with what would work."""
        file = next(iter(self.tensors.values())).file
        error = bad(file, what, key=self.name, hint=WOULD_WORK, error=UnsupportedFormat)
        assert isinstance(error, UnsupportedFormat)
        return error

    def setting(self, *names: str) -> Any:
        """The first of `names` in the quantisation config."""
        return next((self.config[name] for name in names if self.config.get(name) is not None), None)
