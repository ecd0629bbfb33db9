"""Checks of every op against its reference on this GPU, in the shapes of several models: `gpu.py check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_models
import torch
from gpu_files import joined, load_file
from gpu_place import Place
from gpu_rows import Known, generate

from localllm.kernels import Impl, LinearFacts, OpFacts, Weight
from localllm.kernels.layer_weights import ExpertsWeights
from localllm.kernels.registry import OPS
from localllm.kernels.table import implementations
from localllm.kernels.verify.cases import SIZES, ModelShapes
from localllm.kernels.verify.sampling_trial import sampler_error
from localllm.kernels.verify.selftest import SelfTest
from localllm.kernels.verify.trial import linear_error, op_error
from localllm.models.architectures import ModelFacts
from localllm.models.model import Model

Found = Iterator[tuple[str, str]]  # (check, "" or the error)
# query heads, KV heads, head_dim: Qwen3, SmolLM2, Gemma 3, gpt-oss, Qwen2, and an odd one
HEADS = ((16, 8, 128), (32, 8, 128), (9, 3, 64), (4, 1, 256), (64, 8, 64), (14, 2, 64), (6, 2, 80))
PAGED = ("kv_write", "paged_attention")  # ops that read or write pages
VOCAB = 32_768  # of the families, so that many fit next to each other; sampling has checks of its own
FORMS = 24  # number of weight formats that `weights` makes
FLOATS = {  # block type: bytes, elements, offsets of its float16 numbers
    "Q5_0": (22, 32, (0,)),
    "Q5_1": (24, 32, (0, 2)),
    "Q2_K": (84, 256, (80, 82)),
    "Q3_K": (110, 256, (108,)),
    "Q4_K": (144, 256, (0, 2)),
    "Q5_K": (176, 256, (0, 2)),
    "Q6_K": (210, 256, (208,)),
    "IQ4_NL": (18, 32, (0,)),
    "IQ4_XS": (136, 256, (0,)),
}


def ops(place: Place, dtype: str, kv_format: str, heads: tuple[int, int, int]) -> Found:
    """Check the row-wise ops, page writes and attention, in every implementation that fits."""
    count, kv_heads, dim = heads
    gemma = dim == 256
    for page_size in (16, 32) if gemma else (16,):
        tried = set()  # some fit with and without batch invariance
        for deterministic in (False, True):
            facts = OpFacts(
                kv_format, *heads, page_size, device=torch.device(place.device).type,
                capability=place.capability, dtype=dtype, deterministic=deterministic,
            )  # fmt: skip
            # the interpreter runs step by step: only the first sizes
            states = tuple((op, sizes[0]) for op, sizes in SIZES.items()) if place.is_dry else None
            shapes = ModelShapes(
                count * dim, 3 * count * dim, facts, has_windows=gemma or dim == 64, softcap=50.0 if gemma else None,
                states=states,
            )  # fmt: skip
            native = kv_format == {"bfloat16": "bf16", "float16": "fp16"}[dtype]
            for op in OPS if native else PAGED:  # the other ops do not depend on the KV format
                for impl in implementations(op)[:-1]:
                    if (op, impl.name) not in tried and impl.fits(facts) is None:
                        tried.add((op, impl.name))
                        yield f"{op} {impl.name} {shapes.key}", op_error(op, impl.run, shapes)


def weights(device: torch.device) -> Iterator[Callable[[int, int], tuple[str, Weight] | None]]:
    """Makers of canonical weights of every format: (N, K) -> (name, weight), or None if the format lacks that shape."""
    for form in gpu_models.FORMATS:
        yield (
            lambda n, k, form=form: (
                (form, gpu_models.random_weight(form, (n, k), device)) if k % gpu_models.INT4_GROUP == 0 else None
            )
        )  # type: ignore[misc]
    yield lambda n, k: ("dense f16", Weight("dense", (n, k), (torch.randn(n, k, device=device) * 0.02).half()))
    for group in (32, 64, 128):
        for extra in ("zeros", "mins"):
            yield lambda n, k, group=group, extra=extra: _int4(n, k, group, extra, device)  # type: ignore[misc]
    yield lambda n, k: _int8(n, k, k, device)
    yield lambda n, k: _int8(n, k, 128, device) if k % 128 == 0 else None
    yield lambda n, k: _fp8(n, k, "tensor", device)
    yield lambda n, k: _fp8(n, k, "block", device)
    yield lambda n, k: _mx(n, k, "fp4g32", device)
    yield lambda n, k: _mx(n, k, "fp8mx", device)
    for block in FLOATS:
        yield lambda n, k, block=block: _gguf(n, k, block, device) if k % FLOATS[block][1] == 0 else None  # type: ignore[misc]


def _int4(n: int, k: int, group: int, extra: str, device: torch.device) -> tuple[str, Weight] | None:
    if k % group:
        return None
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scales = (torch.rand(n, k // group, device=device) * 0.004 + 0.002).half()
    zeros = torch.randint(0, 16, (n, k // group), dtype=torch.uint8, device=device) if extra == "zeros" else None
    mins = (torch.randn(n, k // group, device=device) * 0.02).bfloat16() if extra == "mins" else None
    return f"int4 g{group} {extra}", Weight("int4g", (n, k), packed, scales, zeros=zeros, mins=mins, group_size=group)


def _int8(n: int, k: int, group: int, device: torch.device) -> tuple[str, Weight]:
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    scales = torch.rand(n, k // group, device=device) * 2e-4 + 1e-4
    return f"int8 g{group}", Weight("int8", (n, k), codes, scales, group_size=group)


def _fp8(n: int, k: int, kind: str, device: torch.device) -> tuple[str, Weight]:
    codes = (torch.randn(n, k, device=device) * 16).to(torch.float8_e4m3fn)
    shape = (1,) if kind == "tensor" else (-(-n // 128), -(-k // 128))
    scales = torch.rand(shape, device=device) * 1e-3 + 5e-4
    return f"fp8 {kind}", Weight("fp8", (n, k), codes, scales, group_size=0 if kind == "tensor" else 128)


def _mx(n: int, k: int, form: str, device: torch.device) -> tuple[str, Weight] | None:
    if k % 32:
        return None
    scales = torch.randint(117, 123, (n, k // 32), dtype=torch.uint8, device=device)
    if form == "fp4g32":
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    else:
        codes = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    return form, Weight(form, (n, k), codes, scales, group_size=32)


def _gguf(n: int, k: int, block: str, device: torch.device) -> tuple[str, Weight]:
    size, elements, offsets = FLOATS[block]
    data = torch.randint(0, 256, (n, k // elements, size), dtype=torch.uint8, device=device)
    for offset in offsets:
        number = (torch.randn(n, k // elements, 1, device=device) * 2e-3).half().view(torch.uint8)
        data[:, :, offset : offset + 2] = number
    return f"gguf {block}", Weight("gguf", (n, k), data.flatten(1), block_type=block)


# (deterministic, rounding of activations): each implementation is checked with the first pair that it accepts
WISHES = ((False, ""), (True, ""), (False, "fp8"), (False, "nvfp4"))


def products(place: Place, dtype: str, part: int, parts: int) -> Found:
    """Check every implementation that fits, for every weight format; `part` of `parts`."""
    device = torch.device(place.device)
    makers = list(weights(device))[part::parts]
    for make in makers:
        for n, k in place.sizes.products:
            made = make(n, k)
            if made is None:
                continue
            name, weight = made
            facts = LinearFacts(
                weight.form, (n, k), weight.group_size, weight.block_type, device=device.type,
                capability=place.capability, dtype=dtype,
            )  # fmt: skip
            for impl in implementations("linear")[:-1]:
                for deterministic, activations in WISHES:
                    wanted = replace(facts, deterministic=deterministic, activations=activations)
                    if impl.fits(wanted) is None:
                        yield f"linear {impl.name} {name} {n}x{k} {dtype}", _product_error(impl, wanted, weight)
                        break


def _product_error(impl: Impl, facts: LinearFacts, weight: Weight) -> str:
    try:
        prepared = impl.prepare(weight)
    except Exception as error:
        return f"prepare: {type(error).__name__}: {str(error)[:200]}"
    return linear_error(impl, facts, weight, prepared)


def sampling(place: Place) -> Found:
    """Check the sampling op with the vocabulary sizes of model families."""
    from localllm.kernels.triton.sampling import sample

    for vocab in (32_000, 49_152, 151_936, 262_144) if not place.is_dry else (401,):
        yield f"sample {vocab}", sampler_error(sample, vocab, place.device)


def whole(place: Place, form: str, kv: str, size: str = "0.6B", layers: int = 4) -> Found:
    """Check a small model: every kernel it chooses, fused segments, then graphs and steps ahead against eager steps.

    layers  as `num_layers` of `facts_of`
    """
    form, layers = place.form(form), min(layers, 1) if place.is_dry else layers
    facts = gpu_models.facts_of(place.model(size), form, layers)
    facts = replace(facts, vocab_size=min(facts.vocab_size, VOCAB)) if not layers else facts
    # batch-dependent kernels: the same steps need the same rows, so requests run one after another
    # batch-invariant kernels: any steps
    for deterministic in (True,) if place.is_dry and not layers else (False, True):
        test, what = SelfTest(), "rows by themselves" if deterministic else "the fastest kernels"
        model = gpu_models.load(facts, form, place.kv(kv), place, deterministic=deterministic, selftest=test)
        yield f"self-test of {facts.name}, KV {kv}, {what}", "; ".join(str(failure) for failure in test.failures)
        yield f"graphs of {facts.name}, {what}", compared(model, place, place.kv(kv), deterministic)
        if deterministic and not (place.is_dry and model.predictor):  # the head's drafts are guesses as well
            yield f"guesses of {facts.name}, {what}", guessed(model, place, place.kv(kv))
        if deterministic and model.predictor is not None:
            yield from drafted(place, place.kv(kv), model, f"the MTP head of {facts.name}", headed=True)
        apart = any(isinstance(layer.ffn, ExpertsWeights) and not layer.ffn.stacked for layer in model.layers)
        if not deterministic and (apart or model.kernels.get("experts", "triton") != "triton"):
            yield f"routing of {facts.name}", f"by the host: {dict(model.kernels)}, {apart=}"
        ours = [name for name in model.kernels.values() if "triton" in name]
        yield f"kernels of {facts.name}, {what}", "" if ours else f"none of ours: {dict(model.kernels)}"
        del model  # other groups run beside this one
        place.free()


def compared(model: Model, place: Place, kv: str, deterministic: bool) -> str:
    """Return "" or how many answers from graphs and steps ahead equal those of eager steps."""
    eager = generate(model, place, kv, graphs=False, ahead=False, together=deterministic)
    again = generate(model, place, kv, graphs=True, ahead=deterministic, together=deterministic)
    same = sum(a == b for a, b in zip(eager, again, strict=True))
    return "" if eager == again else f"{same} of {len(eager)} answers agree"


def guessed(model: Model, place: Place, kv: str) -> str:
    """Return "" or how many answers agree with and without speculation, in graphs and launched, batch-invariantly."""
    known, found = Known(3, 0.7), {}
    plain = generate(model, place, kv, graphs=False, ahead=False, known=known)
    known.learn()
    for graphs in (False, True):
        drafted = generate(model, place, kv, graphs=graphs, ahead=graphs, known=known)
        same = sum(a == b for a, b in zip(plain, drafted, strict=True))
        if plain != drafted:
            found["in graphs" if graphs else "launched"] = f"{same} of {len(plain)} answers agree"
    return "; ".join(f"{how}: {count}" for how, count in found.items())


def drafters(place: Place, kv: str) -> Found:
    """Check drafters that read hidden states: see `drafter`."""
    facts = gpu_models.facts_of(place.model("0.6B"), "bf16", num_layers=4 if not place.is_dry else 1)
    for own in gpu_models.drafters_of(facts):
        yield from drafter(place, kv, facts, own)


def drafter(place: Place, kv: str, facts: ModelFacts, own: ModelFacts) -> Found:
    """Check a drafter, batch-invariantly: its kernels, equal drafts in graphs and launched, equal answers."""
    test = SelfTest()
    facts = replace(facts, drafting=own.layers)
    model = gpu_models.load(facts, "bf16", place.kv(kv), place, deterministic=True, selftest=test)
    draft = gpu_models.load_drafter(own, place.kv(kv), place, model, test)
    yield f"self-test of {own.name}, KV {kv}", "; ".join(str(failure) for failure in test.failures)
    yield from drafted(place, place.kv(kv), model, own.name, draft=draft)


def drafted(place: Place, kv: str, model: Model, name: str, **drafter: Any) -> Found:
    """Compare answers with a drafter to those without, and its drafts in graphs to launched ones."""
    tokens = max(4, place.sizes.same)  # nothing is drafted for the first two and the last one
    plain = generate(model, place, kv, graphs=False, ahead=False, tokens=tokens)
    found: list[list[list[tuple[int, ...]]]] = []
    for graphs in (False, True):
        drafts: list[list[tuple[int, ...]]] = []
        how: dict[str, Any] = {"graphs": graphs, "ahead": False, "together": False, "tokens": tokens}
        again = generate(model, place, kv, **how, **drafter, drafts=drafts)
        same = sum(a == b for a, b in zip(plain, again, strict=True))
        where = "in graphs" if graphs else "launched"
        yield f"answers with {name}, {where}", "" if again == plain else f"{same} of {len(plain)} agree"
        found.append(drafts)
    many = sum(map(bool, found[0]))
    yield f"drafts of {name}", "" if many and found[0] == found[1] else f"{many} rounds, others in graphs"


def from_file(place: Place, path: Path) -> Found:
    """Check a model from a given file: the kernels it chooses, and graphs against eager steps."""
    for deterministic in (False, True):
        test = SelfTest()
        model = load_file(path, place, "fp8", test, deterministic)
        yield f"self-test of {path.name}, {deterministic=}", "; ".join(str(failure) for failure in test.failures)
        yield f"graphs of {path.name}, {deterministic=}", compared(model, place, "fp8", deterministic)
        if deterministic:
            yield f"guesses of {path.name}, {deterministic=}", guessed(model, place, "fp8")


def groups(place: Place, file: str = "") -> dict[str, Callable[[], Found]]:
    """Groups of checks by name, each run in its own process: the longest and most informative first."""
    found: dict[str, Callable[[], Found]] = {}
    models = (("int4", "fp8"), ("bf16", "bf16"), ("nvfp4", "fp8"), ("fp8", "int8"))
    for form, kv in () if place.is_dry else models:  # a rehearsal of the first family covers them
        found[f"model {form}"] = partial(whole, place, form, kv)
    for form, kv in models[1:2] if place.is_dry else models[:3]:
        found[f"mixture {form}"] = partial(whole, place, form, kv, "30B-A3B")
    families = ((gpu_models.HEADED, "bf16", "bf16"),) if place.is_dry else gpu_models.FAMILIES
    for size, form, kv in families:
        found[f"family {size}"] = partial(whole, place, form, kv, size, 0)
    found["drafters"] = partial(drafters, place, "fp8" if not place.is_dry else "bf16")
    if file:
        found["file"] = partial(from_file, place, joined(Path(file)))
    both = [("bfloat16", kv) for kv in ("fp8", "bf16", "int8", "fp16")] * (not place.is_dry)
    for dtype, kv in (*both, ("float16", "fp16"), ("float16", "fp8")):
        for heads in ((4, 2, 32),) if place.is_dry else HEADS:
            found[f"ops {dtype} {kv} {'x'.join(map(str, heads))}"] = partial(ops, place, dtype, kv, heads)
    parts = 2 if place.is_dry else FORMS  # a process takes 4 s to start
    for part in range(parts):
        found[f"products {part}"] = partial(products, place, place.dtype, part, parts)
    found["sampling"] = partial(sampling, place)
    if not place.is_dry:
        found["products float16"] = partial(products, place, "float16", 0, 4)
    return found
