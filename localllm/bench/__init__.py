"""Benchmarks: our engine alone, against another engine on the same files, or against any OpenAI endpoint.

throughput  llama-bench's tests, alternating with a peer    peer   llama.cpp or transformers in a child process
load        concurrent requests, ours or an endpoint's      trace  one step as a Chrome trace
results     rows, versions, memory, files
"""

from .results import BenchResult, BenchRow, PeerResult, save
from .throughput import BenchOptions, run_bench, words

__all__ = ["BenchOptions", "BenchResult", "BenchRow", "PeerResult", "run_bench", "save", "words"]
