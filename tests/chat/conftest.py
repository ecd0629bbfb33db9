"""The starter model's tokenizer, where its file is on disk, and one render child per test file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localllm.chat.render_child import RenderChild
from localllm.checkpoint.opening import open_checkpoint
from localllm.paths import models_dir
from localllm.tokenizer.files import load_tokenizer
from localllm.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Tokenizer:
    path = models_dir() / "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip("the starter model is not on this machine")
    with open_checkpoint(path) as ckpt:
        return load_tokenizer(ckpt)


@pytest.fixture(scope="module")
def child() -> Iterator[RenderChild]:
    made = RenderChild()
    made.start()
    yield made
    made.close()
