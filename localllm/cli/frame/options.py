"""Options that several commands share, spelled once: which model, how it is loaded, how tokens are chosen.

An option that is a setting for one command takes its words, its limits and, where nothing better is known, its meaning
from the settings (`localllm.config`). A command takes a group of options as one parameter of the group's type.
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

if TYPE_CHECKING:
    from localllm.plan.planner import Planner

NAMES = {"adapter": "adapters"}  # options that are called otherwise than their settings
MAX_TEXT_BYTES = 16 << 20  # of a prompt, a file or a schema: some four million tokens


def setting(path: str, *spelled: str, metavar: str = "", meaning: str = "") -> Any:
    """An option that is the setting `path` for one command."""
    key = KEYS[path]
    meaning = meaning or f"{key.meaning[:1].upper()}{key.meaning[1:]}."
    return Option(
        *spelled, metavar=metavar or "|".join(key.kind.names()) or "N", help=meaning,
        autocompletion=lambda incomplete: [name for name in key.kind.names() if name.startswith(incomplete)],
    )  # fmt: skip


def complete_model(incomplete: str) -> list[str]:
    """Names of local models, for the shell."""
    from localllm.cli.frame.completion import local_names

    return [name for name in local_names() if name.startswith(incomplete)]


def model_argument(metavar: str, meaning: str = "A name, alias, org/repo[:quant][@revision], file or folder.") -> Any:
    """An argument that names models; an empty name is an error, not the usual model."""

    def named(value: str | list[str] | None) -> str | list[str] | None:
        if "" in ((value,) if isinstance(value, str) else value or ()):
            raise ConfigError("the name of the model is empty", "`localllm ls` lists the models on this machine")
        return value

    return Argument(metavar=metavar, help=meaning, autocompletion=complete_model, callback=named)


Model = Annotated[str, model_argument("MODEL")]
MaybeModel = Annotated[str | None, model_argument("[MODEL]")]
Models = Annotated[list[str], model_argument("MODEL...")]
System = Annotated[str | None, Option("-s", "--system", metavar="TEXT|@FILE", help="Instructions for the model.")]
THINK = "auto|off|on|low|medium|high"
Think = Annotated[str | None, Option(metavar=THINK, help="Reasoning of models that can switch it.")]
Preset = Annotated[str | None, Option(metavar="NAME", help="Instructions and sampling from the settings.")]
AttachTo = Annotated[
    str, Option(metavar="auto|off|URL", help="A running `localllm serve` to use; auto finds one that has the model.")
]
Kv = Annotated[str | None, setting("engine.kv", "--kv")]
Draft = Annotated[
    str | None, setting("engine.draft", "--draft", metavar="MODEL", meaning="A smaller model that guesses tokens.")
]
Mmproj = Annotated[
    str | None,
    setting(
        "engine.mmproj", "--mmproj", metavar="auto|off|FILE", meaning="What reads images for a GGUF model: mmproj file."
    ),
]
Experts = Annotated[
    str | None, setting("engine.experts", "--experts", meaning="Where a mixture's experts lie: GPU or host memory.")
]
TensorParallel = Annotated[
    str | None,
    setting("engine.tensor_parallel", "--tensor-parallel", metavar="N|auto", meaning="Cards that share one model."),
]
Split = Annotated[str | None, setting("engine.split", "--split", meaning="What each card has of it.")]
Parallel = Annotated[int | None, Option(metavar="N", min=1, max=1024, help="Requests side by side.")]


@dataclass(frozen=True)
class WindowFlags:
    """The context window and what it is stored in."""

    ctx: Annotated[
        str | None,
        setting("engine.ctx", "--ctx", metavar="N|max|auto", meaning="Context window in tokens: 8192, 32k."),
    ] = None
    kv: Kv = None

    def settings(self) -> dict[str, Any]:
        """As paths of settings."""
        given = asdict(self)
        return {f"engine.{NAMES.get(name, name)}": given[name] for name in given if name != "debug_invariants"}


@dataclass(frozen=True)
class LoadFlags(WindowFlags):
    """How a model is loaded."""

    dtype: Annotated[str | None, setting("engine.dtype", "--dtype")] = None
    activations: Annotated[
        str | None,
        setting(
            "engine.activations",
            "--activations",
            meaning="Rounding of activations; int8 is less exact, on some CPUs faster.",
        ),
    ] = None
    threads: Annotated[str | None, setting("engine.threads", "--threads", metavar="N|auto", meaning="CPU threads.")] = (
        None
    )
    experts: Experts = None
    speculation: Annotated[
        str | None, setting("engine.speculation", "--speculation", meaning="Guess tokens, check many at a time.")
    ] = None
    draft: Draft = None
    mmproj: Mmproj = None
    tensor_parallel: TensorParallel = None
    split: Split = None
    kv_store: Annotated[
        str | None,
        setting("engine.kv_store", "--kv-store", metavar="SIZE", meaning="Keep pages on the disk, up to this: 8G."),
    ] = None


@dataclass(frozen=True)
class EngineFlags(LoadFlags):
    """How a model is loaded, and whether its engine checks itself."""

    adapter: Annotated[
        list[str] | None,
        setting(
            "engine.adapters", "--adapter", metavar="NAME=PATH", meaning="A LoRA adapter (a PEFT folder); repeatable."
        ),
    ] = None
    debug_invariants: Annotated[
        bool,
        Option(
            "--debug-invariants",
            help="Check every page and count after every step; slow. run, serve and batch exit 3 if one is off.",
        ),
    ] = False

    def config(
        self, env: Env, more: dict[str, Any], *, strict: bool = False, exits: bool = True, parallel: int | None = None
    ) -> UserConfig:
        """The settings with these flags and `more`; `exits` ends the process when a check of --debug-invariants fails.

        strict     as of `Env.settings`
        parallel   requests side by side where the settings do not say; None: their default
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
    """How the next token is chosen, and where an answer ends."""

    temp: Annotated[
        float | None, setting("sampling.temperature", "--temp", "--temperature", meaning="0 takes the likeliest token.")
    ] = None
    top_p: Annotated[
        float | None,
        setting("sampling.top_p", "--top-p", metavar="P", meaning="Keep the likeliest tokens up to this share."),
    ] = None
    top_k: Annotated[
        int | None, setting("sampling.top_k", "--top-k", meaning="Keep the N likeliest tokens; 0 keeps all.")
    ] = None
    min_p: Annotated[
        float | None,
        setting("sampling.min_p", "--min-p", metavar="P", meaning="Drop tokens below this share of the best."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        setting("sampling.repetition_penalty", "--repetition-penalty", meaning="Above 1: repeat less."),
    ] = None
    seed: Annotated[int | None, setting("sampling.seed", "--seed")] = None
    max_tokens: Annotated[
        int | None, setting("sampling.max_tokens", "--max-tokens", meaning="Length limit of an answer.")
    ] = None
    stop: Annotated[list[str] | None, Option(metavar="TEXT", help="End before this text; repeatable.")] = None

    def settings(self) -> dict[str, Any]:
        """As paths of settings; the stop strings are none."""
        given = asdict(self)
        del given["stop"]
        return {"sampling.temperature": given.pop("temp")} | {f"sampling.{name}": v for name, v in given.items()}


@dataclass(frozen=True)
class HardwareFlags:
    """Another machine than this one."""

    gpu: Annotated[str | None, Option(metavar="NAME", help="A card that is not here: 4090, 2x 3090.")] = None
    vram: Annotated[str | None, Option(metavar="SIZE", help="A card with so much memory: 24G.")] = None
    bw: Annotated[float | None, Option(metavar="GB/S", min=1, help="Its memory bandwidth: 1008.")] = None
    ram: Annotated[str | None, Option(metavar="SIZE", help="As much RAM as this: 64G.")] = None

    def planner(self, config: UserConfig) -> tuple[Planner, bool]:
        """What plans for that machine, and whether it is another one than this.

        Nothing falls back to the CPU model by model: a table has one device.
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
        raise ConfigError(f"{option} is {text!r}: expected a size such as 24G", f"localllm plan {option} 24G")
    return size


def numbers(text: str, option: str, least: int, such: str, words: Sequence[str] = ()) -> tuple[int | str, ...]:
    """The numbers of a list such as `8k,32k`, and those of `words` in it. Raises ConfigError."""
    try:
        found = tuple(part if part in words else int(parse_tokens(part)) for part in text.split(",") if part)
    except ValueError:
        found = ()
    if not found or any(isinstance(one, int) and one < least for one in found):
        expected = f"numbers{f' from {least}' if least > 1 else ''} such as {such}"
        raise ConfigError(f"{option} is {text!r}: expected {expected}", f"{option} {such}")
    return found


def text_or_file(value: str | None, option: str) -> str | None:
    """`@path` is the text of a file, anything else itself. Raises ConfigError when it cannot be read."""
    if value is None or not value.startswith("@"):
        return value
    return read_text(Path(value[1:]), option)


def bounded(stream: IO[bytes], what: str) -> bytes:
    """All that a stream holds; `what` it is, for the error. Raises ConfigError for one that does not end in time."""
    data = stream.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ConfigError(f"{what} has more than {MAX_TEXT_BYTES >> 20} MiB of text", "send less text")
    return data


def read_text(path: Path, option: str) -> str:
    """A file's text, undecodable bytes replaced. Raises ConfigError when it cannot be read or is too long."""
    try:
        with path.expanduser().open("rb") as file:
            text = bounded(file, f"{option}: {path}").decode("utf-8", "replace")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}", "name a readable text file") from None
