"""`Sequence`: one answer in progress, with its tokens, pages and counters. No torch."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import Counter
from enum import Enum
from typing import Any

from localllm.request import FinishReason, Request, SamplingParams, StopCheck, TokenLogprob, TokenMask

from .radix_cache import Node

# most tokens of a decoding sequence in one step: the last sampled one and tokens forced after it by a grammar
MAX_DECODE_TOKENS = 64

_numbers = itertools.count(1)


class SequenceState(Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Answer `index` of a request. `token_ids` is prompt plus output; the first `num_computed_tokens` have K/V."""

    def __init__(self, request: Request, index: int, num_groups: int, seed: int, max_tokens: int) -> None:
        self.request = request
        self.index = index
        self.seed = seed  # the request's seed + index
        self.max_tokens = max_tokens  # clamped to the context
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens taken from the prefix tree at first admission
        self.state = SequenceState.WAITING
        self.number = next(_numbers)  # unique in this process
        # page ids per group; -1 for pages outside the sliding window
        self.block_tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.table_version = 0  # incremented with every change of `block_tables`
        self.first_kept: list[int] = [0] * num_groups  # per group: pages before this index were released
        self.node: Node | None = None  # the tree node of its last full page in the tree
        self.num_tree_pages = 0  # number of its full pages in the tree
        self.slot = -1  # slot of its recurrent state; -1 for none
        self.spare = -1  # slot with its state from before the draft tokens of the current step; -1 for none
        self.checkpoint: tuple[int, int] | None = None  # (tokens, slot) of the checkpoint that the current step writes
        self.num_kept_tokens = 0  # tokens at the last checkpoint that it wrote or started from
        self.answer_checkpoint: Node | None = None  # the node with its latest checkpoint after the prompt
        self.adapter: Any = None  # an `adapters.Adapter`; None for the plain model
        self.place = -1  # place of its adapter's weights; -1 while they are not resident
        self.stop_check: StopCheck | None = request.stop_check
        self.token_mask: TokenMask | None = request.token_mask
        # mask of the next token: int32 [ceil(vocab / 32)], None if all are allowed, or the mask's exception
        self.mask_row: Any = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.output_counts: Counter[int] = Counter()
        self.num_respelled = 0  # sampled tokens replaced by another encoding of the same text
        self.prompt_logprobs: list[TokenLogprob | None] = []
        # prompt rows already processed (log-probabilities, pooling) or not needed; survives preemption
        self.num_rows_done = self._first_row
        self.pooled: Any = None  # float32 [hidden]: the sum of the processed rows, or the first or last of them
        self.num_preemptions = 0
        self.places: Any = None  # n-gram index of its tokens (`drafter`)
        self.speculation: Any = None  # per drafter: the last guess, and how often guesses were right
        self.heard: Any = None  # hidden states for a drafter that reads them (`mtp`, `assistant`, `dflash`)
        self.num_draft_tokens = 0  # draft tokens verified
        self.num_accepted_tokens = 0  # draft tokens accepted
        self.drafters: dict[str, None] = {}  # names of their drafters
        self.is_loading = False  # pages of its prompt are being read from files
        self.is_paused = False  # not scheduled until its reader catches up
        self.shift = sum(image.shift for image in request.images)  # position offset after the prompt's images
        self._cache_ids: list[int] | None = None  # cache key of the prompt up to its last image
        self._seen: set[int] | None = None
        self._seen_order: array[int] = array("q")
        self.pending_forks = 0  # children to fork once the prompt is computed
        self.order = 0  # arrival number; survives preemption
        self.submit_time = time.monotonic()
        self.start_time = 0.0
        self.prefill_time = 0.0  # time at which the prompt was computed
        self.first_token_time = 0.0
        self.last_token_time = 0.0

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens without K/V: 1 while decoding, more during prefill."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """True while it generates its answer; False during prefill, including recomputation after a preemption."""
        return self.num_output_tokens > 0 and self.num_uncomputed_tokens <= MAX_DECODE_TOKENS

    @property
    def cache_salt(self) -> str:
        """The salt of its cached pages: the request's salt plus the adapter."""
        salt = self.request.cache_salt
        return salt if self.adapter is None else f"\0{self.adapter.digest}\0{salt}"

    @property
    def waits_for_adapter(self) -> bool:
        return self.adapter is not None and self.place < 0

    @property
    def wants_all_rows(self) -> bool:
        """True while outputs of prompt rows (score, pooling, prompt logprobs) are still needed."""
        asked = self.request.only_reads or self.params.prompt_logprobs is not None
        return asked and self.num_rows_done < self.num_prompt_tokens

    @property
    def _first_row(self) -> int:
        """The first prompt row whose output is needed: the one before the first token with a log-probability."""
        return max(0, min(self.params.prompt_logprobs_from, len(self.request.prompt_token_ids)) - 1)

    @property
    def num_cacheable(self) -> int:
        """Number of tokens that may come from the cache: all but the last, or those before the first row needed."""
        return self._first_row if self.wants_all_rows else self.num_tokens - 1

    def cache_key(self, start: int, end: int) -> tuple[int, ...]:
        """The prefix cache key of tokens [start, end): token ids, with image tokens replaced by the image's keys."""
        images = self.request.images
        if not images or start >= images[-1].end:
            return tuple(self.token_ids[start:end])
        if self._cache_ids is None:
            self._cache_ids = self.token_ids[: images[-1].end]
            for image in images:
                self._cache_ids[image.start : image.end] = map(image.key, range(image.start, image.end))
        return (*self._cache_ids[start:end], *self.token_ids[images[-1].end : end])

    def whole_images(self, start: int, count: int) -> int:
        """`count` tokens from `start`, adjusted so as not to split an image with bidirectional attention."""
        for image in self.request.images:
            if not image.causal and image.start < start + count < image.end:
                return image.start - start if image.start > start else image.end - start
        return count

    def children(self) -> list[Sequence]:
        """Create the sequences of the other answers to the same prompt."""
        made = []
        for index in range(1, self.pending_forks + 1):
            child = Sequence(self.request, index, len(self.block_tables), self.seed + index, self.max_tokens)
            child.submit_time, child.start_time = self.submit_time, self.start_time
            child.stop_check = self.request.stop_check.fork() if self.request.stop_check else None
            child.token_mask = self.token_mask.fork() if self.token_mask else None
            child.mask_row = self.mask_row
            child.num_rows_done = child.num_prompt_tokens  # the first answer reports the prompt rows
            child.adapter, child.place = self.adapter, self.place
            made.append(child)
        return made

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_counts[token_id] += 1
        if self._seen is not None and token_id not in self._seen:
            self._seen.add(token_id)
            self._seen_order.append(token_id)

    def seen_ids(self) -> array[int]:
        """The distinct ids of prompt and output, updated incrementally: a long context adds no cost per token."""
        if self._seen is None:
            self._seen = set(self.token_ids)
            self._seen_order = array("q", sorted(self._seen))
        return self._seen_order

    def check_stop(self, token_id: int) -> None:
        """Set `finish_reason` if the token just appended ends the sequence."""
        params = self.params
        early = self.num_output_tokens < params.min_tokens
        found = self.stop_check is not None and self.stop_check.accept(token_id)
        if not early:
            if found:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = self.stop_check.stop_text if self.stop_check is not None else None
            elif token_id in params.stop_token_ids or not params.ignore_eos and token_id in self.request.eos_token_ids:
                self.finish_reason, self.stop_reason = FinishReason.STOP, token_id
        if self.finish_reason is None and self.token_mask is not None and self.token_mask.is_done:
            self.finish_reason = FinishReason.STOP  # the grammar is complete
        if self.finish_reason is None and self.num_output_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
