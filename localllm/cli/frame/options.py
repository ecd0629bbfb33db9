"""Options that several commands share: which model, how to load it, how to choose tokens.

An option that sets a setting for one command takes its choices, limits and default help from `localllm.config`. A
command takes a group of options as one parameter of the group's type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from localllm.cli.frame.command import Env
from localllm.config import KEYS, UserConfig
from localllm.config.kinds import parse_bytes, parse_tokens
from localllm.errors import ConfigError
from localllm.request import check_stops

if TYPE_CHECKING:
    from localllm.plan.planner import Planner

NAMES = {"adapter": "adapters"}  # options whose setting has another name
MAX_TEXT_BYTES = 16 << 20  # for a prompt, a file or a schema: about four million tokens


def setting(path: str, *spelled: str, metavar: str = "", meaning: str = "") -> Any:
    """An option that overrides the setting `path` for one command."""
    key = KEYS[path]
    meaning = meaning or f"{key.meaning[:1].upper()}{key.meaning[1:]}."
    return Option(
        *spelled, metavar=metavar or "|".join(key.kind.names()) or "N", help=meaning,
        autocompletion=lambda incomplete: [name for name in key.kind.names() if name.startswith(incomplete)],
    )  # fmt: skip


def complete_model(incomplete: str) -> list[str]:
    """Names of local models, for shell completion."""
    from localllm.cli.frame.completion import local_names

    return [name for name in local_names() if name.startswith(incomplete)]


def model_argument(metavar: str, meaning: str = "A name, alias, org/repo[:quant][@revision], file or folder.") -> Any:
    """An argument that names models; an empty name is an error, not the default model."""

    def named(value: str | list[str] | None) -> str | list[str] | None:
        if "" in ((value,) if isinstance(value, str) else value or ()):
            raise ConfigError("the model name is empty", "`localllm ls` lists the models on this machine")
        return value

    return Argument(metavar=metavar, help=meaning, autocompletion=complete_model, callback=named)


Model = Annotated[str, model_argument("MODEL")]
MaybeModel = Annotated[str | None, model_argument("[MODEL]")]
Models = Annotated[list[str], model_argument("MODEL...")]
System = Annotated[str | None, Option("-s", "--system", metavar="TEXT|@FILE", help="Instructions for the model.")]
THINK = "auto|off|on|low|medium|high"
Think = Annotated[str | None, Option(metavar=THINK, help="Reasoning, for models that can switch it.")]
Preset = Annotated[str | None, Option(metavar="NAME", help="A preset: instructions and sampling from the settings.")]
AttachTo = Annotated[
    str, Option(metavar="auto|off|URL", help="Use a running `localllm serve`; auto finds one with the model.")
]
Kv = Annotated[str | None, setting("engine.kv", "--kv")]
Draft = Annotated[
    str | None,
    setting("engine.draft", "--draft", metavar="MODEL", meaning="Smaller model or drafter for speculative decoding."),
]
Mmproj = Annotated[
    str | None,
    setting(
        "engine.mmproj", "--mmproj", metavar="auto|off|FILE", meaning="mmproj file with a GGUF model's image encoder."
    ),
]
Experts = Annotated[
    str | None, setting("engine.experts", "--experts", meaning="Where to keep MoE experts: GPU or host memory.")
]
TensorParallel = Annotated[
    str | None,
    setting("engine.tensor_parallel", "--tensor-parallel", metavar="N|auto", meaning="GPUs to split the model across."),
]
Split = Annotated[
    str | None, setting("engine.split", "--split", meaning="How to split it: within each layer, or by layers.")
]
Parallel = Annotated[int | None, Option(metavar="N", min=1, max=1024, help="Requests to run at the same time.")]


def _checked_stops(value: list[str] | None) -> list[str] | None:
    check_stops(value or ())
    return value


@dataclass(frozen=True)
class WindowFlags:
    """The context window and the format of its keys and values."""

    ctx: Annotated[
        str | None,
        setting("engine.ctx", "--ctx", metavar="N|max|auto", meaning="Context window in tokens: 8192, 32k."),
    ] = None
    kv: Kv = None

    def settings(self) -> dict[str, Any]:
        """The given flags as setting paths -> values."""
        given = asdict(self)
        return {f"engine.{NAMES.get(name, name)}": given[name] for name in given if name != "debug_invariants"}


@dataclass(frozen=True)
class LoadFlags(WindowFlags):
    """How to load a model."""

    dtype: Annotated[str | None, setting("engine.dtype", "--dtype")] = None
    activations: Annotated[
        str | None,
        setting(
            "engine.activations",
            "--activations",
            meaning="Activation format; int8 is less exact but faster on some CPUs.",
        ),
    ] = None
    threads: Annotated[str | None, setting("engine.threads", "--threads", metavar="N|auto", meaning="CPU threads.")] = (
        None
    )
    experts: Experts = None
    speculation: Annotated[
        str | None, setting("engine.speculation", "--speculation", meaning="Speculative decoding.")
    ] = None
    draft: Draft = None
    mmproj: Mmproj = None
    tensor_parallel: TensorParallel = None
    split: Split = None
    kv_store: Annotated[
        str | None,
        setting("engine.kv_store", "--kv-store", metavar="SIZE", meaning="Keep KV pages on disk, up to this size: 8G."),
    ] = None


@dataclass(frozen=True)
class EngineFlags(LoadFlags):
    """How to load a model, and whether its engine checks itself."""

    adapter: Annotated[
        list[str] | None,
        setting(
            "engine.adapters", "--adapter", metavar="NAME=PATH", meaning="LoRA adapter (a PEFT folder); repeatable."
        ),
    ] = None
    debug_invariants: Annotated[
        bool,
        Option(
            "--debug-invariants",
            help="Check all page counts after every step (slow); run, serve and batch exit 3 on a mismatch.",
        ),
    ] = False

    def config(
        self, env: Env, more: dict[str, Any], *, strict: bool = False, exits: bool = True, parallel: int | None = None
    ) -> UserConfig:
        """Load the settings with these flags and `more`; `exits` ends the process if a --debug-invariants check fails.

        strict     as in `Env.settings`
        parallel   concurrent requests when the settings do not say; None for their default
        """
        if self.debug_invariants and exits:
            from localllm.engine.invariant import exit_on_violation

            exit_on_violation()
        config = env.settings(self.settings() | more, strict=strict)
        changes: dict[str, Any] = {"debug_invariants": self.debug_invariants}
        if parallel is not None and config.origin("engine.max_parallel") == "default":
            changes["max_parallel"] = parallel
        return replace(config, engine=replace(config.engine, **changes))


@dataclass(frozen=True)
class SamplingFlags:
    """How to choose the next token, and where an answer ends."""

    temp: Annotated[
        float | None, setting("sampling.temperature", "--temp", "--temperature", meaning="Temperature; 0 is greedy.")
    ] = None
    top_p: Annotated[
        float | None,
        setting("sampling.top_p", "--top-p", metavar="P", meaning="Keep the likeliest tokens up to this probability."),
    ] = None
    top_k: Annotated[
        int | None, setting("sampling.top_k", "--top-k", meaning="Keep the N likeliest tokens; 0 keeps all.")
    ] = None
    min_p: Annotated[
        float | None,
        setting("sampling.min_p", "--min-p", metavar="P", meaning="Drop tokens below this fraction of the best."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        setting("sampling.repetition_penalty", "--repetition-penalty", meaning="Above 1, repeat less."),
    ] = None
    seed: Annotated[int | None, setting("sampling.seed", "--seed")] = None
    max_tokens: Annotated[
        int | None, setting("sampling.max_tokens", "--max-tokens", meaning="Maximum length of an answer.")
    ] = None
    stop: Annotated[
        list[str] | None, Option(metavar="TEXT", help="Stop before this text; repeatable.", callback=_checked_stops)
    ] = None

    def settings(self) -> dict[str, Any]:
        """The given flags as setting paths -> values; stop strings are not settings."""
        given = asdict(self)
        del given["stop"]
        return {"sampling.temperature": given.pop("temp")} | {f"sampling.{name}": v for name, v in given.items()}


@dataclass(frozen=True)
class HardwareFlags:
    """A machine other than this one."""

    gpu: Annotated[str | None, Option(metavar="NAME", help="Plan for this GPU: 4090, 2x 3090.")] = None
    vram: Annotated[str | None, Option(metavar="SIZE", help="Plan for a GPU with this much memory: 24G.")] = None
    bw: Annotated[float | None, Option(metavar="GB/S", min=1, help="Its memory bandwidth: 1008.")] = None
    ram: Annotated[str | None, Option(metavar="SIZE", help="Plan for this much RAM: 64G.")] = None

    def planner(self, config: UserConfig) -> tuple[Planner, bool]:
        """Return the planner for that machine, and whether it differs from this one.

        Models never fall back to the CPU one by one: a table has one device.
        """
        from localllm.device import machine
        from localllm.device.imagined import imagined
        from localllm.plan.placement import chosen_device
        from localllm.plan.planner import Planner

        real = machine()
        facts = imagined(
            real,
            gpu=self.gpu,
            vram_bytes=_size(self.vram, "--vram"),
            bandwidth=self.bw * 1e9 if self.bw else None,
            ram_bytes=_size(self.ram, "--ram"),
        )
        planner = Planner.here(config.engine, facts)
        if config.engine.device == "auto":
            device = chosen_device(facts, "auto").device
            several = config.engine.tensor_parallel != 1
            planner = planner.having(device=device.partition(":")[0] if several else device)
        return planner, facts is not real


def _size(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        size = int(parse_bytes(text))
    except ValueError:
        size = 0
    if size < 1 << 28:
        raise ConfigError(
            f"{option} must be a size of at least 256M, such as 24G, not {text!r}", f"localllm plan {option} 24G"
        )
    return size


def numbers(text: str, option: str, least: int, such: str, words: Sequence[str] = ()) -> tuple[int | str, ...]:
    """Parse a list of numbers such as `8k,32k`; `words` are allowed as they are. Raises ConfigError."""
    try:
        found = tuple(part if part in words else int(parse_tokens(part)) for part in text.split(",") if part)
    except ValueError:
        found = ()
    if not found or any(isinstance(one, int) and one < least for one in found):
        expected = f"numbers{f' of at least {least}' if least > 1 else ''}, such as {such}"
        raise ConfigError(f"{option} must be {expected}, not {text!r}", f"{option} {such}")
    return found


def text_or_file(value: str | None, option: str) -> str | None:
    """Read `@path` from a file; return anything else unchanged. Raises ConfigError when the file cannot be read."""
    if value is None or not value.startswith("@"):
        return value
    return read_text(Path(value[1:]), option)


def bounded(stream: IO[bytes], what: str) -> bytes:
    """Read a whole stream; `what` names it in the error. Raises ConfigError when it is too long."""
    data = stream.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ConfigError(f"{what} has more than {MAX_TEXT_BYTES >> 20} MiB of text", "send less text")
    return data


def read_text(path: Path, option: str) -> str:
    """Read a file's text, replacing undecodable bytes. Raises ConfigError when it is unreadable or too long."""
    try:
        with path.expanduser().open("rb") as file:
            text = bounded(file, f"{option}: {path}").decode("utf-8", "replace")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}", "choose a readable text file") from None
