"""localllm: run open-weight language models on one workstation.

Public names are imported lazily: `import localllm` does not load torch.
"""

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from localllm import program
    from localllm.llm.async_llm import AsyncLLM
    from localllm.llm.llm import LLM

    from .request import SamplingParams

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__", "program"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from localllm.llm.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from localllm.llm.async_llm import AsyncLLM

        return AsyncLLM
    if name == "SamplingParams":
        from .request import SamplingParams

        return SamplingParams
    if name == "program":
        from importlib import import_module

        return import_module("localllm.program")
    raise AttributeError(f"module 'localllm' has no attribute {name!r}")
