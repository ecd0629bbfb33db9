"""Stored weight formats: one module per format, each converting to the canonical forms of `kernels/weight.py`."""

from __future__ import annotations

from localllm.kernels import Weight
from localllm.kernels.dequant import dequantize, dequantize_rows

from .dense import read_dense
from .fuse import fuse, multiplied, reordered
from .load import load_weight

__all__ = ["Weight", "dequantize", "dequantize_rows", "fuse", "load_weight", "multiplied", "read_dense", "reordered"]
