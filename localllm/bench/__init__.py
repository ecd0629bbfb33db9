"""Measuring: our engine alone, beside another engine on the same files, or beside any OpenAI endpoint.

throughput  tests in llama-bench's words, taken in turns with a peer      peer     llama.cpp or transformers, as a child
load      many requests together: ours, or an endpoint                  trace    one step as a Chrome trace
results   rows, versions, memory, files
"""

from .throughput import BenchOptions, prompt_words, run_bench
from .results import BenchResult, BenchRow, PeerResult, rss_anon_bytes, save

__all__ = [
    "BenchOptions",
    "BenchResult",
    "BenchRow",
    "PeerResult",
    "prompt_words",
    "rss_anon_bytes",
    "run_bench",
    "save",
]
