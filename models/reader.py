"""`Reader`: tensors of a checkpoint -> prepared linears and vectors: read, convert, choose a kernel, prepare, free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from localllm.checkpoint.mapped_file import bad
from localllm.errors import BadModelFile, UnsupportedFormat
from localllm.kernels import LinearFacts, Weight, choose, rope
from localllm.kernels.cpu import layout as cpu_layout
from localllm.kernels.dequant import FP8_BLOCK
from localllm.kernels.layer_weights import Join, Linear, LinearPart, Module, Norm
from localllm.kernels.rope import RopeTable
from localllm.kernels.table import implementations
from localllm.kernels.verify.records import capability_of
from localllm.kernels.verify.selftest import SelfTest
from localllm.quant import dequantize, fuse, load_weight, multiplied, read_dense, reordered
from localllm.quant.cut import columns_of, rows_of
from localllm.quant.encode import Target, encode

from .architectures import OpenModel, RopeFacts
from .architectures.layers import ROUTERS, LayerFacts
from .architectures.sharding import Cut, Shard, pieces
from .packed import Packed, PackedPart
from .ranks import Gathered, Ranks, Summed

SCRATCH_BYTES = 32 << 20  # minimum; malloc maps a block of this size separately and returns it to the system whole


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load: device, precision and guarantees."""

    device: str = "cpu"
    dtype: str = "float32"  # of activations: float32 | bfloat16 | float16
    kv_format: str = "f32"  # of the cache: a key of `kernels.kv_pages.KV_DTYPES`
    page_size: int = 16  # tokens
    context: int = 0  # the longest sequence to support, in tokens; 0: the model's own limit
    exact: bool = False  # the user chose the dtype explicitly: nothing may be rounded below it
    deterministic: bool = True  # a token's result does not depend on the rest of its batch
    # fp8 | nvfp4: round activations to this in products with many rows, on GPUs that support it
    activations: str = ""
    # a target of `quant.encode`: quantize linear layers to this while loading; "" keeps the stored format
    weights: str = ""
    # by layer, the experts that stay in host memory and run on the CPU: see `models.placement`
    host_experts: tuple[frozenset[int], ...] = ()
    predictor: bool = False  # also load the MTP head, if the model has one
    drafting: tuple[LayerFacts, ...] = ()  # layers of a drafter whose keys and values are kept with the model's
    stream_rows: int = 0  # run a host expert on the device if it has this many rows in a step; 0: never
    disabled: frozenset[str] = frozenset()  # keys ("op:name") of implementations that failed their self-test
    selftest: SelfTest | None = None  # tests every chosen kernel on the shapes of this model; None trusts them
    progress: Callable[[int, int], None] | None = None  # called with (stored bytes done, total)
    packed: Packed | None = None  # CPU only: file with repacked weights
    ranks: Ranks | None = None  # set if several ranks load a part of the model each


class Reader:
    """One load in progress: reads and prepares tensors, and records progress and the chosen implementations."""

    def __init__(self, checkpoint: OpenModel, shard: Shard, options: LoadOptions) -> None:
        self.checkpoint = checkpoint
        self.facts = shard.facts
        self.shard = shard
        self.options = options
        self.device = torch.device(options.device)
        self.capability = 0  # compute capability of a GPU, such as 90 or 120
        self.shares_memory = False  # whether the GPU shares the host's memory (GB10, Jetson)
        if self.device.type == "cuda":
            self.capability = capability_of(self.device)
            self.shares_memory = bool(getattr(torch.cuda.get_device_properties(self.device), "is_integrated", 0))
        self.selftest = options.selftest
        self.target = Target(options.weights) if options.weights else None
        self.chosen: dict[str, dict[str, None]] = {}
        self.done = 0
        self._counted: set[str] = set()  # modules and single tensors already included in `done`
        self._scratch = torch.empty(0, dtype=torch.uint8)  # holds a weight's codes until they are repacked
        factors = [
            (f"model.layers.{index}.{module}", runs)
            for index, layer in enumerate(shard.facts.layers)
            for module, runs in layer.factors
        ]
        # all layers of a model have the same
        made = {runs: torch.cat([torch.full((rows,), factor) for rows, factor in runs]) for _, runs in factors}
        self._factors = {module: made[runs] for module, runs in factors}  # float32 [N], by which rows are multiplied
        self._joins: dict[str, Join] = {}  # of modules split by rows because their columns cannot be split

    @property
    def context(self) -> int:
        """The longest sequence in tokens."""
        return self.options.context or self.facts.max_context

    @property
    def disabled(self) -> frozenset[str]:
        """Implementations that failed in earlier runs or in this load's self-test."""
        return self.options.disabled | (self.selftest.disabled if self.selftest is not None else frozenset())

    def linear(
        self,
        layer_class: str,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        *,
        on_host: bool = False,
        order: Tensor | None = None,
    ) -> Linear:
        """Read linear modules and prepare them, fused into one weight if their forms allow it exactly.

        on_host   keep them in host memory, prepared for the CPU
        order     int64 [N]: source row of each output, for a single module
        """
        device = torch.device("cpu") if on_host else self.device
        key = "" if on_host else "+".join(names)
        parts = self.kept(layer_class, key, names, shapes)
        if parts is None:
            weights = [self.weight(name, shape, device, order) for name, shape in zip(names, shapes, strict=True)]
            whole = fuse(weights, self._take if device.type == "cpu" else None)
            found = weights if whole is None else [whole]
            parts = tuple(self.prepare(layer_class, weight, None, key) for weight in found)
            self.release(names)
        biases = [self.bias(name, shape[0], device, order) for name, shape in zip(names, shapes, strict=True)]
        known = map(self.checkpoint.names.every, names)
        factors = map(self._factors.get, names)
        modules = tuple(
            Module(each, shape[0], order, own) for each, shape, own in zip(known, shapes, factors, strict=True)
        )
        if len(parts) == len(names):
            return Linear(tuple(replace(part, bias=bias) for part, bias in zip(parts, biases, strict=True)), modules)
        bias = None
        if any(b is not None for b in biases):
            pairs = zip(biases, shapes, strict=True)
            bias = torch.cat([torch.zeros(n, device=device) if part is None else part for part, (n, _) in pairs])
        return Linear((replace(parts[0], bias=bias),), modules)

    def gated(self, layer_class: str, names: Sequence[str], shapes: Sequence[tuple[int, int]], dim: int) -> Linear:
        """Like `linear`, but interleaves the first two modules, queries and gates, head by head (`dim` rows each)."""
        key, queries = "+".join(names), shapes[0][0]
        parts = self.kept(layer_class, key, names, shapes)
        if parts is None:
            query, gate, *others = (self.weight(*one) for one in zip(names, shapes, strict=True))
            pair, source = fuse([query, gate]), self.checkpoint.names.source(names[0])
            if pair is None:
                raise UnsupportedFormat(
                    f"{self.checkpoint.path.name}: {source} and its gate cannot be fused: their formats or input orders"
                    " differ",
                    "choose another format of the same model (localllm ls, localllm pull)",
                )
            by_head = torch.arange(2 * queries, device=self.device).view(2, -1, dim).transpose(0, 1).flatten()
            weights = [self.reordered(source, pair, by_head), *others]
            whole = fuse(weights)
            parts = tuple(self.prepare(layer_class, one, None, key) for one in ([whole] if whole else weights))
            self.release(names)
        # adapters cannot address the interleaved rows, so they get no name
        rest = [
            Module(self.checkpoint.names.every(name), n) for name, (n, _) in zip(names[2:], shapes[2:], strict=True)
        ]
        return Linear(parts, (Module((), 2 * queries), *rest))

    def _take(self, count: int) -> Tensor:
        """uint8 [count] of scratch memory, reused by the next call; `owned` copies what must persist."""
        if count > self._scratch.numel():
            self._scratch = torch.empty(0, dtype=torch.uint8)  # free the smaller buffer first
            self._scratch = torch.empty(max(count, SCRATCH_BYTES), dtype=torch.uint8)
        return self._scratch[:count]

    def _is_lent(self, tensor: Tensor) -> bool:
        """Whether its memory belongs to a mapped file or to the scratch buffer."""
        start, address = self._scratch.data_ptr(), tensor.data_ptr()
        return self.checkpoint.maps(address) or start <= address < start + self._scratch.numel()

    def release(self, names: Sequence[str]) -> None:
        """Drop the mapped pages of these modules from this process; they stay in the system's page cache."""
        for name in names:
            for tensor in self._below.get(self.checkpoint.names.source(name), ()):
                self.checkpoint.forget(tensor, cached=False)

    def kept(
        self, layer_class: str, key: str, names: Sequence[str], shapes: Sequence[tuple[int, int]]
    ) -> tuple[LinearPart, ...] | None:
        """The parts prepared from these modules in an earlier load, without biases; None if they must be read."""
        packed, parts = self.options.packed, []
        for one in packed.parts(key) or () if packed is not None and key else ():
            facts = self._linear_facts(one, "cpu")
            impl = choose(implementations("linear"), facts, self.disabled).impl
            proven = self.selftest is None or self.selftest.linear_known(impl, facts, one.has)
            if impl.prepare is not cpu_layout.prepare or not proven:
                return None
            parts.append(LinearPart(impl, one.prepared, None, one.shape))
        if not parts or sum(part.shape[0] for part in parts) != sum(n for n, _ in shapes):
            return None
        for part in parts:
            self.chosen.setdefault(layer_class, {})[part.impl.name] = None
        for name in names:
            self.count(self.checkpoint.names.source(name))
        return tuple(parts)

    def prepare(self, layer_class: str, weight: Weight, bias: Tensor | None, key: str = "") -> LinearPart:
        """Choose an implementation for a canonical weight on its current device, and let it repack the weight.

        key   name under which to save the result for later loads; "" does not save it
        """
        facts, packed = self._linear_facts(weight, weight.qweight.device.type), self.options.packed
        while True:
            impl = choose(implementations("linear"), facts, self.disabled).impl
            keeps = bool(key) and packed is not None and packed.writes and impl.prepare is cpu_layout.prepare
            # `prepare` usually repacks the codes, nearly all of the bytes; copy them only if it keeps them as they are
            prepared = self.owned(impl.prepare(self.owned(weight, but="qweight")))
            if self.selftest is None or self.selftest.linear_passed(impl, facts, weight, prepared):
                break
        if packed is not None and keeps:
            packed.keep(key, facts, weight, prepared)
        self.chosen.setdefault(layer_class, {})[impl.name] = None
        return LinearPart(impl, prepared, bias, weight.shape)

    def _linear_facts(self, weight: Weight | PackedPart, device: str) -> LinearFacts:
        own = device == self.device.type
        return LinearFacts(
            form=weight.form,
            shape=weight.shape,
            group_size=weight.group_size,
            block_type=weight.block_type,
            device=device,
            capability=self.capability if own else 0,
            dtype=self.options.dtype if own else "float32",
            exact=self.options.exact,
            deterministic=self.options.deterministic,
            activations=self.options.activations if own else "",
        )

    def owned(self, weight: Any, but: str = "") -> Any:
        """A weight, canonical or prepared, with copies of those tensors that view mapped files or the scratch buffer.

        but   name of a tensor not to copy
        """
        if not isinstance(weight, tuple) or not hasattr(weight, "_asdict"):
            return weight
        views = {
            name: part
            for name, part in weight._asdict().items()
            if isinstance(part, Tensor) and name != but and part.device.type == "cpu" and part.layout is torch.strided
        }
        copies = {name: part.clone() for name, part in views.items() if self._is_lent(part)}
        return weight._replace(**copies) if copies else weight  # type: ignore[attr-defined]

    def weight(
        self, name: str, shape: tuple[int, int], device: torch.device | None = None, order: Tensor | None = None
    ) -> Weight:
        """Read a linear module, quantized to the load target if there is one; `order` as in `linear`."""
        if name in self.shard.cuts:
            return self.stored(name, shape, device, order, encodes=True)
        return self.encoded(name, self.stored(name, shape, device, order))

    def stored(
        self,
        name: str,
        shape: tuple[int, int],
        device: torch.device | None = None,
        order: Tensor | None = None,
        *,
        encodes: bool = False,
    ) -> Weight:
        """Read a linear module in its stored format. `encodes`: quantize it to the load target before splitting it."""
        cut = self.shard.cuts.get(name)
        stored_as = self.checkpoint.names.source(cut.module or name if cut is not None else name)
        whole = shape if cut is None else (cut.shape[0], cut.shape[1])
        stored = load_weight(self.checkpoint, stored_as, self.checkpoint.formats[stored_as], whole)
        if name in self._factors:
            stored = self._multiplied(stored_as, stored, self._factors[name])
        if cut is not None:
            stored = self.encoded(name, stored) if encodes else stored  # before the split: same values as on one rank
            stored = self._part(name, stored, cut)
        stored = stored if order is None else self.reordered(stored_as, stored, order)
        weight = self.moved(stored, device or self.device)
        self.count(stored_as)
        if self.shares_memory:  # let the system drop its page cache of the files, which takes memory from the GPU
            for tensor in self._below.get(stored_as, ()):
                self.checkpoint.forget(tensor)
        return weight

    def _part(self, name: str, weight: Weight, cut: Cut) -> Weight:
        """This rank's part of a module. If its columns cannot be split, for example because its inputs are reordered,
        it is split by rows, and the product gathers inputs and outputs.
        """
        ranks = self.options.ranks
        assert ranks is not None
        share, found = ranks.share, weight if not cut.rows else rows_of(weight, cut.rows)
        if found is not None and cut.columns:
            weight, found = found, columns_of(found, cut.columns, share.rank)
            if found is None and ".experts." not in name and all(len(ranges) == 1 for ranges in cut.columns):
                n = weight.shape[0]
                outputs = pieces(n, share.world, FP8_BLOCK if n >= FP8_BLOCK * share.world else 1)
                found = rows_of(weight, [outputs[share.rank]])
                inputs = tuple(len(one) for (one,) in cut.columns)
                self._joins[name] = Gathered(ranks, tuple(map(len, outputs)), inputs)
        if found is None:
            raise UnsupportedFormat(
                f"{self.checkpoint.path.name}: {name}: {weight.form} weights that share scales or reorder their inputs"
                f" cannot be split across {share.world} ranks",
                "use another value of --tensor-parallel, or --split layers",
            )
        return found

    def join(self, name: str) -> Join | None:
        """How the ranks' results of a module are combined; None if this process has the whole module."""
        cut, ranks = self.shard.cuts.get(name), self.options.ranks
        if cut is None or ranks is None:
            return None
        return self._joins.get(name) or Summed(ranks)

    def encoded(self, name: str, weight: Weight) -> Weight:
        """Quantize a module's weight to the load target, if it is a linear layer that the target applies to."""
        kept = not name.startswith("model.layers.") or name.endswith(tuple(f".{router}" for router in ROUTERS))
        if self.target is None or kept or self.target.fits(*weight.shape) is not None:
            return weight
        try:
            return encode(dequantize(weight), self.target)
        except ValueError as error:
            stored_as = self.checkpoint.names.source(name)
            raise BadModelFile(f"{self.checkpoint.path.name}: {stored_as}: {error}") from error

    def reordered(self, stored_as: str, weight: Weight, order: Tensor) -> Weight:
        """`weight` with its rows in this order. Raises UnsupportedFormat if that would need another rounding."""
        found = reordered(weight, order)
        if found is None:
            raise UnsupportedFormat(
                f"{self.checkpoint.path.name}: {stored_as}: rows stored as {weight.form} cannot be reordered",
                "choose another format of the same model (localllm ls, localllm pull)",
            )
        return found

    def _multiplied(self, stored_as: str, weight: Weight, factors: Tensor) -> Weight:
        found = multiplied(weight, factors)
        if found is None:
            raise UnsupportedFormat(
                f"{self.checkpoint.path.name}: {stored_as}: rows stored as {weight.form} cannot be multiplied by the"
                " model's multipliers",
                "choose another format of the same model (localllm ls, localllm pull)",
            )
        return found

    def moved(self, weight: Weight, device: torch.device) -> Weight:
        """Move a weight to the device."""
        if device.type == "cpu":
            return weight
        parts = {name: part.to(device) for name, part in weight._asdict().items() if isinstance(part, Tensor)}
        return weight._replace(**parts)

    def bias(self, name: str, size: int, device: torch.device, order: Tensor | None = None) -> Tensor | None:
        """A linear module's bias, float32 [size]; None if it is absent or all zeros, as in GPTQ files."""
        stored, cut = f"{self.checkpoint.names.source(name)}.bias", self.shard.cuts.get(name)
        bias = None
        if stored in self.checkpoint.tensors:
            bias = self.vector(stored, size if cut is None else cut.shape[0])
        if bias is None or not bool(bias.any()):
            return None
        if cut is not None:
            join = self._joins.get(name)
            if isinstance(join, Gathered):
                assert self.options.ranks is not None
                bias = bias.split(list(join.outputs))[self.options.ranks.share.rank]
            elif not cut.adds_bias:
                return None
            elif cut.rows:
                bias = torch.cat([bias[one.start : one.stop] for one in cut.rows])
        return (bias if order is None else bias[order]).to(device)

    def rope(self, facts: RopeFacts) -> RopeTable:
        """Build the table of cosines and sines for one rotation."""
        inv_freq = rope.inverse_frequencies(facts.theta, facts.dim)
        if facts.factors_tensor is not None:
            inv_freq = inv_freq / self.vector(facts.factors_tensor, facts.dim // 2)
        elif facts.scaling == "longrope":
            is_long = self.context > facts.original_context
            inv_freq = inv_freq / torch.tensor(facts.long_factors if is_long else facts.short_factors)
        elif facts.scaling == "proportional":
            inv_freq[facts.turning :] = 0
        elif facts.scaling == "off":
            inv_freq = torch.zeros_like(inv_freq)
        elif facts.scaling == "linear":
            inv_freq = inv_freq / facts.factor
        elif facts.scaling == "llama3":
            low, high = facts.low_freq_factor, facts.high_freq_factor
            inv_freq = rope.scale_llama3(inv_freq, facts.factor, low, high, facts.original_context)
        elif facts.scaling == "yarn":
            ramp = facts.beta_fast, facts.beta_slow, facts.original_context, facts.truncate
            inv_freq = rope.scale_yarn(inv_freq, facts.theta, facts.factor, *ramp)
        return RopeTable(inv_freq, facts.attention_factor, self.options.device)

    def norm(self, name: str, size: int, *, has_offset: bool = True) -> Norm:
        """Read a norm of the model's kind as float32, with the model's `norm_offset` added if `has_offset`."""
        kind, offset = self.facts.layers[0].norms, self.facts.norm_offset * has_offset
        weight = self.tensor(f"{name}.weight", (size,))
        weight = weight + offset if offset else weight
        bias = self.tensor(f"{name}.bias", (size,)) if kind.bias else torch.zeros_like(weight) if kind.centred else None
        return Norm(weight, self.facts.rms_norm_eps, bias, kind.groups if size == self.facts.hidden_size else 1)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor that is not a linear module, by canonical name, as float32 on the device."""
        stored, cut = self.checkpoint.names.tensor(name), self.shard.cuts.get(name)
        values = read_dense(self.checkpoint, stored).float().reshape(shape if cut is None else cut.shape)
        if cut is not None:
            values = torch.cat([values[one.start : one.stop] for one in cut.rows]).reshape(shape)
        values = values.contiguous().to(self.device)
        if not self._counted & {stored, stored.rpartition(".")[0]}:  # not yet counted, alone or with its module
            self._counted.add(stored)
            self._advance(self.checkpoint.tensors[stored].nbytes)
        return values

    def numbers(self, name: str, shape: tuple[int, ...], end: int) -> Tensor:
        """Read a tensor of integers from 0 up to `end`, by canonical name, as int64 on the device."""
        stored = self.checkpoint.names.tensor(name)
        info = self.checkpoint.tensors[stored]
        values = self.checkpoint.read(stored).view({"I32": "<i4", "I64": "<i8"}[info.dtype]).astype("int64")
        if not 0 <= values.min() <= values.max() < end:
            raise bad(info.file, f"holds numbers that are not from 0 to {end - 1:,}", key=stored)
        self._counted.add(stored)
        self._advance(info.nbytes)
        return torch.from_numpy(values.reshape(shape)).to(self.device)

    def vector(self, stored: str, size: int) -> Tensor:
        """Read a vector by its name in the file as float32 [size]."""
        shape = self.checkpoint.tensors[stored].shape
        if shape != (size,):
            raise BadModelFile(f"{self.checkpoint.path.name}: {stored} has shape {list(shape)}, expected [{size}]")
        return read_dense(self.checkpoint, stored).float().contiguous()

    @cached_property
    def _below(self) -> dict[str, list[str]]:
        """Module name in the file -> its tensors."""
        found: dict[str, list[str]] = {}
        for name in self.checkpoint.tensors:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found

    def count(self, stored_as: str) -> None:
        """Report the tensors of a module as done."""
        if stored_as in self._counted:  # an expert that is read again
            return
        self._counted.add(stored_as)
        self._advance(sum(self.checkpoint.tensors[name].nbytes for name in self._below.get(stored_as, ())))

    def _advance(self, num_bytes: int) -> None:
        if self.options.progress is not None:
            self.done += num_bytes
            self.options.progress(self.done, self._all_bytes)

    @cached_property
    def _all_bytes(self) -> int:
        table = self.facts.ngrams
        return self.checkpoint.nbytes - (0 if table is None else table.nbytes)  # the table stays in the file
