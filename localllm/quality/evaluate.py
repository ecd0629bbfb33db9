"""Quality evaluation: measures on a text what a weight format and a KV format cost.

Both models read the same tokens. For each token, p is the reference's distribution of the next token, q the model's:

    perplexity   exp(mean of -log q(next token)), and the reference's own
    KL           sum p (log p - log q): its mean and its tail, the 99th and 99.9th percentile
    agreement    fraction of tokens where both have the same most likely next token

The mean hides rare tokens that go wrong; the tail shows them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np

from localllm.errors import Aborted, InvalidRequest
from localllm.llm.llm import LLM
from localllm.paths import replace_file
from localllm.plan.quality import folder
from localllm.request import LoadProgress, OnProgress

WINDOW = 512  # tokens per window; each window starts without context
ROWS = 64  # rows of logits held at once: 67 MB for a vocabulary of 262k, and as much again for the reference
CONTEXT_FREE = 32  # uncounted tokens at the start of a window: without context, every model guesses
MIN_TOKENS = CONTEXT_FREE + 2


@dataclass(frozen=True, slots=True)
class Quality:
    """Result of an evaluation. `kl_*` and `agreement` are None without a reference."""

    model: str
    reference: str
    weights: str  # stored format
    kv: str
    tokens: int  # counted tokens
    perplexity: float
    reference_perplexity: float | None = None
    kl_mean: float | None = None
    kl_p99: float | None = None
    kl_p999: float | None = None
    kl_max: float | None = None
    agreement: float | None = None
    text: str = "sample"  # name of the text
    seconds: float = 0.0
    path: str = ""  # path of the model's files
    activations: str = ""  # format to which activations were rounded


def sample_text(part: Literal["evaluation", "calibration"]) -> str:
    """Return half of the public-domain text in the package; calibration and evaluation use different halves."""
    paragraphs = files(__package__).joinpath("sample.txt").read_text(encoding="utf-8").strip().split("\n\n")
    return "\n\n".join(paragraphs[0::2] if part == "evaluation" else paragraphs[1::2])


def evaluate(
    model: LLM,
    reference: LLM | None,
    text: str,
    *,
    max_tokens: int = 4096,
    text_name: str = "sample",
    tell: OnProgress = lambda phase: None,
    cancel: threading.Event | None = None,
) -> Quality:
    """Measure `model` against `reference` (None: perplexity only) on the first `max_tokens` of `text`.

    Raises InvalidRequest if the text has fewer than MIN_TOKENS tokens or the models have different vocabularies,
    Aborted when `cancel` is set.
    """
    began = time.monotonic()
    ids = model.tokenizer.encode(text)[:max_tokens]
    if len(ids) < MIN_TOKENS:
        raise InvalidRequest(
            f"the text has {len(ids)} tokens; at least {MIN_TOKENS} are needed", "pass a longer text with --text FILE"
        )
    if reference is not None and not _same_vocabulary(model, reference):
        raise InvalidRequest(
            f"{model.name} and {reference.name} have different vocabularies: their distributions cannot be compared",
            "compare with another version of the same model",
        )
    parts, sums = list(windows(ids, model)), _Sums()
    if not parts:
        raise InvalidRequest(
            f"a context of {model.plan.ctx} tokens is too small; at least {MIN_TOKENS} are needed", "use a larger --ctx"
        )
    total = sum(len(part) - 1 - CONTEXT_FREE for part in parts)
    for window in parts:
        for targets, q, p in _rows(window, model, reference):
            if cancel is not None and cancel.is_set():
                raise Aborted("stopped; nothing was saved")
            sums.add(targets, q, p)
            tell(LoadProgress("evaluate", sums.counted, total, f"perplexity {sums.perplexity:.2f}"))
    return Quality(
        model=model.name,
        reference=reference.name if reference is not None else "",
        weights=model.weight_format,
        kv=model.plan.kv,
        tokens=sums.counted,
        perplexity=sums.perplexity,
        text=text_name,
        seconds=round(time.monotonic() - began, 2),
        path=str(model.path),
        activations=model.plan.activations,
        **sums.against_reference(),
    )


def _rows(
    window: list[int], model: LLM, reference: LLM | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Yield for the counted tokens of a window: (next tokens [n], log-probabilities [n, vocab], the reference's)."""
    ours = model.score(window, chunk=ROWS)
    theirs = repeat(None) if reference is None else reference.score(window, chunk=ROWS)
    row = 0
    for q, p in zip(ours, theirs, strict=reference is not None):
        first, last = max(row, CONTEXT_FREE), min(row + len(q), len(window) - 1)  # the last row has no next token
        rows = slice(first - row, last - row)
        row += len(q)
        if last > first:
            yield np.asarray(window[first + 1 : last + 1]), q[rows], None if p is None else p[rows]


class _Sums:
    """Sums over the tokens."""

    def __init__(self) -> None:
        self.loss = self.base_loss = 0.0
        self.counted = self.agreed = 0
        self.kl: list[np.ndarray] = []

    def add(self, targets: np.ndarray, q: np.ndarray, p: np.ndarray | None) -> None:
        kept = np.arange(len(targets))
        self.loss -= float(q[kept, targets].sum(dtype=np.float64))
        self.counted += len(targets)
        if p is not None:
            self.base_loss -= float(p[kept, targets].sum(dtype=np.float64))
            self.kl.append(divergence(p, q))
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.counted)

    def against_reference(self) -> dict[str, float]:
        """The fields of `Quality` that need a reference; {} without one."""
        if not self.kl:
            return {}
        found = np.concatenate(self.kl)
        p99, p999 = np.quantile(found, (0.99, 0.999)).tolist()
        return {
            "reference_perplexity": math.exp(self.base_loss / self.counted),
            "kl_mean": float(found.mean()),
            "kl_p99": p99,
            "kl_p999": p999,
            "kl_max": float(found.max()),
            "agreement": self.agreed / self.counted,
        }


def windows(ids: Sequence[int], model: LLM) -> Iterator[list[int]]:
    """Split the text into windows, each beginning with BOS if the model uses it."""
    bos = model.tokenizer.bos_token_id
    lead = [bos] if model.tokenizer.add_bos and bos is not None else []
    size = min(WINDOW, model.plan.ctx) - len(lead)
    for at in range(0, len(ids), size):
        part = [*lead, *ids[at : at + size]]
        if len(part) >= MIN_TOKENS:
            yield part


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) per row: from log-probabilities, float32 [rows, vocab], to float64 [rows], clamped to at least 0."""
    return np.maximum((np.exp(p) * (p - q)).sum(-1, dtype=np.float64), 0.0)


def _same_vocabulary(model: LLM, reference: LLM) -> bool:
    probe = "The quick brown fox: 12,345 naïve λ-terms\n\tдоброе утро"
    same_size = model.facts.vocab_size == reference.facts.vocab_size
    return same_size and model.tokenizer.encode(probe) == reference.tokenizer.encode(probe)


def save(quality: Quality) -> Path:
    """Save a result, replacing an older one of the same model, formats, text and reference."""
    parts = (quality.model, quality.weights, quality.kv, quality.text, quality.reference, quality.activations)
    against = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
    name = re.sub(r"[^\w.-]+", "-", "_".join(parts[:4]))[:170] + f"_{against}"
    path = folder() / f"{name}.json"
    replace_file(path, json.dumps({"schema": "localllm.quality/1", **asdict(quality)}, indent=2))
    return path
