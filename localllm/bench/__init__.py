"""Measuring: our engine alone, beside another engine on the same files, or beside any OpenAI endpoint.

throughput  tests in llama-bench's words, taken in turns with a peer    peer   llama.cpp or transformers, as a child
load        many requests together: ours, or an endpoint                trace  one step as a Chrome trace
results     rows, versions, memory, files
"""

from .results import BenchResult, BenchRow, PeerResult, save
from .throughput import BenchOptions, run_bench, words

__all__ = ["BenchOptions", "BenchResult", "BenchRow", "PeerResult", "run_bench", "save", "words"]
