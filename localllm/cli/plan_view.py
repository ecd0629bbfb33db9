"""`localllm plan` for people: the table, the memory bar of the recommended row, and with -v the formulas."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.frame.console import Console, columns, wrapped
from localllm.terminal import GIB, cell_width, clean, clean_line, counted, gib, rate, seconds_short, tokens_short

if TYPE_CHECKING:
    from localllm.cli.frame.command import Env
    from localllm.hub.catalog import Candidate
    from localllm.models.architectures import ModelFacts
    from localllm.plan.plan import Plan
    from localllm.plan.planner import Planner

MIN_BAR, MAX_BAR = 20, 64
FIRST_TOKEN_AT = 8192  # prompt length for the estimated time to first token
MIN_SHOWN = 16 << 20  # less free memory than this is not shown
EIGHT_BITS = ("int8", "fp8")
# part of the memory -> word, character, ASCII character, style
PARTS = {
    "weights": ("weights", "█", "#", "cyan"),
    "kv": ("KV", "▓", "=", "green"),
    "reuse": ("more KV", "▒", "+", "green"),
    "work": ("work", "▚", "%", "yellow"),
    "margin": ("margin", "▪", ":", "dim"),
    "free": ("free", "░", ".", "dim"),
}
MEANING = {
    "weights": "as loaded",
    "kv": "KV cache of concurrent requests, and of finished prompts for reuse",
    "context": "CUDA context, loaded kernels, library workspaces",
    "program": "Python, torch, the tokenizer",
    "activations": "intermediate results of the largest step",
    "logits": "for the sampled tokens",
    "graphs": "captured decode steps with their outputs",
    "tables": "positions and pages",
    "gathered": "KV cache gathered by attention without our kernels",
    "learned": "what an earlier run used beyond its plan",
    "margin": "left free for others",
}


@dataclass(frozen=True, eq=False)
class Subject:
    """One file of one model to plan for."""

    name: str
    shown: str
    quant: str
    facts: ModelFacts
    local: bool
    download_bytes: int = 0
    base: bool = False  # a base model: completes text
    asked: str = ""  # the word on the command line that selected it
    path: Path | None = None  # its files, when it is on this machine
    entry: Candidate | None = None  # its catalog entry, or one made up for it
    needs: str = ""  # what is missing to run it

    @property
    def gpu_only(self) -> bool:
        return not self.local and self.entry is not None and self.entry.device == "gpu"


@dataclass(frozen=True, eq=False)
class Row:
    """One subject at one context window."""

    subject: Subject
    wished: int | str  # the requested window: tokens, auto or max
    plan: Plan | None
    reason: str = ""  # why there is no plan
    fixes: tuple[tuple[str, str], ...] = ()

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits

    @property
    def weights(self) -> str:
        """The format of the weights as they would run."""
        return (self.plan.quant if self.plan else "") or self.subject.facts.stored_format


@dataclass(frozen=True)
class Sheet:
    """Everything that `plan` shows."""

    planner: Planner
    rows: tuple[Row, ...]
    windows: tuple[int | str, ...]
    star: Row | None  # the recommended row, at the window that `chat` would use
    imagined: bool
    target_tps: float
    shown: tuple[Subject, ...]  # in display order
    hints: tuple[str, ...] = ()
    command: str = ""  # starts the recommended model as planned

    @property
    def benched(self) -> bool:
        """Whether the bandwidth comes from a bench on this machine."""
        made = next((row.plan for row in self.rows if row.plan), None)
        if made is None or self.imagined:
            return False
        name = "cpu" if made.device == "cpu" else self.planner.machine.gpus[int(made.device[5:] or 0)].name
        return any(one.device == name and one.bytes_s for one in self.planner.measured.speeds.measured)

    def of(self, subject: Subject) -> list[Row]:
        return [row for row in self.rows if row.subject is subject]

    @property
    def subjects(self) -> list[Subject]:
        return list(dict.fromkeys(row.subject for row in self.rows))


def show(env: Env, sheet: Sheet) -> None:
    """Print everything: results to stdout, remarks to stderr."""
    console = env.console
    console.paragraph(machine_line(sheet))
    if not sheet.rows:
        console.say("no models here yet: localllm pull smollm2")
        return
    _table(env, sheet)
    for line in _remarks(sheet):
        console.paragraph(line)
    if sheet.star and sheet.star.plan:
        console.line()
        for line in (*sheet.hints, *bar(env, sheet.star.plan, sheet.star.subject)):
            _broken(console, line) if line in sheet.hints else console.line(line)
        if not sheet.imagined:
            console.say(f"Next: {clean_line(sheet.command)}")
    else:
        for line in sheet.hints:
            _broken(console, line)
    if console.verbose:
        for row in sheet.rows:
            if row.plan and (row.subject.asked or row is sheet.star or len(sheet.subjects) < 4):
                console.line()
                for line in formulas(row, sheet):
                    _broken(console, clean(line))


def _broken(console: Console, line: str) -> None:
    """Print a line to stdout, wrapped at words on a terminal that is too narrow."""
    room = columns(console.out_tty)
    indent = " " * (len(line) - len(line.lstrip()))
    if cell_width(line) <= room:
        console.line(line)
        return
    for part in wrapped(line.strip(), max(30, room), initial_indent=indent, subsequent_indent=f"{indent}  "):
        console.line(part)


def machine_line(sheet: Sheet) -> str:
    """Describe the planned machine in one line."""
    machine = sheet.planner.machine
    made = next((row.plan for row in sheet.rows if row.plan), None)
    parts = []
    for gpu in machine.gpus:
        speed = f", {gpu.bandwidth / 1e9:,.0f} GB/s" if gpu.bandwidth else ", bandwidth unknown"
        parts.append(f"{gpu.name}{' (not here)' if sheet.imagined else ''}, {gib(gpu.free_bytes)} free{speed}")
    if not parts:
        parts.append("no GPU")
    parts.append(f"{machine.cpu.name}, {machine.cpu.cores_usable} cores")
    parts.append(f"{gib(machine.ram_available_bytes)} of {gib(machine.ram_total_bytes)} RAM free")
    if made and made.eta:
        basis = "from benches here" if sheet.benched else "default; `localllm bench MODEL` measures it"
        parts.append(f"η {made.eta:.2f} ({basis})")
    return clean_line(" · ".join(parts))


# --- the table --------------------------------------------------------------------------------------------------------


def _table(env: Env, sheet: Sheet) -> None:
    windows = [_window(one) for one in sheet.windows]
    speed, first = f"TOK/S 0 → {windows[-1]}", f"FIRST TOKEN {tokens_short(FIRST_TOKEN_AT)}"
    columns = ["MODEL", "FORMAT", "WEIGHTS", *windows, "MEM CTX", speed, first, "", "DOWNLOAD"]
    cells = [_cells(sheet, subject) for subject in sheet.shown]
    right = ("WEIGHTS", "MEM CTX", first, "DOWNLOAD")
    hidden = len(sheet.subjects) - len(sheet.shown)
    last = ("FORMAT", *windows[:-1]) if hidden else (*windows[:-1], "FORMAT")
    env.console.table(columns, cells, right=right, spare=("DOWNLOAD", first, "WEIGHTS", "", *last))
    if hidden:
        env.console.say(f"{counted(hidden, 'more file')} of these models: --all")


def _cells(sheet: Sheet, subject: Subject) -> list[str]:
    rows = sheet.of(subject)
    made = next((row.plan for row in rows if row.plan), None)
    if made is None:
        return [subject.shown, subject.quant, "", *["✗"] * len(rows), "", "", "", rows[0].reason, _download(subject)]
    fitting = [row.plan for row in rows if row.plan and row.fits]
    speed = "–"
    if fitting:
        mark = "✓" if made.basis == "measured" else "≈"
        last = fitting[-1] if rows[-1].fits else None
        speed = f"{mark} {rate(made.decode_tps)} → {rate(last.decode_tps_full) if last else '–'}"
    longest = max(row.plan.max_ctx for row in rows if row.plan)
    most = tokens_short(longest) if longest else "–"
    star = sheet.star is not None and sheet.star.subject is subject
    wait = made.first_token_s(FIRST_TOKEN_AT) if longest >= FIRST_TOKEN_AT else 0.0
    return [
        f"★ {subject.shown}" if star else subject.shown,
        _short_format(subject.quant) + (f"→{made.quant}" if made.quant else ""),
        gib(made.weight_bytes),
        *[_fit(row) for row in rows],
        most,
        speed,
        f"≈ {seconds_short(wait)}" if wait else "–",
        _verdict(sheet, subject, rows),
        _download(subject),
    ]


def _download(subject: Subject) -> str:
    return "on disk" if subject.local else gib(subject.download_bytes)


def option_line(subject: Subject, made: Plan) -> str:
    """'qwen3-32b awq, 20k tokens of context, ≈ 37 tok/s, first token of 8k after ≈ 4.2 s'."""
    mark = "✓" if made.basis == "measured" else "≈"
    prompt = min(FIRST_TOKEN_AT, made.ctx)
    wait = made.first_token_s(prompt)
    first = f", first token of {tokens_short(prompt)} after ≈ {seconds_short(wait)}" if wait else ""
    what = f"{clean_line(subject.shown)} {_short_format(subject.quant)}"
    return f"{what}, {tokens_short(made.ctx)} tokens of context, {mark} {rate(made.decode_tps)} tok/s{first}"


def _short_format(name: str) -> str:
    return name.replace("compressed-tensors ", "")


def _fit(row: Row) -> str:
    """The memory that a window needs in GiB: for one sequence if it fits, else also how much is missing."""
    made = row.plan
    if made is None:
        return "✗"
    need = made.least_bytes if row.fits else made.need_bytes
    text = f"{need / GIB:.1f}"
    own = " own" if isinstance(row.wished, int) and made.ctx < row.wished else ""
    missing = "" if row.fits else f" −{max(0.1, (need - made.have_bytes) / GIB):.1f}"
    eight = " kv8" if made.kv in EIGHT_BITS and row.fits else ""
    return f"{text} {'✓' if row.fits else '✗'}{eight}{missing}{own}"


def _verdict(sheet: Sheet, subject: Subject, rows: list[Row]) -> str:
    words = []
    if sheet.star and sheet.star.subject is subject:
        words.append("recommended")
    if subject.base:
        words.append(subject.facts.kind)
    if subject.needs:
        words.append(f"needs {subject.needs}")
    if away := max((row.plan.host_bytes for row in rows if row.plan), default=0):
        words.append(f"{gib(away)} of experts in RAM")
    if not any(row.fits for row in rows):
        least = min((row.plan for row in rows if row.plan), key=lambda made: made.need_bytes)
        words.append(f"needs {gib(least.need_bytes)}")
    elif sheet.target_tps and all(r.plan is None or r.plan.decode_tps < sheet.target_tps for r in rows):
        words.append(f"below {sheet.target_tps:g} tok/s")
    return " · ".join(words)


def _window(one: int | str) -> str:
    return tokens_short(one) if isinstance(one, int) else one


def _remarks(sheet: Sheet) -> list[str]:
    sizes = "columns in GiB: weights, KV cache of one request, work, margin"
    lines = [f"{sizes} · MEM CTX: the largest context that fits"]
    rows = [row for row in sheet.rows if row.subject in sheet.shown]
    if any(isinstance(row.wished, int) and row.plan and row.plan.ctx < row.wished for row in rows):
        lines.append("own: the model's own limit is below this window")
    if any(row.plan and row.plan.basis == "measured" for row in rows):
        lines.append("✓ measured here, ≈ estimated")
    if any(row.plan and row.plan.kv in EIGHT_BITS and row.fits for row in rows):
        lines.append("kv8: KV cache in 8 bits, because 16 would not fit")
    if any(row.plan and row.plan.quant for row in rows):
        lines.append("bf16→fp8: too large as stored, so weights are converted while loading")
    lines += [f"quality of {clean_line(name)}: {note}, measured here" for name, note in qualities(sheet)]
    star = sheet.star.plan if sheet.star else None
    if star and sheet.star and sheet.star.wished == "auto" and star.ctx < star.max_ctx:
        lines += [f"★ {reason}" for reason in star.reasons if reason.startswith("context ")]
    if star:
        lines += [clean_line(line) for line in (star.idle, *star.warnings) if line]
    return lines


def qualities(sheet: Sheet) -> list[tuple[str, str]]:
    """(model, result of `localllm eval`) for the formats that would run, each once."""
    from localllm.plan.quality import note

    found: dict[tuple[str, str], None] = {}
    for row in sheet.rows:
        if row.plan and row.subject.path and (said := note(row.subject.path, row.plan.kv, row.weights)):
            found[f"{row.subject.shown} {row.weights}", said] = None
    return list(found)


# --- the bar ----------------------------------------------------------------------------------------------------------


def bar(env: Env, made: Plan, subject: Subject) -> list[str]:
    """The memory of the recommended row as a bar with a legend. It covers every byte of the plan."""
    console = env.console
    sizes = pieces(made)
    columns = shutil.get_terminal_size().columns if console.out_tty else 100
    place = "RAM" if made.device == "cpu" else "VRAM"
    head = f"★ {clean_line(subject.shown)} {_short_format(subject.quant)}, {made.ctx:,} tokens of context"
    width = max(MIN_BAR, min(MAX_BAR, columns - 16))
    lengths = shares(list(sizes.values()), width)
    ascii_only = console.glyphs("✓") != "✓"
    blocks = ""
    for name, length in zip(sizes, lengths, strict=True):
        _, mark, plain, style = PARTS[name]
        blocks += console.style((plain if ascii_only else mark) * length, style)
    lines = [head, f"{place.ljust(4)} [{blocks}] {gib(made.have_bytes)}"]
    legend, used = "      ", 6
    for name, size in sizes.items():
        word, mark, plain, style = PARTS[name]
        piece = f"{plain if ascii_only else mark} {word} {gib(size)}"
        if used + cell_width(piece) > columns - 1 and used > 6:
            lines.append(legend.rstrip())
            legend, used = "      ", 6
        legend += console.style(piece[0], style) + piece[1:] + "   "
        used += cell_width(piece) + 3
    return [*lines, legend.rstrip()]


def pieces(made: Plan) -> dict[str, int]:
    """Parts of the usable memory in bar order; a rest below MIN_SHOWN is left out."""
    reuse = max(0, made.kv_bytes - made.sequence_bytes)
    known = {"weights": made.weight_bytes, "kv": made.kv_bytes - reuse, "reuse": reuse, "margin": made.margin_bytes}
    known["work"] = sum(made.parts().values()) - sum(known.values())
    order = {name: known[name] for name in ("weights", "kv", "reuse", "work", "margin")}
    free = made.have_bytes - made.need_bytes
    order["free"] = free if free >= MIN_SHOWN else 0
    return {name: size for name, size in order.items() if size > 0}


def shares(sizes: Sequence[int], width: int) -> list[int]:
    """Lengths proportional to `sizes` that add up to `width`; each is at least one."""
    total = sum(sizes) or 1
    lengths = [max(1, round(size * width / total)) for size in sizes]
    while sum(lengths) > width:
        lengths[max(range(len(lengths)), key=lambda i: lengths[i])] -= 1
    while sum(lengths) < width:
        lengths[max(range(len(lengths)), key=lambda i: sizes[i] * width / total - lengths[i])] += 1
    return lengths


# --- formulas ---------------------------------------------------------------------------------------------------------


def formulas(row: Row, sheet: Sheet) -> list[str]:
    """Every term of a row in bytes, and how the speed was derived."""
    from localllm.plan.speeds import LAUNCH_S

    made, facts = row.plan, row.subject.facts
    assert made is not None
    parts: Mapping[str, int] = made.terms()
    lines = [f"{row.subject.shown} {row.subject.quant} at {made.ctx:,} tokens on {made.place}"]
    width = max(len(name) for name in [*parts, "decode"])
    digits = max(len(f"{size:,}") for size in [made.need_bytes, made.have_bytes])
    for name, size in parts.items():
        lines.append(f"  {name.ljust(width)}  {size:>{digits},} B  {MEANING.get(name, '')}".rstrip())
    lines.append(f"  {'need'.ljust(width)}  {made.need_bytes:>{digits},} B  = {' + '.join(parts)}")
    verdict = "it fits" if made.fits else f"{made.need_bytes - made.have_bytes:,} B too much"
    lines.append(f"  {'have'.ljust(width)}  {made.have_bytes:>{digits},} B  {verdict}")
    lines += [f"  {line}" for line in _model_lines(row)]
    host_terms = ""
    if made.host_experts:
        host_terms = " + the time of the experts in host memory"
        read = f"each token reads {made.host_read_bytes:,} B of them"
        lines.append(f"  {made.host_experts} experts per layer = {made.host_bytes:,} B in host memory; {read}")
    if made.device != "cpu" and made.launches:
        host_terms += f" + {made.launches:,} launches × {LAUNCH_S['cuda'] * 1e6:.0f} µs, more with the context"
    if made.bandwidth:
        lines.append(
            f"  decode = 1 / ({made.read_bytes:,} B / ({made.eta:.2f} × {made.bandwidth / 1e9:,.0f} GB/s)"
            f" + {facts.num_layers} layers × a constant{host_terms}) = {rate(made.decode_tps)} tok/s at the start,"
            f" {rate(made.decode_tps_full)} with {made.sequence_bytes:,} B of KV cache"
        )
    if made.basis == "measured":
        lines.append("  the speed at the start was measured here; the rest is estimated")
    lines += [f"  {reason}" for reason in made.reasons]
    return lines


def _model_lines(row: Row) -> list[str]:
    """The formulas of weights and KV cache with the model's numbers."""
    from localllm.models.architectures.facts import kv_bytes_per_token, state_layers
    from localllm.models.architectures.mixers import CompressedAttention, Entries, Paged

    assert row.plan is not None
    facts, kv, state = row.subject.facts, row.plan.kv, row.subject.facts.state_bytes
    lines = [
        f"weights = {facts.num_params:,} values stored as {facts.stored_format}: {facts.weight_bytes:,} B in the file"
    ]
    if (table := facts.ngrams) is not None:
        lines.append(
            f"n-gram table = {table.rows:,} rows of {table.dim} values: {table.nbytes:,} B that stay in the file;"
            f" a token reads {len(table.sizes)} rows"
        )
    for group in facts.cache_layers:
        layer = facts.keeping_layers[group[0]]
        own = group if isinstance(layer.mixer, Entries) else [index for index in group if index < facts.num_layers]
        count = len(own)
        if not count or not isinstance(layer.mixer, Paged):  # a prediction head, which may be unused
            continue
        heads, keys, values = layer.mixer.kept
        window = f" that keep a window of {layer.mixer.window:,}" if layer.mixer.window else ""
        kept = f"2 × {count} layers{window} × {heads} heads × {keys}"
        if keys != values:  # latents, and the rotary part of the keys
            kept = f"{count} layers{window} × ({keys} + {values})"
        index, more = layer.mixer.index, ""
        if index is not None:
            more = f", and {index.dim + index.dim // index.ratio} in 16 bits for the index"
        one = kv_bytes_per_token([layer], kv)
        if isinstance(layer.mixer, Entries):
            made = f"{counted(count, 'layer')} × {layer.mixer.dim} values for {layer.mixer.ratio} tokens in 16 bits"
            lines.append(f"compressed KV = {made}: {one:,} B per layer and token")
            continue
        if isinstance(layer.mixer, CompressedAttention):
            rows = layer.mixer.beside
            made = f"{counted(count, 'layer')} × {keys} values in {kv}"
            made += f", and {rows[0]:,} in 16 bits to make entries of" if rows else ""
            lines.append(f"KV of the last {layer.mixer.window:,} tokens = {made}: {one:,} B per layer and token")
            continue
        lines.append(f"KV = {kept} values in {kv}{more}: {one:,} B per layer and token")
    if state:
        stateful = len({layer for layers, _ in state_layers(facts) for layer in layers})
        lines.append(f"state = {stateful} layers of constant size: {state:,} B per sequence")
    return lines
