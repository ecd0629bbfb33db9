"""The plan's arithmetic: bytes of weights, pages and work, term by term. Pure; no choice is made here.

`boot.profile` runs the worst steps and compares what they took with these terms.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from localllm.config import EngineOptions
from localllm.device import MachineFacts
from localllm.models.architectures.facts import (
    ModelFacts,
    count_linear_params,
    expert_counts,
    expert_share,
    kv_bytes_per_token,
    linear_shapes,
)
from localllm.models.architectures.layers import Experts
from localllm.plan.placement import Placement, room_of

MIB = 1 << 20
HOST_BYTES = 150 * MIB  # Python, torch and the engine imported: 147 MiB with torch 2.13 for the CPU
CUDA_HOST_BYTES = 350 * MIB  # the same with a torch that was built with CUDA
# of the tokenizer for each token of the vocabulary: 36 MiB for 49,152 (smollm2), 134 MiB for 262,144 (gemma3)
TOKEN_BYTES = 550
# a CUDA context, loaded kernels and library workspaces, which torch's allocator does not count
CONTEXT_BYTES = 600 * MIB
GRAPH_BYTES = 8 * MIB  # what the driver keeps of one captured decode step beside the memory its tensors take
# most pieces that decode attention cuts a sequence into (`kernels.triton.attention_tiles`), summed up afterwards
DECODE_SPLITS = 129
# most results of pieces held at once where prompts go through the decode kernels, too (`triton_invariant`)
SPLIT_PART_BYTES = 64 * MIB
SAMPLED_BYTES = 4 * 2048 * 8  # of a row's cuts while it is sampled on a GPU: `kernels.triton.sampling`
SAMPLER_ROW_BYTES = 320 * 8  # of a row's biases: `kernels.sampling.SamplingInputs`
INT4_FORMATS = ("Q4_0", "Q4_1", "awq", "gptq", "compressed-tensors")
# stored formats of plain numbers -> bytes each
DENSE_FORMATS = {"bf16": 2, "fp16": 2, "f16": 2, "f32": 4, "BF16": 2, "F16": 2, "F32": 4}
QUANTIZED_EMBEDDING = 34 / 32  # bytes a value of a Q8_0 table: what GGUF files keep the embedding in, at most
_GGUF = re.compile(r"(UD-)?[IT]?Q\d")  # other quantized files keep it in 16 bits
# target of a quantization -> bytes of a weight with its scales
TARGET_BYTES = {
    "int8": 1.0,
    "fp8": 1.0,
    "fp8-block": 1.0,
    "int4": 0.5 + 5 / 64,
    "int4-sym": 0.5 + 4 / 64,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}
CATCH_UP = 512  # tokens that a draft model computes at once
PREDICTOR_ROWS = 6  # hidden states, of float32, that the head that predicts holds for a token of a prompt
WAITING_ROWS = 64  # hidden states of a sequence that wait for it
MOST_DRAFTS = 32  # guessed tokens that a step checks: each has a row of logits
CROWD = 8  # sequences in a step from which on nothing is guessed
# tokens of captured steps with guesses: up to 16 a product is a decoding step's (`kernels.triton.product_tiles`)
GUESS_BUCKETS = (2, 3, 4, 8, 16)
CHECKPOINTS = 2  # of a sequence's states that are worth keeping: behind its prompt, and behind its answer
LARGEST_HEAD = 512  # elements of a key, or of a latent, that attention in C takes; of a key that a card's takes
LARGEST_PLAIN_HEAD = 256  # the latter without tensor cores
ROPE_BLOCK = 1024  # positions that a RoPE table grows by


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that keep the same tokens, in the order of `models.kv_cache.cache_groups`."""

    window: int | None
    page_bytes: int
    needed: int  # pages one sequence takes at full context


def activation_bytes(facts: ModelFacts, rows: int, width: int) -> int:
    """The most that a step of `rows` tokens holds of intermediate results of `width` bytes, in a layer's worst moment.

    What is alive while queries and keys are turned, and while the feed-forward layer multiplies: the decoder keeps the
    residual stream, the (last layer's) queries and what attention gave; gate and up lie beside their product.
    """
    hidden = facts.hidden_size
    mixer, ffn = facts.work
    ffn += 2 * facts.num_heads * facts.head_dim
    embedding = hidden * (4 + width)  # rows come out as float32 first
    layers = width * (2 * hidden + max(mixer, ffn))
    if facts.inputs is not None:  # they stay for all layers; made of a projection and rows, both as float32
        inputs = facts.inputs.width
        embedding, layers = hidden * width + inputs * (2 * width + 12), layers + inputs * width
    if facts.streams is not None:  # beside a layer what was predicted and is added, and the embedding; while that is
        # done, float32 sums and products
        streams, kept = facts.streams.count * hidden, 2 * facts.num_heads * facts.head_dim - max(mixer, ffn)
        layers = max(layers + (streams + 2 * hidden) * width, layers + kept * width + streams * (width + 12))
    turned = sum(rope.dim // 2 * 8 for rope in facts.ropes)
    return rows * (max(embedding, layers) + turned)


def table_bytes(facts: ModelFacts) -> int:
    """Of the stored embedding: a quantized file keeps it in more bits than its layers."""
    second, second_bytes = (0, 0) if facts.inputs is None else (facts.inputs.values, facts.inputs.nbytes)
    per_value = (facts.weight_bytes - second_bytes) / max(1, facts.num_params - second)
    quantized = QUANTIZED_EMBEDDING if _GGUF.match(facts.stored_format) else 2.0
    table = facts.vocab_size * facts.hidden_size
    return int(table * (max(per_value, quantized) if per_value < 1.6 else per_value))


def rope_bytes(facts: ModelFacts, ctx: int) -> int:
    """Cosines and sines of every position, twice while a table grows."""
    return sum(-(-ctx // ROPE_BLOCK) * ROPE_BLOCK * rope.dim // 2 * 8 * 2 for rope in facts.ropes)


def _pages_for(groups: tuple[PageGroup, ...], copies: float) -> tuple[int, ...]:
    full = max((g.needed for g in groups), default=0)
    return tuple(min(int(g.needed * copies), int(full * copies)) for g in groups)


@dataclass(frozen=True)
class Memory:
    """What a model takes on a device with one choice of formats, by tokens of context.

    quant         what linear layers become while loading; "" keeps them as they are stored
    rows          prompt tokens of a step
    excess_bytes  what an earlier memory profile of this model took there beyond its plan
    draft         a smaller model that guesses tokens; it has weights and pages of its own
    host_experts  of each layer, how many the CPU computes in host memory
    adapter_bytes of the adapters that are in memory at once
    link_bytes    for talking to other ranks
    table_share   of embedding and head, the rows that a rank has
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
        """(bytes that may be taken, bytes of them kept free for others)."""
        return room_of(self.machine, self.where.gpu, self.options.gpu_mem)

    @cached_property
    def weights_and_read(self) -> tuple[int, int]:
        """(bytes the loaded weights take, bytes of them that decoding one token reads), on the device."""
        (held, read), (away, read_away) = self._text_and_read, self.host_and_read
        vision, drafter = self.facts.vision, self.drafter
        held += self._predictor_bytes + (0 if drafter is None else drafter.weights_and_read[0])
        return held - away + (0 if vision is None else vision.nbytes), max(0, read - read_away)

    @property
    def _predictor_bytes(self) -> int:
        """Of the head that predicts tokens: it is quantized with the model."""
        facts = self.facts
        if not self.quant or facts.predictor is None:
            return facts.predictor_bytes
        values = sum(n * k for n, k in linear_shapes(facts.predictor, facts.hidden_size).values())
        return min(facts.predictor_bytes, int(values * TARGET_BYTES[self.quant]))

    @cached_property
    def host_and_read(self) -> tuple[int, int]:
        """The same in host memory, where all experts are chosen equally often."""
        if not self.host_experts:
            return 0, 0
        count, top_k = expert_counts(self.facts)
        away = self._text_and_read[0] * expert_share(self.facts) * self.host_experts / count
        return int(away), int(away * top_k / count)

    @cached_property
    def expert_bytes(self) -> int:
        """Of one expert in host memory."""
        layers = sum(isinstance(layer.ffn, Experts) for layer in self.facts.layers)
        return self.host_and_read[0] // (self.host_experts * layers) if self.host_experts else 0

    @cached_property
    def moved_per_token(self) -> tuple[float, float]:
        """Bytes of activations that go to the host for a decoded token, and from it; where all are chosen equally."""
        count, top_k = expert_counts(self.facts)
        layers = sum(isinstance(layer.ffn, Experts) for layer in self.facts.layers)
        some = 1 - math.prod((count - self.host_experts - n) / (count - n) for n in range(top_k))
        width = 4 if self.dtype == "float32" else 2
        each = layers * self.facts.hidden_size
        return each * width * some, each * 4 * top_k * self.host_experts / count

    @cached_property
    def _text_and_read(self) -> tuple[int, int]:
        """The same of the text model alone.

        Our kernels, in C and in Triton, keep the stored bits, and look rows of a tied embedding up in the head; so does
        what takes their place on a card. Without a compiler for the C ones, quantized weights are multiplied as float32
        beside the stored table; int4 goes through torch's own product.
        """
        facts, quant, on_cpu = self.facts, self.quant, self.where.device == "cpu"
        table = int(facts.vocab_size * facts.hidden_size * self.table_share)
        second, second_bytes = (0, 0) if facts.inputs is None else (facts.inputs.values, facts.inputs.nbytes)
        per_value = (facts.weight_bytes - second_bytes) / max(1, facts.num_params - second)
        table_held = int(table_bytes(facts) * self.table_share)
        tables = 1 if facts.tied_embeddings else 2
        inner = facts.num_params - table * tables - second
        if not on_cpu or self.machine.compiler:
            held = facts.weight_bytes + facts.decoded_bytes
            if quant:
                # of a model of the catalogue only their sum is known: its layers have sizes that stand for others
                layers = min(count_linear_params(facts), inner)
                held = facts.weight_bytes - int(layers * per_value) + int(layers * TARGET_BYTES[quant])
            elif not on_cpu and DENSE_FORMATS.get(facts.stored_format) == 4 and self.dtype != "float32":
                held, table_held = (held + second_bytes) // 2, table_held // 2
            unread = second_bytes + (0 if facts.tied_embeddings else table_held)
            return held, int(held * facts.active_share) - unread
        if not quant and facts.stored_format == "bf16" and self.dtype == "bfloat16":
            held = facts.weight_bytes + (table_held if facts.tied_embeddings else 0)
        elif (quant or facts.stored_format).startswith((*INT4_FORMATS, "int4")):
            held = int(inner * 0.75) + table * 4 + table_held + second_bytes
        else:
            held = (inner + table) * 4 + table_held + second_bytes
        return held, held - table_held - second_bytes

    @cached_property
    def _group_bytes(self) -> tuple[tuple[int | None, int], ...]:
        """(window, bytes of a page) of each group."""
        facts, size = self.facts, self.options.page_size
        return tuple(
            (
                facts.windows[layers[0]],
                size * len(layers) * kv_bytes_per_token((facts.keeping_layers[layers[0]],), self.kv),
            )
            for layers in facts.cache_layers
        )

    def groups(self, ctx: int) -> tuple[PageGroup, ...]:
        """Those of `models.kv_cache.cache_groups`, in its order: full attention first, then the widest window.

        A window group keeps the window, the chunk being computed, and a page for where both start.
        """
        groups, size = [], self.options.page_size
        for window, page_bytes in self._group_bytes:
            tokens = ctx if window is None else min(ctx, window + self.rows)
            groups.append(PageGroup(window, page_bytes, -(-tokens // size) + 1))
        return tuple(groups)

    @cached_property
    def drafter(self) -> Memory | None:
        """The same of the draft model, which runs as it is stored."""
        if self.draft is None or not self.num_drafts:
            return None
        rows = min(self.rows, CATCH_UP)
        own = replace(self, draft=None, quant="", rows=rows, excess_bytes=0, host_experts=0, adapter_bytes=0)
        return replace(own, facts=self.draft, table_share=1.0)

    @property
    def draft_slots(self) -> int:
        """For states of the draft model: for every sequence those of its tokens, and those of guesses."""
        return 2 * self.options.max_parallel if self.drafter is not None and self.drafter.slot_bytes else 0

    def sequence_bytes(self, ctx: int) -> int:
        """Keys and values of one sequence; of the draft model, too."""
        own = sum(g.page_bytes * g.needed for g in self.groups(ctx))
        return own + (0 if self.drafter is None else self.drafter.sequence_bytes(self.draft_ctx(ctx)))

    def draft_ctx(self, ctx: int) -> int:
        """Tokens of a sequence that the draft model can follow."""
        return min(ctx, self.drafter.facts.max_context) if self.drafter is not None else 0

    def room(self, ctx: int) -> int:
        """What is left for pages, and for checkpoints of states beyond the first."""
        have, margin = self.have_and_margin
        states = self.least_slots * self.slot_bytes + self.draft_state_bytes
        return have - margin - self.weights_and_read[0] - states - sum(self.work_terms(ctx).values())

    @cached_property
    def slot_bytes(self) -> int:
        """What one sequence keeps in layers with a state, at any length."""
        return self.facts.state_bytes

    @property
    def draft_state_bytes(self) -> int:
        idle = bool(self.graph_buckets and self.draft_slots)
        return 0 if self.drafter is None else (self.draft_slots + idle) * self.drafter.slot_bytes

    @property
    def least_slots(self) -> int:
        """A slot for every sequence that may run, for one checkpoint, for the idle rows of a captured step, and for
        the states before guessed tokens.
        """
        options = self.options
        kinds = options.prefix_cache, bool(self.graph_buckets), bool(self.num_drafts)
        return options.max_parallel + sum(kinds) if self.slot_bytes else 0

    @cached_property
    def max_ctx(self) -> int:
        """The largest context up to the model's own that fits, in steps of 256 tokens (its own counts); 0 when none."""
        own = self.facts.max_context
        if self._spare(own) >= 0:
            return own
        if self._spare(256) < 0:
            return 0
        low, high = 1, own // 256
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._spare(middle * 256) >= 0 else (low, middle - 1)
        return low * 256

    def _spare(self, ctx: int) -> int:
        """What is left when one sequence has its pages; negative where it does not fit."""
        return self.room(ctx) - self.sequence_bytes(ctx)

    def num_pages(self, ctx: int) -> tuple[int, ...]:
        """Pages per group: one sequence at full context, as many as may run, then finished prompts for reuse.

        On the CPU at most half of what is left is taken (and memory is only touched as pages are written), and finished
        prompts share the pages of sequences that are not at full length.
        """
        return _pages_for(self.groups(ctx), self._copies(ctx))

    def draft_pages(self, ctx: int) -> tuple[int, ...]:
        """Those of the draft model: for as many sequences as the model's own, at most as many as may run."""
        if self.drafter is None:
            return ()
        groups = self.drafter.groups(self.draft_ctx(ctx))
        return _pages_for(groups, min(self._copies(ctx), float(self.options.max_parallel)))

    def _copies(self, ctx: int) -> float:
        """Sequences of full length that the pages are for."""
        on_cpu = self.where.gpu is None
        room = self.room(ctx) // 2 if on_cpu else self.room(ctx)
        wanted = self.options.max_parallel * (2 if self.options.prefix_cache and not on_cpu else 1)
        kept = self.sequence_bytes(ctx) + CHECKPOINTS * self.slot_bytes * self.options.prefix_cache
        return max(1.0, min(float(wanted), room / max(1, kept)))

    def page_bytes(self, ctx: int) -> int:
        """Bytes of all pages, and of the draft model's pages and states."""
        own = sum(g.page_bytes * count for g, count in zip(self.groups(ctx), self.num_pages(ctx), strict=True))
        if self.drafter is None:
            return own
        groups = self.drafter.groups(self.draft_ctx(ctx))
        theirs = sum(g.page_bytes * count for g, count in zip(groups, self.draft_pages(ctx), strict=True))
        return own + theirs + self.draft_state_bytes

    def num_slots(self, ctx: int) -> int:
        """For states of sequences and their checkpoints; the latter as many as there is room beside the pages."""
        if not (self.slot_bytes and self.options.prefix_cache):
            return self.least_slots
        room = self.room(ctx) // 2 if self.where.gpu is None else self.room(ctx)
        more = max(0, room + self.draft_state_bytes - self.page_bytes(ctx)) // self.slot_bytes
        spare = (self.options.max_parallel - 1) * bool(self.num_drafts)  # more of those before guessed tokens
        return self.least_slots + min(CHECKPOINTS * self.options.max_parallel + spare, more)

    @cached_property
    def graph_buckets(self) -> tuple[int, ...]:
        """Batch sizes that decode steps are captured for: 1, 2, 4, 8, ... and `max_parallel` itself.

        None where the CPU computes a part of every step.
        """
        if not (self.where.gpu and self.options.graphs) or self.facts.pooling or self.host_experts:
            return ()
        most = self.options.max_parallel
        return (*(1 << n for n in range((most - 1).bit_length())), most)

    @cached_property
    def guess_buckets(self) -> tuple[int, ...]:
        """Of captured steps with guesses, less `graph_buckets` where no layer keeps a state: it has both."""
        if not (self.graph_buckets and self.num_drafts):
            return ()
        return tuple(size for size in GUESS_BUCKETS if self.slot_bytes or size not in self.graph_buckets)

    @property
    def captures(self) -> bool:
        """Whether a graph takes a whole decode step along: before sm_80, and where a batch must not change an answer,
        the host learns what a router chose, and latents have no kernel of their own.
        """
        gpu = self.where.gpu
        there = gpu is not None and gpu.capability >= 80 and self.options.deterministic is not True
        return there and bool(self.graph_buckets)

    @property
    def num_drafts(self) -> int:
        """Guessed tokens that a step checks at most: with graphs as many as the largest has room for."""
        if self.facts.pooling or self.options.speculation == "off":
            return 0
        return GUESS_BUCKETS[-1] - min(self.options.max_parallel, CROWD) if self.graph_buckets else MOST_DRAFTS

    def work_terms(self, ctx: int) -> dict[str, int]:
        """What a step holds at most beside weights and pages, by name."""
        terms = self._work_on_cpu(ctx) if self.where.gpu is None else self._work_on_gpu(ctx)
        if self.facts.vision is not None:
            terms["image"] = self.facts.vision.work
        if self.facts.predictor is not None:
            rows = PREDICTOR_ROWS * min(self.rows, ctx) + WAITING_ROWS * self.options.max_parallel
            terms["activations"] += rows * 4 * self.facts.hidden_size
        if self.drafter is not None:
            theirs = self.drafter.work_terms(self.draft_ctx(ctx))
            terms["activations"] = max(terms["activations"], theirs["activations"])
            if "graphs" in theirs:
                terms["graphs"], terms["tables"] = (terms[name] + theirs[name] for name in ("graphs", "tables"))
            else:
                terms["activations"] += rope_bytes(self.drafter.facts, ctx)
        more = {"learned": self.excess_bytes, "adapters": self.adapter_bytes, "links": self.link_bytes}
        return terms | {name: size for name, size in more.items() if size}

    @property
    def _host_bytes(self) -> int:
        return (CUDA_HOST_BYTES if self.machine.torch_cuda else HOST_BYTES) + TOKEN_BYTES * self.facts.vocab_size

    def _work_on_cpu(self, ctx: int) -> dict[str, int]:
        facts = self.facts
        terms = {
            "program": self._host_bytes,
            "activations": activation_bytes(facts, min(self.rows, ctx), 4) + rope_bytes(facts, ctx),
            "logits": (3 * self.options.max_parallel + self.num_drafts) * facts.vocab_size * 4,
        }
        # PyTorch's attention gathers keys and values, and holds tiles of scores
        in_c = self.machine.compiler and facts.causal and all(one.kept[1] <= LARGEST_HEAD for one in facts.attention)
        if not in_c:
            terms["gathered"] = 4 * ctx * facts.num_kv_heads * facts.head_dim * 4 + 16 * MIB
        return terms

    @cached_property
    def _steps_on_gpu(self) -> tuple[int, int, int]:
        """(merged splits, a decode step, graphs with the sampler): what no context changes."""
        facts, parallel, vocab = self.facts, self.options.max_parallel, self.facts.vocab_size
        buckets = (*self.graph_buckets, *self.guess_buckets)
        rows = max((parallel, *buckets))  # of the largest graph
        outputs = sum(buckets) * (vocab * 4 + facts.hidden_size * 2)
        merged = facts.num_heads * DECODE_SPLITS * (facts.head_dim + 2) * 4  # of a row
        computed = vocab * (2 + 4) + SAMPLED_BYTES  # of a row: 16-bit logits, and what sampling makes of them
        decoding = activation_bytes(facts, parallel, 2) + parallel * (merged + computed)
        sampler = parallel * vocab * 4 + rows * (vocab // 8 + SAMPLER_ROW_BYTES)  # tokens counted, masks, biases
        captured = outputs + activation_bytes(facts, rows, 2) + rows * (merged + computed)
        captured = captured + GRAPH_BYTES * len(buckets) if buckets else 0
        if buckets and facts.predictor is not None:  # what it reads, and what it gives
            captured += GRAPH_BYTES + (2 * rows + sum(buckets)) * facts.hidden_size * 4
        return parallel * merged, decoding + (parallel + self.num_drafts) * vocab * 4, captured + sampler

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
        terms["activations"] += 2 * self.expert_bytes  # one that comes, as it is stored and as it is multiplied
        is_plain = self.where.gpu is not None and self.where.gpu.capability < 80
        if facts.gathers or facts.head_dim > (LARGEST_PLAIN_HEAD if is_plain else LARGEST_HEAD):
            # PyTorch's attention, as on the CPU
            terms["activations"] += 4 * ctx * facts.num_kv_heads * facts.head_dim * 4 + 16 * MIB
        if self.where.gpu is not None and self.where.gpu.unified:  # what the process itself takes counts, too
            terms["program"] = self._host_bytes
        return terms
