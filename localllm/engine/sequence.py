"""One answer in flight: its tokens, its pages, its counters. No torch."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import Counter
from enum import Enum
from typing import Any

from localllm.request import FinishReason, Request, SamplingParams, StopCheck, TokenLogprob, TokenMask

from .radix_cache import Node

# tokens of a decoding sequence in one step: the one sampled last, and those that a grammar forced after it
MAX_DECODE_TOKENS = 64

_numbers = itertools.count(1)


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Answer number `index` of a request. `token_ids` is prompt plus output; `num_computed_tokens` of them have K/V."""

    def __init__(self, request: Request, index: int, num_groups: int, seed: int, max_tokens: int) -> None:
        self.request = request
        self.index = index
        self.seed = seed  # of this child: the request's seed + index
        self.max_tokens = max_tokens  # after clamping to the context
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens taken from the prefix tree at first admission
        self.state = SequenceState.WAITING
        self.number = next(_numbers)  # unique in this process
        # per group; -1 where a page fell out of the window
        self.block_tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.table_version = 0  # counts the changes of `block_tables`
        self.first_kept: list[int] = [0] * num_groups  # per group: pages before this index were given back
        self.node: Node | None = None  # the tree node of the last full page known to the tree
        self.num_tree_pages = 0  # full pages known to the tree
        self.slot = -1  # where its states are, of a model that keeps such; -1: nowhere
        self.spare = -1  # a slot with its states before the guessed tokens of the present step
        self.checkpoint: tuple[int, int] | None = None  # (tokens, slot) of the one that the present step writes
        self.num_kept_tokens = 0  # at the end of the last checkpoint that it took or began with
        self.answer_checkpoint: Node | None = None  # the node with the latest one behind its prompt
        self.adapter: Any = None  # what `adapters` knows it by; None: the model as it is
        self.place = -1  # where the weights of its adapter are; -1: nowhere yet
        self.stop_check: StopCheck | None = request.stop_check
        self.token_mask: TokenMask | None = request.token_mask
        # for the token sampled next: int32 [ceil(vocab / 32)], None when all are allowed, or what the mask raised
        self.mask_row: Any = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.output_counts: Counter[int] = Counter()
        self.num_respelled = 0  # tokens that came in place of the sampled ones
        self.prompt_logprobs: list[TokenLogprob | None] = []
        # prompt rows that were taken (log-probabilities, pooling) or are not wanted, kept through preemption
        self.num_rows_done = self._first_row
        self.pooled: Any = None  # float32 [hidden]: the sum of the rows taken, or the first or last of them
        self.num_preemptions = 0
        self.places: Any = None  # where its drafter finds its tokens again
        self.speculation: Any = None  # what was guessed for it last, and how good its guesses are
        self.heard: Any = None  # hidden states that the model's head is to read (`mtp.Heard`)
        self.num_draft_tokens = 0  # tokens guessed and checked
        self.num_accepted_tokens = 0  # those of them that were right
        self.drafters: dict[str, None] = {}  # who guessed them
        self.is_loading = False  # pages that its prompt begins with are being read from files
        self.is_paused = False  # its reader is behind: scheduled again when it caught up
        self.shift = sum(image.shift for image in request.images)  # of positions behind the prompt's images
        self._cache_ids: list[int] | None = None  # of the prompt up to its last image
        self._seen: set[int] | None = None
        self._seen_order: array[int] = array("q")
        self.pending_forks = 0  # children to split off when the prompt is computed
        self.order = 0  # arrival number, kept through preemption
        self.submit_time = time.monotonic()
        self.start_time = 0.0
        self.prefill_time = 0.0  # when the prompt was computed
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
        """Tokens whose K/V is still to be computed: 1 while decoding, more during prefill."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether it goes on with its answer, rather than reading its prompt, or all of it again after a preemption."""
        return self.num_output_tokens > 0 and self.num_uncomputed_tokens <= MAX_DECODE_TOKENS

    @property
    def cache_salt(self) -> str:
        """What it shares cached pages with others by: the salt that was asked for, and the adapter."""
        salt = self.request.cache_salt
        return salt if self.adapter is None else f"\0{self.adapter.digest}\0{salt}"

    @property
    def waits_for_adapter(self) -> bool:
        return self.adapter is not None and self.place < 0

    @property
    def wants_all_rows(self) -> bool:
        """Whether prompt rows that are computed are needed (score, pooling, prompt logprobs) and were not taken yet."""
        asked = self.request.only_reads or self.params.prompt_logprobs is not None
        return asked and self.num_rows_done < self.num_prompt_tokens

    @property
    def _first_row(self) -> int:
        """That is wanted of its prompt: the one before the first token that has a log-probability."""
        return max(0, min(self.params.prompt_logprobs_from, len(self.request.prompt_token_ids)) - 1)

    @property
    def num_cacheable(self) -> int:
        """Of its tokens those that may come from the cache: one is left to compute, or those whose rows are wanted."""
        return self._first_row if self.wants_all_rows else self.num_tokens - 1

    def cache_key(self, start: int, end: int) -> tuple[int, ...]:
        """What the prefix cache knows tokens [start, end) by: their ids, or the image whose tokens they are."""
        images = self.request.images
        if not images or start >= images[-1].end:
            return tuple(self.token_ids[start:end])
        if self._cache_ids is None:
            self._cache_ids = self.token_ids[: images[-1].end]
            for image in images:
                self._cache_ids[image.start : image.end] = map(image.key, range(image.start, image.end))
        return (*self._cache_ids[start:end], *self.token_ids[images[-1].end : end])

    def whole_images(self, start: int, count: int) -> int:
        """So many of `count` tokens from `start` on, or more, that no image is cut whose tokens see each other."""
        for image in self.request.images:
            if not image.causal and image.start < start + count < image.end:
                return image.start - start if image.start > start else image.end - start
        return count

    def children(self) -> list[Sequence]:
        """The other answers to the same prompt that are still to be split off."""
        made = []
        for index in range(1, self.pending_forks + 1):
            child = Sequence(self.request, index, len(self.block_tables), self.seed + index, self.max_tokens)
            child.submit_time, child.start_time = self.submit_time, self.start_time
            child.stop_check = self.request.stop_check.fork() if self.request.stop_check else None
            child.token_mask = self.token_mask.fork() if self.token_mask else None
            child.mask_row = self.mask_row
            child.num_rows_done = child.num_prompt_tokens  # the first answer has them
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
        """Every id of prompt and output once; kept up to date, so that a long context costs nothing per token."""
        if self._seen is None:
            self._seen = set(self.token_ids)
            self._seen_order = array("q", sorted(self._seen))
        return self._seen_order

    def check_stop(self, token_id: int) -> None:
        """Set `finish_reason` when the token just appended ends the sequence."""
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
            self.finish_reason = FinishReason.STOP  # whole: there is nothing to wait for
        if self.finish_reason is None and self.num_output_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
