"""Reads model files without torch: opens a checkpoint and gives access to its tensors and raw fields.

checkpoint = open_checkpoint("model.gguf")      a .gguf file, or a folder with safetensors or one .gguf
checkpoint.tensors["token_embd.weight"].shape, checkpoint.read("token_embd.weight"), checkpoint.metadata
stored_formats(checkpoint)                      the stored format of each linear module
"""

from .checkpoint import Checkpoint
from .formats import stored_formats
from .formats.module import StoredFormat
from .mapped_file import TensorInfo
from .opening import open_checkpoint

__all__ = ["Checkpoint", "StoredFormat", "TensorInfo", "open_checkpoint", "stored_formats"]
