"""A stored format is two files of one name: `checkpoint/formats/` tells it by its tensors, `quant/` loads it."""

from __future__ import annotations

from localllm.checkpoint.formats import FORMATS, gguf
from localllm.quant.load import LOADERS


def test_each_format_is_detected_and_loaded_under_one_name() -> None:
    detected = {one.__name__.rpartition(".")[2] for one in (*FORMATS, gguf)}
    loaded = {loader.__module__.rpartition(".")[2] for loader in LOADERS.values()}
    assert detected == loaded
