"""`doctor MODEL`: checks of a model without loading it: files, architecture, tokenizer, template, license, fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from localllm import hub
from localllm.checkpoint import Checkpoint
from localllm.checkpoint.gguf_types import SCALE_OFFSETS, TENSOR_TYPES
from localllm.checkpoint.mapped_file import label
from localllm.config import UserConfig
from localllm.errors import REPAIR, BadModelFile, LocalLLMError, UnsupportedModel
from localllm.hub import Resolved, catalog
from localllm.interface import Check
from localllm.models.architectures import ModelFacts, OpenModel, open_model, registry
from localllm.plan import fit
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner
from localllm.terminal import counted, gib, params_short
from localllm.tokenizer.files import load_tokenizer
from localllm.tokenizer.tokenizer import Tokenizer

from .advice import pace
from .finding import MODEL, fail, found, ok, skip, warn

Named = tuple[str, Check]  # (check id after "model.", finding)
MAX_SCALE_BYTES = 1 << 30
OPEN_LICENSES = ("apache-2.0", "mit", "bsd", "cc-by-4.0", "openrail", "unlicense", "isc")


def model_checks(resolved: Resolved, planner: Planner) -> Iterator[Check]:
    """Yield the findings one by one. A model without local files is judged by its catalog entry."""
    for name, check in _checks(resolved, planner):
        yield replace(check, id=f"model.{name}", group=MODEL)


def _checks(resolved: Resolved, planner: Planner) -> Iterator[Named]:
    name = resolved.name
    if resolved.path is None:
        yield from _not_here(resolved, planner)
        return
    title = f"{label(resolved.path)}, {gib(resolved.size_bytes)}"
    files, rest = ok(title, str(resolved.path), path=str(resolved.path)), list[Named]()
    try:
        with open_model(resolved.path, planner.options.mmproj) as checkpoint:
            rest.extend(_here(checkpoint, name, planner))
    except UnsupportedModel as error:
        rest.append(("arch", fail(error.message, fix=error.hint)))
    except LocalLLMError as error:
        known = resolved.pulled_as
        hint = error.about("", known).hint if isinstance(error, BadModelFile) else error.hint
        repair = f"localllm pull {known} --repair" if known else hint or "localllm ls --all"
        files = fail(error.message, fix=repair)
    yield "files", files
    yield from rest


def _here(checkpoint: OpenModel, name: str, planner: Planner) -> Iterator[Named]:
    facts = checkpoint.facts
    size = f"{params_short(facts.num_params)} parameters, {facts.num_layers} layers"
    title = f"{facts.architecture} ({facts.source_architecture}), {size}"
    yield "arch", ok(title, architecture=facts.architecture)
    doubt = checkpoint.doubt
    repair = "`localllm pull NAME --repair`, or correct quantization_config"
    fix = "" if not doubt else "download a newer file" if facts.flaw else repair
    yield "format", found("warn" if doubt else "ok", facts.stored_format, doubt, fix, tensors=len(checkpoint.tensors))
    yield from _scales(checkpoint)
    try:
        tokenizer = load_tokenizer(checkpoint)
    except LocalLLMError as error:
        yield "tokenizer", fail(error.message, fix=error.hint)
    else:
        yield "tokenizer", _tokenizer(tokenizer, facts)
        yield from _template(tokenizer, name)
    yield "licence", _license(facts.license)
    try:
        yield "fit", _fit(planner.plan(facts, checkpoint.path), name)
    except LocalLLMError as error:
        yield "fit", fail(error.message, fix=error.hint)


def _scales(checkpoint: Checkpoint) -> Iterator[Named]:
    """Check quantization scales for NaN and infinity, which old NVFP4 exporters wrote.

    From a large GGUF file, only the first blocks of each tensor are read, `MAX_SCALE_BYTES` in total.
    """
    wrong: dict[str, int] = {}
    read, share = 0, min(1.0, MAX_SCALE_BYTES / max(checkpoint.nbytes, 1))
    for name, info in checkpoint.tensors.items():
        if "scale" in name.rpartition(".")[2] and info.dtype in _NO_NUMBER:
            read += 1
            wrong[name] = int(np.count_nonzero(_NO_NUMBER[info.dtype](checkpoint.read(name))))
        elif info.dtype in _BLOCK_BYTES:
            read += 1
            blocks = checkpoint.read(name).reshape(-1, _BLOCK_BYTES[info.dtype])
            wrong[name] = _wrong_blocks(info.dtype, blocks[: max(1, int(len(blocks) * share))])
    wrong = {name: bad for name, bad in wrong.items() if bad}
    if wrong:
        name, bad = next(iter(wrong.items()))
        more = f", as do {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        title = f"{name} contains {counted(bad, 'NaN or infinite scale')}{more}"
        yield "scales", fail(title, "the model will not load", REPAIR, wrong=len(wrong))
    elif read:
        yield "scales", ok(f"all scales are finite ({read:,} tensors)", tensors=read)


_BLOCK_BYTES = {kind: nbytes for kind, _, nbytes in TENSOR_TYPES.values() if kind in (*SCALE_OFFSETS, "MXFP4", "NVFP4")}


def _wrong_blocks(kind: str, blocks: np.ndarray) -> int:
    """Number of scales in GGUF blocks that are NaN or infinite."""
    if kind in SCALE_OFFSETS:  # the upper byte of a float16: all ones in the exponent
        return sum(int(np.count_nonzero((blocks[:, at + 1] & 0x7C) == 0x7C)) for at in SCALE_OFFSETS[kind])
    return int(np.count_nonzero(blocks[:, : 1 if kind == "MXFP4" else 4] == 0xFF))


# tensor dtype -> mask of the values that are NaN or infinite
_NO_NUMBER: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F8_E4M3": lambda data: (data & 0x7F) == 0x7F,
    "F8_E8M0": lambda data: data == 0xFF,
    "F16": lambda data: (data.view("<u2") & 0x7C00) == 0x7C00,
    "BF16": lambda data: (data.view("<u2") & 0x7F80) == 0x7F80,
    "F32": lambda data: ~np.isfinite(data.view("<f4")),
    "F64": lambda data: ~np.isfinite(data.view("<f8")),
}


def _tokenizer(tokenizer: Tokenizer, facts: ModelFacts) -> Check:
    try:
        text = "Grüße, 世界 🙂\n\tdef f(x): return x"
        ids = tokenizer.encode(text)
        back = tokenizer.decode(ids)
    except LocalLLMError as error:
        return fail(error.message, fix=error.hint)
    if text not in back:
        return warn("a sample text changes when encoded and decoded", repr(back)[:80], "localllm pull NAME --repair")
    if tokenizer.vocab_size > facts.vocab_size:
        title = f"{tokenizer.vocab_size:,} tokens, but the model has embeddings for only {facts.vocab_size:,}"
        return fail(title, fix="localllm pull NAME --repair")
    title = f"{tokenizer.vocab_size:,} tokens; a sample text survives encoding and decoding"
    return ok(title, vocab=tokenizer.vocab_size)


def _template(tokenizer: Tokenizer, name: str) -> Iterator[Named]:
    from localllm.chat.parser import reasoning_tags
    from localllm.chat.template import ChatTemplate
    from localllm.chat.tools.roundtrip import check_tools

    if not tokenizer.chat_template:
        again = f'localllm run {name} "Once upon a time"'
        yield "template", ok("none: this is a base model, which only completes text", "", again, chat=False)
        return
    try:
        template = ChatTemplate(tokenizer)
        rendered = template.render([{"role": "user", "content": "canary"}])
    except LocalLLMError as error:
        yield "template", fail(error.message, fix=error.hint)
        return
    if "canary" not in rendered:
        title = "the chat template drops the user's message"
        yield "template", fail(title, fix=f"localllm show {name} --template")
        return
    thinks = reasoning_tags(template.template) is not None
    title = f"renders a message to {len(rendered)} characters" + ("; the model can think first" if thinks else "")
    yield "template", ok(title, chat=True, thinking=thinks)
    tools = check_tools(template, tokenizer)
    note = "" if not tools.works or tools.keeps_prefix else "every later turn recomputes its whole prompt"
    yield "tools", ok(tools.line, note,
        works=tools.works, format=tools.format, native=tools.native, keeps_prefix=tools.keeps_prefix,
    )  # fmt: skip


def _license(terms: str) -> Check:
    if not terms:
        return ok("not stated in the files; see the model's page", licence=None)
    own = "" if terms.lower().startswith(OPEN_LICENSES) else "it has its own terms: read them before you build on it"
    return ok(terms, own, licence=terms)


def _fit(made: Plan | None, name: str) -> Check:
    if made is None:
        return skip("not known until its files are downloaded")
    if not made.fits:
        error = made.error(name)
        return fail(error.message, error.why, error.hint)
    title = (
        f"{gib(made.need_bytes)} of {gib(made.have_bytes)} on {made.device} with {made.ctx:,} tokens of context,"
        f" {pace(made)}"
    )
    return ok(title, "; ".join(made.warnings), need_bytes=made.need_bytes, have_bytes=made.have_bytes)


def _not_here(resolved: Resolved, planner: Planner) -> Iterator[Named]:
    name = resolved.name
    load = f"not on this machine; a download of {gib(resolved.download_bytes)}"
    yield "files", warn(load, fix=f"localllm pull {name}", bytes=resolved.download_bytes)
    runs = not resolved.architecture or resolved.architecture in registry.names()
    title = resolved.architecture or "not known until its files are downloaded"
    yield "arch", found("ok" if runs else "fail", title, fix="" if runs else "localllm plan")
    entry = next((c for c in catalog.candidates() if c.spec.casefold() == name.casefold()), None)
    yield "licence", _license(resolved.license or (entry.license if entry else ""))
    yield "fit", _fit(fit.plan_of(entry, planner) if entry else None, name)


def resolve_quietly(name: str, planner: Planner, config: UserConfig | None = None) -> Resolved:
    """Resolve a name to a local model, else to a catalog entry, without contacting the hub.

    Raises what `fit.resolve` raises offline for an unknown name.
    """
    try:
        return fit.resolve(name, planner, offline=True)
    except LocalLLMError:
        limit = hub.download_limit(config)
        choice = fit.recommended(name, planner, limit) if catalog.members(name) else None
        if choice is None:
            raise
        best = choice.best
        return Resolved(
            name, best.spec, "hub", repo=best.repo, quant=best.quant, size_bytes=best.download_bytes,
            download_bytes=best.download_bytes, license=best.license, architecture=best.architecture,
        )  # fmt: skip
