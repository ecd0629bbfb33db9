"""`localllm ls`, `show`, `rm`: the models on this machine."""

from __future__ import annotations

import datetime
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli.frame import options as params
from localllm.cli.frame.command import Env, command
from localllm.cli.names import opened, resolve
from localllm.errors import ConfigError, LocalLLMError, ModelNotFound
from localllm.plan.quality import note as quality_note
from localllm.plan.quality import saved as saved_quality
from localllm.terminal import clean, clean_line, gib, tokens_short

if TYPE_CHECKING:
    from localllm.checkpoint import Checkpoint, ModelFacts
    from localllm.device import MachineFacts
    from localllm.hub import LocalModel
    from localllm.plan.planner import Plan
    from localllm.plan.speeds import Benches

SORTS = ("name", "size", "params", "used")
_FROM = {"hub": "Hugging Face cache", "index": "from the package index", "folder": "models folder"}


@command("localllm ls", "localllm ls --all", "localllm ls --json | jq -r '.models[].id'")
def ls(
    env: Env,
    everything: Annotated[
        bool, typer.Option("--all", help="Also damaged models and those this version cannot run.")
    ] = False,
    sort: Annotated[str, typer.Option(metavar="name|size|params|used", help="Order.")] = "name",
) -> int:
    """List the models on this machine, whether they fit, and how fast they should be."""
    from localllm import hub
    from localllm.device import machine
    from localllm.plan import speeds as calibrate

    if sort not in SORTS:
        raise ConfigError(f"--sort is {sort!r}, it can be {', '.join(SORTS)}", "localllm ls --sort size")
    facts = machine()
    found = hub.list_local()
    orders: dict[str, Any] = {
        "name": lambda m: m.name.casefold(),
        "size": lambda m: -m.size_bytes,
        "params": lambda m: -m.params,
        "used": lambda m: -(m.last_used or 0),
    }
    found.sort(key=orders[sort])
    shown = [m for m in found if everything or m.supported]
    benches = calibrate.load(facts)
    planned = [(model, _plan(model, facts, benches)) for model in shown]
    console = env.console
    if console.as_json:
        rows = [_ls_row(model, made) for model, made in planned]
        console.emit("ls/1", {"cache": str(hub.cache.hub_dir()), "free_bytes": _free(), "models": rows})
        return 0
    total = sum(m.size_bytes for m in shown)
    count = f"{len(shown)} model{'' if len(shown) == 1 else 's'}"
    console.say(f"{count} · {gib(total)} · {gib(_free())} free in {clean_line(_short(hub.cache.hub_dir()))}")
    if shown:
        columns = ("NAME", "PARAMS", "FORMAT", "SIZE", "CTX", "FITS", "SPEED", "USED", "")
        cells = [_cells(model, made) for model, made in planned]
        console.table(columns, cells, right=columns[1:2] + columns[3:5], spare=("USED", "", "PARAMS", "CTX", "FORMAT"))
    hidden = len(found) - len(shown)
    if hidden:
        console.say(f"{hidden} more cannot be run: localllm ls --all")
    if not found:
        console.say("Next: localllm pull smollm2")
    return 0


def _plan(model: LocalModel, machine: MachineFacts, benches: Benches) -> Plan | None:
    from localllm.plan.planner import plan

    if model.facts is None or not model.supported:
        return None
    try:
        return plan(model.facts, machine, calibration=benches)
    except LocalLLMError:
        return None


def _cells(model: LocalModel, made: Plan | None) -> tuple[str, ...]:
    from localllm import hub

    if made is None:
        return (model.name, "", model.format, gib(model.size_bytes), "", "✗", "–", _ago(model.last_used), model.reason)
    mark = "✓" if made.basis == "measured" else "≈"
    note = _FROM[model.source] if model.source != "hub" else ""
    if (model.path / hub.local.QUANTIZED).is_file():
        note = "quantised here"
    if not model.chat:
        note = f"{note}, base model" if note else "base model"
    quality = quality_note(model.path, made.kv)
    return (
        model.name,
        _params(model.params),
        model.format,
        gib(model.size_bytes),
        tokens_short(model.max_context),
        f"✓ {tokens_short(made.ctx)}" if made.fits else "✗",
        f"{mark} {made.decode_tps:.0f} t/s" if made.fits else "–",
        _ago(model.last_used),
        " · ".join(part for part in (note, quality) if part),
    )


def _ls_row(model: LocalModel, made: Plan | None) -> dict[str, Any]:
    return {
        "id": model.name,
        "revision": model.revision or None,
        "format": "gguf" if model.path.suffix.lower() == ".gguf" else "safetensors",
        "dtype": model.format or None,
        "architecture": model.architecture or None,
        "params": model.params,
        "size_bytes": model.size_bytes,
        "max_ctx": model.max_context,
        "chat": model.chat,
        "supported": model.supported,
        "broken": model.broken,
        "reason": model.reason or None,
        "fits": {"ok": made.fits, "max_ctx": made.max_ctx} if made else {"ok": False, "max_ctx": 0},
        "speed": {"tps": round(made.decode_tps, 1), "basis": made.basis} if made else None,
        "quality": next(iter(saved_quality(model.path)), None),
        "last_used": _iso(model.last_used),
        "source": model.source,
        "path": str(model.path),
    }


# --- show ------------------------------------------------------------------------------------------------------------


@command("localllm show smollm2", "localllm show ./model.gguf --json", "localllm show qwen --template")
def show(
    env: Env,
    model: params.Model,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template.")] = False,
) -> int:
    """Say what a model is: architecture, context, licence, files, memory, and what it would run as here.

    Reads headers only, so a damaged file is found in milliseconds (exit 12).
    """
    resolved = resolve(env, env.config, model)
    if resolved.path is None:
        name = clean_line(resolved.name)
        raise ModelNotFound(f"{name} is not on this machine", f"localllm pull {name}")
    with opened(resolved) as checkpoint:
        if template:
            text = _template(checkpoint)
            if env.console.as_json:
                env.console.emit("template/1", {"id": resolved.name, "template": text})
                return 0
            env.console.answer(text if text.endswith("\n") else text + "\n")
            return 0
        fields = _show_fields(checkpoint, resolved.name, resolved.revision)
        if env.console.as_json:
            env.console.emit("show/1", fields)
        else:
            _print_facts(env, checkpoint.facts, fields)
    return 0


def _template(checkpoint: Checkpoint) -> str:
    from localllm.tokenizer.tokenizer import load_tokenizer

    text = load_tokenizer(checkpoint).chat_template
    if not text:
        raise ModelNotFound(
            "this model has no chat template: it is a base model", 'localllm run MODEL "Once upon a time"'
        )
    return text


def _show_fields(checkpoint: Checkpoint, name: str, revision: str) -> dict[str, Any]:
    from localllm.checkpoint.facts import kv_bytes_per_token
    from localllm.device import machine
    from localllm.plan import speeds as calibrate
    from localllm.plan.planner import plan

    facts = checkpoint.facts
    try:
        here_now = machine()
        made = plan(facts, here_now, calibration=calibrate.load(here_now))
        here = {
            "fits": made.fits,
            "device": made.device,
            "ctx": made.ctx,
            "kv": made.kv,
            "need_bytes": made.need_bytes,
            "have_bytes": made.have_bytes,
            "decode_tps": round(made.decode_tps, 1),
            "basis": made.basis,
        }
    except LocalLLMError as error:
        here = {"fits": False, "reason": error.message}
    return {
        "id": name,
        "path": str(checkpoint.path),
        "format": checkpoint.kind,
        "stored_format": facts.stored_format,
        "architecture": facts.architecture,
        "source_architecture": facts.source_architecture,
        "name": facts.name,
        "params": facts.num_params,
        "size_bytes": checkpoint.nbytes,
        "max_ctx": facts.max_context,
        "quality": saved_quality(checkpoint.path),
        "layers": facts.num_layers,
        "hidden": facts.hidden_size,
        "heads": facts.num_heads,
        "kv_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "vocab": facts.vocab_size,
        "kv_bytes_per_token": kv_bytes_per_token(facts, "bf16"),
        "template": facts.has_chat_template,
        "capabilities": _capabilities(checkpoint),
        "licence": facts.licence or None,
        "revision": revision or None,
        "sampling_defaults": dict(facts.sampling_defaults),
        "tensors": len(checkpoint.tensors),
        "files": sorted({str(tensor.file) for tensor in checkpoint.tensors.values()}),
        "plan": here,
    }


def _capabilities(checkpoint: Checkpoint) -> dict[str, Any]:
    """chat, thinking, vision: whether; tools: how, or why not."""
    from localllm.chat.parser import reasoning_tags
    from localllm.chat.template import ChatTemplate
    from localllm.chat.tools.roundtrip import NO_TEMPLATE, check_tools
    from localllm.tokenizer.tokenizer import load_tokenizer

    tools, thinks = NO_TEMPLATE, False
    if checkpoint.facts.has_chat_template:
        try:
            tokenizer = load_tokenizer(checkpoint)
            template = ChatTemplate.for_tokenizer(tokenizer)
            tools, thinks = check_tools(template, tokenizer), reasoning_tags(template.template) is not None
        except LocalLLMError as error:
            return {"chat": False, "tools": f"no: {error.message}", "thinking": False, "vision": False}
    return {"chat": checkpoint.facts.has_chat_template, "tools": tools.line, "thinking": thinks, "vision": False}


def _print_facts(env: Env, facts: ModelFacts, fields: dict[str, Any]) -> None:
    from localllm.terminal import cell_width

    windows = sorted({w for w in facts.windows if w})
    sliding = f", {sum(1 for w in facts.windows if w)} of them with a window of {windows[0]:,}" if windows else ""
    here = fields["plan"]
    sampling = ", ".join(f"{key} {value}" for key, value in facts.sampling_defaults.items()) or "not stated"
    mark = "✓" if here.get("basis") == "measured" else "≈"
    fit = here.get("reason") or (
        f"{'fits' if here['fits'] else 'does not fit'} on {here['device']}: needs {gib(here['need_bytes'])} of"
        f" {gib(here['have_bytes'])} at {here['ctx']:,} tokens, {mark} {here['decode_tps']:.0f} tok/s"
    )
    rows = [
        ("name", fields["id"] if not facts.name else f"{fields['id']} ({facts.name})"),
        ("architecture", f"{facts.architecture} ({facts.source_architecture})"),
        ("parameters", f"{_params(facts.num_params)}, {facts.stored_format}, {gib(fields['size_bytes'])}"),
        ("layers", f"{facts.num_layers}{sliding}"),
        ("attention", f"{facts.num_heads} heads, {facts.num_kv_heads} for K and V, {facts.head_dim} wide"),
        ("vocabulary", f"{facts.vocab_size:,} tokens"),
        ("context", f"{facts.max_context:,} tokens, {gib(fields['kv_bytes_per_token'])} each (bf16)"),
        ("chat template", "yes" if facts.has_chat_template else "no: a base model, for `localllm run`"),
        ("thinking", "yes" if fields["capabilities"]["thinking"] else "no"),
        ("tools", fields["capabilities"]["tools"]),
        ("sampling", sampling),
        ("licence", facts.licence or "not stated"),
        ("here", fit),
        ("quality", quality_note(fields["path"]) or "not measured (localllm eval)"),
        *(("file", _short(Path(name))) for name in fields["files"][:8]),
    ]
    width = max(cell_width(label) for label, _ in rows)
    for label, value in rows:
        env.console.line(f"{env.console.style(label.ljust(width), 'dim')}  {clean_line(str(value))}")
    if len(fields["files"]) > 8:
        env.console.line(f"{' ' * width}  … {len(fields['files']) - 8} more files")


# --- rm --------------------------------------------------------------------------------------------------------------


@command("localllm rm smollm2", "localllm rm org/repo:Q4_K_M -y", "localllm rm --partial")
def rm(
    env: Env,
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="Names as `ls` shows them.", autocompletion=params.complete_model),
    ] = None,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Only say what would be removed.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Remove what interrupted downloads left.")] = False,
    quantized_only: Annotated[
        bool, typer.Option("--quantized-only", help="Only what `quantize` made of these models, not they themselves.")
    ] = False,
) -> int:
    """Remove models, or left-over parts of downloads. Says who else uses the files, and asks first."""
    from localllm import hub

    console = env.console
    if partial == bool(models):
        raise ConfigError("rm takes either names or --partial", "localllm rm NAME, or localllm rm --partial")

    def remove(dry_run: bool) -> list[hub.Removal]:
        if partial:
            return [hub.remove_partials(dry_run=dry_run)]
        return [hub.remove(name, dry_run=dry_run, derived_only=quantized_only) for name in models or ()]

    planned = remove(dry_run=True)
    total = sum(item.num_bytes for item in planned)
    paths = [path for item in planned for path in item.paths]
    names = [name for item in planned for name in item.names]
    for name in names:
        console.say(f"{clean_line(name)}")
    for note in dict.fromkeys(item.note for item in planned if item.note):
        console.say(f"note: {clean(note)}")
    console.say(f"{len(paths)} file{'' if len(paths) == 1 else 's'}, {gib(total)}")
    if paths and not dry_run and not console.confirm("Remove?", default=False):
        raise ConfigError("nothing was removed", "answer y, or pass -y")
    done = planned
    if paths and not dry_run:
        done = remove(dry_run=False)
        console.say(f"removed {gib(sum(item.num_bytes for item in done))}")
    if console.as_json:
        fields = {
            "removed": bool(paths) and not dry_run,
            "models": names,
            "bytes": sum(item.num_bytes for item in done),
            "paths": [str(path) for item in done for path in item.paths],
        }
        console.emit("rm/1", fields)
    return 0


# --- words -----------------------------------------------------------------------------------------------------------


def _params(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def _free() -> int:
    from localllm import hub

    folder = hub.cache.hub_dir()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _short(path: Path) -> str:
    """A path with the home folder as ~."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def _ago(when: float | None) -> str:
    if when is None:
        return "–"
    days = int((time.time() - when) // 86400)
    return "today" if days < 1 else f"{days} d"


def _iso(when: float | None) -> str | None:
    if when is None:
        return None
    return datetime.datetime.fromtimestamp(when, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
