"""`load_weight`: a stored linear layer in any supported format -> its canonical `Weight`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from localllm.kernels import Weight

from .awq import load_gemm, load_gemv, load_gemv_fast
from .compressed_tensors import load_pack
from .dense import load_dense
from .fp8 import load_fp8, load_mxfp8
from .gguf import load_gguf
from .gptq import load_gptq
from .int8 import load_int8
from .modelopt_int4 import load_modelopt_int4
from .mxfp4 import load_mxfp4
from .nvfp4 import load_nvfp4
from .stored import WeightReader

if TYPE_CHECKING:
    from localllm.checkpoint.checkpoint import Checkpoint
    from localllm.checkpoint.formats.module import StoredFormat

LOADERS: dict[str, Callable[[WeightReader, dict], Weight]] = {
    "dense": load_dense,
    "gguf": load_gguf,
    "awq_gemm": load_gemm,
    "awq_gemv": load_gemv,
    "awq_gemv_fast": load_gemv_fast,
    "gptq": load_gptq,
    "ct_pack": load_pack,
    "nvfp4": load_nvfp4,
    "mxfp4": load_mxfp4,
    "modelopt_int4": load_modelopt_int4,
    "int8": load_int8,
    "fp8": load_fp8,
    "mxfp8": load_mxfp8,
}


def load_weight(ckpt: Checkpoint, prefix: str, stored: StoredFormat, shape: tuple[int, int]) -> Weight:
    """Load one linear layer in canonical form (see `kernels/weight.py`), on the CPU.

    prefix   module name in the file, without `.weight`
    stored   its format, from `checkpoint.stored_formats`
    shape    (N, K) expected from the model's configuration

    Tensors may be views of the mapped file and must not be written to. Besides the result, peak memory is one stored
    tensor plus about 10 MB. Raises BadModelFile for missing tensors, wrong dtypes or shapes, or invalid scales, and
    UnsupportedFormat for an unsupported variant.
    """
    return LOADERS[stored.kind](WeightReader(ckpt, prefix, shape), stored.params)
