"""Memory arithmetic of the plan: bytes of weights, pages and working memory, term by term. Pure; makes no choices.

`boot.profile` runs the worst-case steps and compares their memory use with these terms.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from localllm.config import EngineOptions
from localllm.device import MachineFacts
from localllm.models.architectures.facts import (
    KV_BYTES,
    ModelFacts,
    count_linear_params,
    expert_counts,
    expert_share,
    kv_bytes_per_token,
    linear_shapes,
)
from localllm.models.architectures.layers import Experts, LayerFacts
from localllm.models.architectures.mixers import Attention, CompressedAttention, Entries, LatentAttention
from localllm.plan.placement import Placement, room_of
from localllm.request import CAPTURED_BLOCKS, CATCH_UP, CROWD, MOST_DRAFTS, READ_AT_ONCE

MIB = 1 << 20
HOST_BYTES = 150 * MIB  # the process with Python, torch and the engine imported: 147 MiB with a CPU build of torch 2.13
CUDA_HOST_BYTES = 300 * MIB  # the same with a CUDA build of torch, without a GPU: 273 MiB (torch 2.13, CUDA 13)
# tokenizer memory per vocabulary entry: 36 MiB for 49,152 (smollm2), 134 MiB for 262,144 (gemma3)
TOKEN_BYTES = 550
# CUDA context, loaded kernels and library workspaces, which torch's allocator does not count
CONTEXT_BYTES = 600 * MIB
GRAPH_BYTES = 8 * MIB  # driver memory per captured decode step, on top of its tensors
# most splits that decode attention divides a sequence into before it merges them (`kernels.triton.attention_tiles`)
DECODE_SPLITS = 129
# most partial results held at once when prompts use the decode kernels as well (`triton_invariant`)
SPLIT_PART_BYTES = 64 * MIB
SAMPLED_BYTES = (3 * 2048 + 7) * 8  # sums and cuts per row while sampling on a GPU: `kernels.triton.sampling`
SAMPLER_ROW_BYTES = 320 * 8  # logit biases per row: `kernels.sampling.SamplingInputs`
INT4_FORMATS = ("Q4_0", "Q4_1", "awq", "gptq", "compressed-tensors")
INT4_PACKED = 0.75  # bytes per weight of int4 as torch multiplies it on the CPU, with scales and zeros
# unquantized storage formats -> bytes per weight
DENSE_FORMATS = {"bf16": 2, "fp16": 2, "f16": 2, "f32": 4, "BF16": 2, "F16": 2, "F32": 4}
QUANTIZED_EMBEDDING = 34 / 32  # bytes per value of a Q8_0 table, the largest format GGUF files use for the embedding
_GGUF = re.compile(r"(UD-)?[IT]?Q\d")  # other quantized files store the embedding in 16 bits
# quantization target -> bytes per weight, scales included
TARGET_BYTES = {
    "int8": 1.0,
    "fp8": 1.0,
    "fp8-block": 1.0,
    "int4": 0.5 + 5 / 64,
    "int4-sym": 0.5 + 4 / 64,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}
PREDICTOR_ROWS = 6  # float32 hidden states that the MTP head holds per prompt token
WAITING_ROWS = 64  # hidden states per sequence that wait for the MTP head
# token counts of captured verification steps: matmuls use decode tiles up to 16 rows (`kernels.triton.product_tiles`)
GUESS_BUCKETS = (2, 3, 4, 8, 16)
CHECKPOINTS = 2  # state checkpoints worth keeping per sequence: after its prompt and after its answer
LARGEST_HEAD = 512  # largest head size (key or latent) of the C attention kernel; largest key head size on a GPU
LARGEST_PLAIN_HEAD = 256  # the latter on GPUs before sm_80
GATHERED_BYTES = 32 * MIB  # most keys of compressed attention gathered at once (`kernels.compressed`)
SCORE_BYTES = 32 * MIB  # most scores of sparse attention held at once, with the choice (`kernels.token_index`)
ROPE_BLOCK = 1024  # positions by which a RoPE table grows


@dataclass(frozen=True, slots=True)
class PageGroup:
    """A cache group: layers that cache the same tokens, ordered as in `models.kv_cache.cache_groups`."""

    window: int | None
    page_bytes: int
    needed: int  # pages of one sequence at full context


def activation_bytes(facts: ModelFacts, rows: int, width: int) -> int:
    """Peak bytes of the activations of a step with `rows` tokens of `width`-byte elements.

    The peak is either while RoPE rotates queries and keys or inside the feed-forward layer. The decoder holds the
    residual stream, the last layer's queries and the attention output; gate, up and their product are alive together.
    """
    hidden = facts.hidden_size
    mixer, ffn = facts.work
    ffn += 2 * facts.num_heads * facts.head_dim
    embedding = hidden * (4 + width)  # rows are looked up as float32 first
    layers = width * (2 * hidden + max(mixer, ffn))
    if facts.inputs is not None:  # alive in all layers; computed from a projection and table rows, both float32
        inputs = facts.inputs.width
        embedding, layers = hidden * width + inputs * (2 * width + 12), layers + inputs * width
    if facts.streams is not None:
        # during a layer: the predicted streams and the embedding; while streams are updated: float32 sums and products
        streams, kept = facts.streams.count * hidden, 2 * facts.num_heads * facts.head_dim - max(mixer, ffn)
        layers = max(layers + (streams + 2 * hidden) * width, layers + kept * width + streams * (width + 12))
    if facts.hyper is not None:  # the streams stay alive during a layer, one copy more while its input is computed
        wide = facts.hyper.count * hidden * width
        ngrams = max((layer.ngrams.work(width) for layer, _ in facts.kinds if layer.ngrams is not None), default=0)
        rows_of_ngrams = facts.ngrams.width * (4 + width) if facts.ngrams is not None else 0
        kept = width * (2 * hidden + 3 * facts.num_heads * facts.head_dim)
        layers = max(layers + wide, kept + max(facts.hyper.work(hidden, width), ngrams)) + rows_of_ngrams
    turned = sum(rope.dim // 2 * 8 for rope in facts.ropes)
    return rows * (max(embedding, layers) + turned)


def index_bytes(facts: ModelFacts, rows: int, ctx: int) -> int:
    """Peak bytes of choosing what the last `rows` of `ctx` tokens see in sparse attention, and of gathering entries of
    compressed attention; 0 without either.
    """
    if facts.compresses:
        pages = (layer.mixer.beside for layer in facts.entries.values() if isinstance(layer.mixer, Entries))
        return 3 * GATHERED_BYTES + 8 * ctx * max((width // ratio for _, width, ratio in pages), default=0)
    chosen = [(mixer.index, mixer.num_kv_heads) for mixer in facts.sparse if mixer.index is not None]
    works = (index.work(rows, ctx, heads) for index, heads in chosen if ctx > index.reach)
    return max((SCORE_BYTES + work for work in works), default=0)


def table_bytes(facts: ModelFacts) -> int:
    """Bytes of the stored embedding, which quantized files keep at a higher precision than the layers."""
    second, second_bytes = (0, 0) if facts.inputs is None else (facts.inputs.values, facts.inputs.nbytes)
    per_value = (facts.weight_bytes - second_bytes) / max(1, facts.num_params - second)
    quantized = QUANTIZED_EMBEDDING if _GGUF.match(facts.stored_format) else 2.0
    table = 0 if facts.follower is not None else facts.vocab_size * facts.hidden_size
    return int(table * (max(per_value, quantized) if per_value < 1.6 else per_value))


def rope_bytes(facts: ModelFacts, ctx: int) -> int:
    """Bytes of the RoPE tables for `ctx` positions; doubled, because growing a table holds both copies."""
    return sum(-(-ctx // ROPE_BLOCK) * ROPE_BLOCK * rope.dim // 2 * 8 * 2 for rope in facts.ropes)


def _pages_for(groups: tuple[PageGroup, ...], copies: float) -> tuple[int, ...]:
    full = max((g.needed for g in groups), default=0)
    return tuple(min(int(g.needed * copies), int(full * copies)) for g in groups)


@dataclass(frozen=True)
class Memory:
    """Memory of a model on one device with one choice of formats, as a function of the context.

    quant          format that linear layers are quantized to while loading; "" keeps the stored format
    rows           prompt tokens per step
    excess_bytes   excess over the plan in an earlier memory profile of this model on this device
    draft          draft model, which has its own weights and pages
    host_experts   experts per layer in host memory, computed by the CPU
    adapter_bytes  adapters resident at once
    link_bytes     communication buffers for other ranks
    table_share    fraction of the rows of embedding and head that this rank holds
    """

    facts: ModelFacts
    machine: MachineFacts
    options: EngineOptions
    where: Placement
    dtype: str
    quant: str
    kv: str
    rows: int
    excess_bytes: int = 0
    draft: ModelFacts | None = None
    host_experts: int = 0
    adapter_bytes: int = 0
    link_bytes: int = 0
    table_share: float = 1.0

    @cached_property
    def have_and_margin(self) -> tuple[int, int]:
        """(bytes that may be used, bytes of these to keep free as a margin)."""
        return room_of(self.machine, self.where.gpu, self.options.gpu_mem)

    @cached_property
    def weights_and_read(self) -> tuple[int, int]:
        """(bytes of the loaded weights on the device, bytes of them read per decoded token)."""
        held, read = self._text_and_read
        away, read_away = self._on_host(held)
        vision, drafter = self.facts.vision, self.drafter
        held += self._predictor_bytes + (0 if drafter is None else drafter.weights_and_read[0])
        return held - away + (0 if vision is None else vision.nbytes), max(0, read - read_away)

    @property
    def _predictor_bytes(self) -> int:
        """Bytes of the MTP head, which is quantized together with the model."""
        facts = self.facts
        if not self.quant or facts.predictor is None:
            return facts.predictor_bytes
        values = sum(n * k for n, k in linear_shapes(facts.predictor, facts.hidden_size).values())
        return min(facts.predictor_bytes, int(values * TARGET_BYTES[self.quant]))

    @cached_property
    def host_and_read(self) -> tuple[int, int]:
        """Like `weights_and_read` for host memory, assuming that all experts are used equally often."""
        held: float = self._text_and_read[0]
        if not self.machine.compiler:  # PyTorch multiplies in float32, or int4 in a layout of its own
            held = self.facts.num_params * (INT4_PACKED if self._is_int4 else 4)
        return self._on_host(held)

    def _on_host(self, held: float) -> tuple[int, int]:
        """`host_and_read` of a text model of `held` bytes."""
        if not self.host_experts:
            return 0, 0
        count, top_k = expert_counts(self.facts)
        away = held * expert_share(self.facts) * self.host_experts / count
        return int(away), int(away * top_k / count)

    @property
    def _is_int4(self) -> bool:
        return (self.quant or self.facts.stored_format).startswith((*INT4_FORMATS, "int4"))

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert in host memory."""
        layers = sum(isinstance(layer.ffn, Experts) for layer in self.facts.layers)
        return self.host_and_read[0] // (self.host_experts * layers) if self.host_experts else 0

    @cached_property
    def moved_per_token(self) -> tuple[float, float]:
        """Activation bytes (to the host, from the host) per decoded token, assuming that experts are used equally."""
        count, top_k = expert_counts(self.facts)
        layers = sum(isinstance(layer.ffn, Experts) for layer in self.facts.layers)
        some = 1 - math.prod((count - self.host_experts - n) / (count - n) for n in range(top_k))
        width = 4 if self.dtype == "float32" else 2
        each = layers * self.facts.hidden_size
        return each * width * some, each * 4 * top_k * self.host_experts / count

    @cached_property
    def _text_and_read(self) -> tuple[int, int]:
        """Like `weights_and_read` for the text model alone.

        The C and Triton kernels, and their fallbacks on a GPU, read weights in the stored format and look up a tied
        embedding in the head. Without a C compiler, the CPU expands quantized weights to float32 in addition to the
        stored table; int4 uses torch's own matmul.
        """
        facts, quant, on_cpu = self.facts, self.quant, self.where.device == "cpu"
        table = 0 if facts.follower is not None else int(facts.vocab_size * facts.hidden_size * self.table_share)
        second, second_bytes = (0, 0) if facts.inputs is None else (facts.inputs.values, facts.inputs.nbytes)
        per_value = (facts.weight_bytes - second_bytes) / max(1, facts.num_params - second)
        table_held = int(table_bytes(facts) * self.table_share)
        tables = 1 if facts.tied_embeddings else 2
        inner = facts.num_params - table * tables - second
        if not on_cpu or self.machine.compiler:
            held = facts.weight_bytes + facts.decoded_bytes
            if quant:
                # a catalog entry's layers are stand-ins, so only the total parameter count is reliable
                layers = min(count_linear_params(facts), inner)
                held = facts.weight_bytes - int(layers * per_value) + int(layers * TARGET_BYTES[quant])
            elif not on_cpu and DENSE_FORMATS.get(facts.stored_format) == 4 and self.dtype != "float32":
                held, table_held = (held + second_bytes) // 2, table_held // 2
            unread = second_bytes + (0 if facts.tied_embeddings else table_held)
            return held, int(held * facts.active_share) - unread
        if not quant and facts.stored_format == "bf16" and self.dtype == "bfloat16":
            held = facts.weight_bytes + (table_held if facts.tied_embeddings else 0)
        elif self._is_int4:
            held = int(inner * INT4_PACKED) + table * 4 + table_held + second_bytes
        else:
            held = (inner + table) * 4 + table_held + second_bytes
        return held, held - table_held - second_bytes

    @cached_property
    def _group_bytes(self) -> tuple[tuple[int | None, int], ...]:
        """(window, bytes per page) of each cache group."""
        facts, size = self.facts, self.options.page_size
        return tuple(
            (
                getattr(layer.mixer, "window", None),
                size * count * kv_bytes_per_token((layer,), self.kv),
            )
            for layer, count in ((facts.keeping_layers[layers[0]], len(layers)) for layers in facts.cache_layers)
        )

    def groups(self, ctx: int) -> tuple[PageGroup, ...]:
        """The cache groups in the order of `models.kv_cache.cache_groups`: full attention, then windows, widest first.

        A sliding-window group keeps the window, the chunk being computed, and one page for unaligned starts.
        """
        groups, size = [], self.options.page_size
        for window, page_bytes in self._group_bytes:
            tokens = ctx if window is None else min(ctx, window + self.rows)
            groups.append(PageGroup(window, page_bytes, -(-tokens // size) + 1))
        return tuple(groups)

    @cached_property
    def drafter(self) -> Memory | None:
        """Memory of the draft model, which runs in its stored format."""
        if self.draft is None or not self.num_drafts:
            return None
        rows = min(self.rows, CATCH_UP)
        own = replace(self, draft=None, quant="", rows=rows, excess_bytes=0, host_experts=0, adapter_bytes=0)
        return replace(own, facts=self.draft, table_share=1.0)

    @property
    def draft_slots(self) -> int:
        """State slots of the draft model: two per sequence, for its accepted tokens and for the draft."""
        return 2 * self.options.max_parallel if self.drafter is not None and self.drafter.slot_bytes else 0

    def sequence_bytes(self, ctx: int) -> int:
        """KV bytes of one sequence, including those of the draft model."""
        own = sum(g.page_bytes * g.needed for g in self.groups(ctx))
        return own + (0 if self.drafter is None else self.drafter.sequence_bytes(self.draft_ctx(ctx)))

    def unseen_bytes(self, ctx: int) -> int:
        """KV bytes that a token does not read: sparse attention reads chosen blocks, and a key per block."""
        unseen = 0
        for mixer in self.facts.attention:
            if mixer.index is not None and ctx > mixer.index.reach:
                own = kv_bytes_per_token((LayerFacts(replace(mixer, index=None), None),), self.kv)
                keys = kv_bytes_per_token((LayerFacts(mixer, None),), self.kv) - own
                read = mixer.index.reach * own + ctx * keys // (mixer.index.ratio + 1)
                unseen += ctx * (own + keys) - read
            if isinstance(mixer, CompressedAttention) and mixer.entry_index is not None:
                unseen += (
                    max(0, ctx // mixer.ratio - mixer.entry_index.top) * mixer.head_dim * max(2, KV_BYTES[self.kv])
                )
        return unseen

    def draft_ctx(self, ctx: int) -> int:
        """Context of the draft model, limited by its own maximum; an EAGLE-3 drafter follows the model anywhere."""
        if self.drafter is None:
            return 0
        return ctx if self.drafter.facts.eagle3 is not None else min(ctx, self.drafter.facts.max_context)

    def room(self, ctx: int) -> int:
        """Bytes left for pages and for state checkpoints beyond the first."""
        have, margin = self.have_and_margin
        states = self.least_slots * self.slot_bytes + self.draft_state_bytes
        return have - margin - self.weights_and_read[0] - states - sum(self.work_terms(ctx).values())

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's recurrent state, which does not depend on its length."""
        return self.facts.state_bytes

    @property
    def draft_state_bytes(self) -> int:
        idle = bool(self.graph_buckets and self.draft_slots)
        return 0 if self.drafter is None else (self.draft_slots + idle) * self.drafter.slot_bytes

    @property
    def least_slots(self) -> int:
        """Minimum of state slots: one per sequence, plus one each for a checkpoint, for the padding rows of a captured
        step, and for the state before draft tokens, where these are in use.
        """
        options = self.options
        kinds = options.prefix_cache, bool(self.graph_buckets), bool(self.num_drafts)
        return options.max_parallel + sum(kinds) if self.slot_bytes else 0

    @cached_property
    def max_ctx(self) -> int:
        """The largest context that fits: the model's maximum, else a multiple of 256 tokens; 0 if none fits."""
        own = self.facts.max_context
        lacking = self._spare(own)
        if lacking >= 0:
            return own
        spare = self._spare(256)
        if spare < 0:
            return 0
        low, high, tries = 1, own // 256 + 1, 0
        while high - low > 1:  # what is left falls almost linearly; where it does not, every third step halves
            tries += 1
            share = spare / (spare - lacking) if tries % 3 else 0.5
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
            left = self._spare(middle * 256)
            if left >= 0:
                low, spare = middle, left
            else:
                high, lacking = middle, left
        return low * 256

    def _spare(self, ctx: int) -> int:
        """Bytes left after the pages of one sequence; negative if they do not fit."""
        return self.room(ctx) - self.sequence_bytes(ctx)

    def num_pages(self, ctx: int) -> tuple[int, ...]:
        """Pages per cache group: for one to `max_parallel` sequences at full context, then for prefix reuse.

        The CPU uses at most half of the remaining memory (touched only as pages are written), and cached prefixes share
        the pages of sequences that are shorter than the full context.
        """
        return _pages_for(self.groups(ctx), self._copies(ctx))

    def draft_pages(self, ctx: int) -> tuple[int, ...]:
        """Pages per cache group of the draft model: for as many sequences as the model's, at most `max_parallel`."""
        if self.drafter is None:
            return ()
        groups = self.drafter.groups(self.draft_ctx(ctx))
        return _pages_for(groups, min(self._copies(ctx), float(self.options.max_parallel)))

    def _copies(self, ctx: int) -> float:
        """Number of full-length sequences to allocate pages for."""
        on_cpu = self.where.gpu is None
        room = self.room(ctx) // 2 if on_cpu else self.room(ctx)
        wanted = self.options.max_parallel * (2 if self.options.prefix_cache and not on_cpu else 1)
        kept = self.sequence_bytes(ctx) + CHECKPOINTS * self.slot_bytes * self.options.prefix_cache
        return max(1.0, min(float(wanted), room / max(1, kept)))

    def page_bytes(self, ctx: int) -> int:
        """Bytes of all pages, including the draft model's pages and states."""
        own = sum(g.page_bytes * count for g, count in zip(self.groups(ctx), self.num_pages(ctx), strict=True))
        if self.drafter is None:
            return own
        groups = self.drafter.groups(self.draft_ctx(ctx))
        theirs = sum(g.page_bytes * count for g, count in zip(groups, self.draft_pages(ctx), strict=True))
        return own + theirs + self.draft_state_bytes

    def num_slots(self, ctx: int) -> int:
        """State slots for sequences and checkpoints; pages are allocated first, checkpoints take what is left."""
        if not (self.slot_bytes and self.options.prefix_cache):
            return self.least_slots
        room = self.room(ctx) // 2 if self.where.gpu is None else self.room(ctx)
        more = max(0, room + self.draft_state_bytes - self.page_bytes(ctx)) // self.slot_bytes
        spare = (self.options.max_parallel - 1) * bool(self.num_drafts)  # more states before draft tokens
        return self.least_slots + min(CHECKPOINTS * self.options.max_parallel + spare, more)

    @cached_property
    def graph_buckets(self) -> tuple[int, ...]:
        """Batch sizes to capture decode steps for: 1, 2, 4, 8, ... and `max_parallel`; () if a step needs the host."""
        if not (self.where.gpu and self.options.graphs) or self.facts.pooling or self.host_experts or self.reads_back:
            return ()
        most = self.options.max_parallel
        return (*(1 << n for n in range((most - 1).bit_length())), most)

    @cached_property
    def guess_buckets(self) -> tuple[int, ...]:
        """Token counts to capture verification steps for.

        Without recurrent layers, sizes in `graph_buckets` are left out: the decode graph serves both.
        """
        if not (self.graph_buckets and self.num_drafts):
            return ()
        return tuple(size for size in GUESS_BUCKETS if self.slot_bytes or size not in self.graph_buckets)

    @cached_property
    def reads_back(self) -> str:
        """Why the host reads results in the middle of a step on a GPU, so that it cannot be captured; "" otherwise."""
        gpu, mixers = self.where.gpu, self.facts.attention
        if gpu is None:
            return ""
        # what the kernels need: `kernels.triton.ops` and `kernels.triton.experts`
        plain, is_exact = gpu.capability < 80, self.options.deterministic is True
        if (plain or is_exact) and any(isinstance(layer.ffn, Experts) for layer, _ in self.facts.kinds):
            where = "before compute capability 8.0" if plain else "in deterministic mode"
            return f"{where} the host looks up which experts a token needs"
        of_latents = any(isinstance(mixer, LatentAttention | CompressedAttention) for mixer in mixers)
        wide = any(isinstance(mixer, Attention) and mixer.head_dim > LARGEST_PLAIN_HEAD for mixer in mixers)
        if (plain or self.kv == "f32") and (of_latents or wide):
            where = "before compute capability 8.0" if plain else "with a float32 KV cache"
            return f"{where} PyTorch computes the attention of {'latents' if of_latents else 'large heads'}"
        return ""

    @property
    def num_drafts(self) -> int:
        """Most draft tokens that one step verifies; with graphs, as many as the largest bucket has room for."""
        if self.facts.pooling or self.options.speculation == "off":
            return 0
        return GUESS_BUCKETS[-1] - 1 if self.graph_buckets else MOST_DRAFTS

    def work_terms(self, ctx: int) -> dict[str, int]:
        """Peak working memory of a step, in addition to weights and pages, by name."""
        terms = self._work_on_cpu(ctx) if self.where.gpu is None else self._work_on_gpu(ctx)
        if self.facts.vision is not None:
            terms["image"] = self.facts.vision.work
        if self.facts.predictor is not None:
            rows = PREDICTOR_ROWS * min(self.rows, ctx) + WAITING_ROWS * self.options.max_parallel
            terms["activations"] += rows * 4 * self.facts.head_width
        if self.drafter is not None:
            theirs = self.drafter.work_terms(self.draft_ctx(ctx))
            own = self.drafter.facts.assistant
            picked = own.picked(self.drafter.facts.vocab_size) if own is not None else 0
            gathered = self.options.max_parallel * picked * self.drafter.facts.hidden_size * (2 + 4)
            terms["activations"] = max(terms["activations"], theirs["activations"] + gathered)
            dflash, eagle3 = self.drafter.facts.dflash, self.drafter.facts.eagle3
            width, tokens = 4 if self.dtype == "float32" else 2, min(self.rows, ctx)
            waiting = WAITING_ROWS * self.options.max_parallel
            if eagle3 is not None:  # hidden states of the layers: as computed, together, normed; those of its layer
                terms["activations"] += (3 * tokens + waiting + WAITING_ROWS) * eagle3.width * width
                terms["activations"] += PREDICTOR_ROWS * tokens * 4 * self.drafter.facts.hidden_size
                if self.graph_buckets:
                    terms["graphs"] += self._head_graphs(self.drafter.facts.hidden_size)
            if dflash is not None:
                terms["activations"] += (tokens + 2 * READ_AT_ONCE + waiting) * dflash.width * width
                if self.graph_buckets:  # block tables of its own passes, and their graphs
                    blocks = max(CAPTURED_BLOCKS[-1], min(self.options.max_parallel, CROWD))
                    pages = -(-self.draft_ctx(ctx) // self.options.page_size)
                    terms["tables"] += len(self._group_bytes) * blocks * dflash.block * pages * 4
                    terms["graphs"] += self._block_graphs
            if self.drafter.facts.follower is None and "graphs" in theirs:
                terms["graphs"], terms["tables"] = (terms[name] + theirs[name] for name in ("graphs", "tables"))
            else:
                terms["tables" if "tables" in terms else "activations"] += rope_bytes(self.drafter.facts, ctx)
        more = {"learned": self.excess_bytes, "adapters": self.adapter_bytes, "links": self.link_bytes}
        return terms | {name: size for name, size in more.items() if size}

    @property
    def _host_bytes(self) -> int:
        return (CUDA_HOST_BYTES if self.machine.torch_cuda else HOST_BYTES) + TOKEN_BYTES * self.facts.vocab_size

    def _work_on_cpu(self, ctx: int) -> dict[str, int]:
        facts, rows = self.facts, min(self.rows, ctx)
        terms = {
            "program": self._host_bytes,
            "activations": activation_bytes(facts, rows, 4) + index_bytes(facts, rows, ctx) + rope_bytes(facts, ctx),
            "logits": (3 * self.options.max_parallel + self.num_drafts) * facts.vocab_size * 4,
        }
        # PyTorch's attention gathers keys and values and holds tiles of scores
        in_c = self.machine.compiler and facts.causal and all(one.kept[1] <= LARGEST_HEAD for one in facts.attention)
        if not in_c:
            terms["gathered"] = 4 * ctx * facts.num_kv_heads * facts.head_dim * 4 + 16 * MIB
        return terms

    @property
    def _merged(self) -> int:
        """Bytes per row of the partial results of decode attention."""
        return self.facts.num_heads * DECODE_SPLITS * (self.facts.head_dim + 2) * 4

    def _decoding(self, rows: int) -> int:
        """Peak bytes of a decode step, or of a DFlash drafter's pass."""
        # per row: 16-bit logits, their float32 copy, sampling candidates
        computed = self.facts.vocab_size * (2 + 4) + SAMPLED_BYTES
        return activation_bytes(self.facts, rows, 2) + rows * (self._merged + computed)

    @property
    def _block_graphs(self) -> int:
        """Bytes of a DFlash drafter's graphs: those of its passes have no logits as outputs, and no sampler.

        All graphs are captured into one memory pool, so a pass takes only what the largest step of the model does not.
        """
        assert self.drafter is not None and self.drafter.facts.dflash is not None
        own = self.drafter._decoding(CAPTURED_BLOCKS[-1] * self.drafter.facts.dflash.block)
        largest = self._decoding(max(*self.graph_buckets, *self.guess_buckets))
        return GRAPH_BYTES * len(CAPTURED_BLOCKS) + max(0, own - largest)

    def _head_graphs(self, hidden: int) -> int:
        """Bytes of the graphs of an MTP head or an EAGLE-3 drafter, with their inputs and outputs: hidden states."""
        buckets = (*self.graph_buckets, *self.guess_buckets)
        return GRAPH_BYTES + (2 * max((self.options.max_parallel, *buckets)) + sum(buckets)) * hidden * 4

    @cached_property
    def _steps_on_gpu(self) -> tuple[int, int, int]:
        """(split-KV partials, decode step, graphs and sampler): working memory that does not depend on the context."""
        facts, parallel, vocab = self.facts, self.options.max_parallel, self.facts.vocab_size
        buckets = (*self.graph_buckets, *self.guess_buckets)
        rows = max((parallel, *buckets))  # rows of the largest graph
        outputs = sum(buckets) * (vocab * 4 + facts.head_width * 2)
        decoding = self._decoding(parallel)
        sampler = parallel * vocab * 4 + rows * (vocab // 8 + SAMPLER_ROW_BYTES)  # token counts, masks, biases
        captured = outputs + self._decoding(rows) + GRAPH_BYTES * len(buckets) if buckets else 0
        if buckets and facts.predictor is not None:
            captured += self._head_graphs(facts.head_width)
        if buckets and facts.ngrams is not None:
            captured += rows * facts.ngrams.width * 2
        return parallel * self._merged, decoding + (parallel + self.num_drafts) * vocab * 4, captured + sampler

    def _work_on_gpu(self, ctx: int) -> dict[str, int]:
        facts = self.facts
        merged, decoding, graphs = self._steps_on_gpu
        rows = max(self.options.max_parallel, *self.graph_buckets, *self.guess_buckets, 0)
        block_tables = len(self._group_bytes) * rows * -(-ctx // self.options.page_size) * 4
        terms = {
            "context": CONTEXT_BYTES,
            "activations": activation_bytes(facts, min(self.rows, ctx), 2) + max(merged, SPLIT_PART_BYTES),
            "logits": decoding + self.num_drafts * facts.vocab_size * 2,
            "graphs": graphs,
            "tables": rope_bytes(facts, ctx) + block_tables,
        }
        terms["activations"] += index_bytes(facts, min(self.rows, ctx), ctx)
        if self.graph_buckets:  # in the memory of the graphs, for whole block tables
            terms["graphs"] += index_bytes(facts, rows, -(-ctx // self.options.page_size) * self.options.page_size)
        terms["activations"] += 2 * self.expert_bytes  # one streamed expert, in stored and in kernel layout
        is_plain = self.where.gpu is not None and self.where.gpu.capability < 80
        if facts.gathers or facts.head_dim > (LARGEST_PLAIN_HEAD if is_plain else LARGEST_HEAD):
            # PyTorch's attention runs, as on the CPU
            terms["activations"] += 4 * ctx * facts.num_kv_heads * facts.head_dim * 4 + 16 * MIB
        if self.where.gpu is not None and self.where.gpu.unified:  # the process itself lives in the same memory
            terms["program"] = self._host_bytes
        return terms
