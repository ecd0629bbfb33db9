"""Models: What a model is: architecture, context, license, files"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import columns, picked, wrapped_at
from localllm.cli.frame.options import Model
from localllm.cli.names import local, opened
from localllm.conversation.tree import sampling_line
from localllm.errors import LocalLLMError, ModelNotFound
from localllm.llm.sampling import recommended
from localllm.paths import home_short
from localllm.plan.quality import note as quality_note
from localllm.plan.quality import saved as saved_quality
from localllm.terminal import clean_line, counted, gib, params_short, rate

if TYPE_CHECKING:
    from localllm.config import EngineOptions
    from localllm.models.architectures import ModelFacts, OpenModel


@command("localllm show smollm2", "localllm show ./model.gguf --json", "localllm show qwen --template")
def show(
    env: Env,
    model: Model,
    template: Annotated[bool, Option("--template", help="Print the chat template.")] = False,
) -> int:
    """Show what a model is: architecture, context, license, files, memory, and how it would run here.

    Reads headers only, so a damaged file is detected in milliseconds (exit 12).
    """
    resolved = local(env, env.config, model, ModelNotFound)
    with opened(resolved, env.config.engine.mmproj) as checkpoint:
        if template:
            text = _template(checkpoint, clean_line(resolved.name))
            if not env.console.emit("template/1", {"id": resolved.name, "template": text}):
                env.console.answer(text if text.endswith("\n") else text + "\n")
            return 0
        fields = _show_fields(checkpoint, resolved.name, resolved.revision, env.config.engine)
        env.console.emit("show/1", fields)
        _print_facts(env, checkpoint, fields)
    return 0


def _template(checkpoint: OpenModel, name: str) -> str:
    from localllm.tokenizer.files import load_tokenizer

    text = load_tokenizer(checkpoint).chat_template
    if not text:
        raise ModelNotFound(f"{name} has no chat template", f'localllm run {name} "Once upon a time"')
    return text


def _show_fields(checkpoint: OpenModel, name: str, revision: str, options: EngineOptions) -> dict[str, Any]:
    from localllm.hub.catalog import drafter_of
    from localllm.models.architectures.facts import kept_bytes
    from localllm.plan.fit import with_drafter_beside
    from localllm.plan.planner import Planner

    facts = checkpoint.facts
    kept, fixed = kept_bytes(facts, "bf16")
    sampling = recommended(facts, checkpoint.path)
    try:
        planner = with_drafter_beside(Planner.here(options), facts, checkpoint.path)
        made = planner.plan(facts, checkpoint.path)
        here = picked(made, "fits device ctx kv need_bytes have_bytes basis")
        here["decode_tps"] = round(made.decode_tps, 1)
    except LocalLLMError as error:
        here = {"fits": False, "reason": error.message}
    return {
        "id": name,
        "path": str(checkpoint.path),
        "format": checkpoint.kind,
        **picked(facts, "stored_format architecture source_architecture name head_dim"),
        "params": facts.num_params,
        "size_bytes": checkpoint.nbytes,
        "max_ctx": facts.max_context,
        "quality": saved_quality(checkpoint.path),
        "layers": facts.num_layers,
        "hidden": facts.hidden_size,
        "heads": facts.num_heads,
        "kv_heads": facts.num_kv_heads,
        "vocab": facts.vocab_size,
        "kv_bytes_per_token": kept,
        "kv_fixed_bytes": fixed,
        "template": facts.has_chat_template,
        "capabilities": _capabilities(checkpoint),
        "licence": facts.license or None,
        "drafter": drafter_of(name.partition(":")[0]) or None,
        "revision": revision or None,
        "sampling_defaults": {key: value for key, (value, _) in sampling.items()},
        "sampling_sources": {key: why for key, (_, why) in sampling.items()},
        "tensors": len(checkpoint.tensors),
        "files": sorted({str(tensor.file) for tensor in checkpoint.tensors.values()}),
        "plan": here,
    }


def _capabilities(checkpoint: OpenModel) -> dict[str, Any]:
    """Return chat, thinking and vision as booleans, tools as a line. Raises the tokenizer errors that `run` would."""
    from localllm.chat.parser import reasoning_tags
    from localllm.chat.template import ChatTemplate
    from localllm.chat.tools.roundtrip import NO_TEMPLATE, check_tools
    from localllm.tokenizer.files import load_tokenizer

    tools, thinks = NO_TEMPLATE, False
    if checkpoint.facts.only_drafts:  # it has no tokenizer
        return {"chat": False, "tools": tools.line, "thinking": False, "vision": False}
    tokenizer = load_tokenizer(checkpoint)
    if checkpoint.facts.has_chat_template:
        try:
            template = ChatTemplate(tokenizer)
            tools, thinks = check_tools(template, tokenizer), reasoning_tags(template.template) is not None
        except LocalLLMError as error:
            return {"chat": False, "tools": f"no: {error.message}", "thinking": False, "vision": False}
    facts = checkpoint.facts
    sees = facts.vision is not None
    return {"chat": facts.has_chat_template, "tools": tools.line, "thinking": thinks, "vision": sees}


def _images(checkpoint: OpenModel) -> str:
    vision = checkpoint.facts.vision
    if vision is None:
        return checkpoint.unread or "no"
    least = f"{vision.least_tokens:,} to " if vision.least_tokens < vision.tokens else ""
    return f"yes, {least}{vision.tokens:,} tokens each"


def _size(facts: ModelFacts, nbytes: int) -> str:
    """Parameters, format and bytes; an n-gram table is among the latter only."""
    table = facts.ngrams and f", of which {gib(facts.ngrams.nbytes)} are an n-gram table that stays in the file"
    return f"{params_short(facts.num_params)}, {facts.stored_format}, {gib(nbytes)}{table or ''}"


def _chats(facts: ModelFacts) -> str:
    if facts.pooling:
        return f"no: an embedding model (pooling: {facts.pooling}, {facts.embedding_size:,} dimensions)"
    if facts.only_drafts:
        return "no: a drafter, for `localllm chat MODEL --draft`"
    return "yes" if facts.has_chat_template else "no: a base model, for `localllm run`"


def _attention(facts: ModelFacts) -> str:
    from localllm.models.architectures.mixers import CompressedAttention

    _, keys, values = facts.attention[0].kept
    ratios = sorted({mixer.ratio for mixer in facts.attention if isinstance(mixer, CompressedAttention)} - {0})
    if ratios:
        earlier = " or ".join(map(str, ratios))
        return f"{facts.num_heads} heads that share {keys} values per token, and one entry per {earlier} earlier tokens"
    if keys != values:
        return f"{facts.num_heads} heads over latents of {keys} values, plus {values} rotary"
    return f"{facts.num_heads} heads, {facts.num_kv_heads} KV heads, head size {facts.head_dim}"


def _print_facts(env: Env, checkpoint: OpenModel, fields: dict[str, Any]) -> None:
    from localllm.terminal import cell_width

    facts = checkpoint.facts
    windows = sorted({w for w in facts.windows if w})
    sliding = f", {sum(1 for w in facts.windows if w)} with a sliding window of {windows[0]:,}" if windows else ""
    here = fields["plan"]
    mark = "✓" if here.get("basis") == "measured" else "≈"
    requests = counted(env.config.engine.max_parallel, "request")
    fit = here.get("reason") or (
        f"{'fits' if here['fits'] else 'does not fit'} on {here['device']}: needs {gib(here['need_bytes'])} of"
        f" {gib(here['have_bytes'])} at {here['ctx']:,} tokens with {requests} at once,"
        f" {mark} {rate(here['decode_tps'])} tok/s"
    )
    fixed = f", plus {gib(fields['kv_fixed_bytes'])} per request" if fields["kv_fixed_bytes"] else ""
    rows = [
        ("name", fields["id"] if not facts.name else f"{fields['id']} ({facts.name})"),
        ("architecture", f"{facts.architecture} ({facts.source_architecture})"),
        ("parameters", _size(facts, fields["size_bytes"])),
        ("layers", f"{facts.num_layers}{sliding}"),
        ("attention", _attention(facts)),
        ("vocabulary", f"{facts.vocab_size:,} tokens"),
        ("context", f"{facts.max_context:,} tokens, {gib(fields['kv_bytes_per_token'])} each (bf16){fixed}"),
        ("chat template", _chats(facts)),
        ("reasoning", "yes" if fields["capabilities"]["thinking"] else "no"),
        ("tools", fields["capabilities"]["tools"]),
        ("images", _images(checkpoint)),
        *([("drafter", f"{fields['drafter']}, for --draft")] if fields["drafter"] else []),
        ("sampling", sampling_line(recommended(facts, Path(fields["path"])))),
        ("license", facts.license or "not stated"),
        ("here", fit),
        ("quality", quality_note(fields["path"]) or f"not measured (localllm eval {fields['id']})"),
        *(("file", home_short(Path(name))) for name in fields["files"][:8]),
    ]
    width = max(cell_width(label) for label, _ in rows)
    for label, value in rows:
        text = wrapped_at(width + 2, clean_line(str(value)), columns(env.console.out_tty))
        env.console.line(f"{env.console.style(label.ljust(width), 'dim')}  {text}")
    if len(fields["files"]) > 8:
        env.console.line(f"{' ' * width}  … {len(fields['files']) - 8} more files")
