"""What is in a model's files, without torch: open one, and ask for tensors, metadata and facts.

checkpoint = open_checkpoint("model.gguf")      a .gguf file, or a folder with safetensors or one .gguf
checkpoint.facts.num_layers, checkpoint.tensors["token_embd.weight"].shape, checkpoint.read("token_embd.weight")
stored_formats(checkpoint)                      how each linear module is stored
"""

from .checkpoint import Checkpoint
from .detect import stored_formats
from .facts import ModelFacts, RopeFacts, kv_bytes_per_token
from .gguf_file import StringArray
from .names import SourceNames
from .opening import open_checkpoint
from .stored_format import StoredFormat
from .tensor_info import TensorInfo

__all__ = [
    "Checkpoint",
    "ModelFacts",
    "RopeFacts",
    "SourceNames",
    "StoredFormat",
    "StringArray",
    "TensorInfo",
    "kv_bytes_per_token",
    "open_checkpoint",
    "stored_formats",
]
