"""Every setting: its default, accepted values and meaning. Read-only values; nothing here reads a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from localllm.errors import ConfigError, did_you_mean, nearest
from localllm.request import RANGES, Range
from localllm.testing import TEST_ONLY

from .kinds import (
    ADAPTERS,
    CODE_THEME,
    DEVICE,
    DURATION,
    FLAG,
    ORIGINS,
    SIZE,
    TEXT,
    THEME,
    TOKENS,
    Kind,
    choice,
    or_auto,
    within,
)

Auto = Literal["auto"]
PROJECT_FILE = ".localllm.toml"
# command-line options whose name differs from their setting's
FLAGS = {"engine.adapters": "adapter", "engine.max_parallel": "parallel", "sampling.temperature": "temp"}

# variables that mirror no key; the others are `LOCALLLM_` + a key's path
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "LOCALLLM_HOME": "one folder for data, cache, config and state, instead of the XDG folders",
        "LOCALLLM_CACHE": "folder for the compiled CPU kernels, instead of the cache folder",
        "LOCALLLM_STORES": "none: do not list models of Ollama, LM Studio, llama.cpp and other Hugging Face caches",
        "LOCALLLM_CPU_ISA": "instruction set of the CPU kernels: portable, avx2, avx512, neon, ...",
        "LOCALLLM_API_KEY": "the key that `chat --attach-to URL` sends",
        "LOCALLLM_CONFIG": "another settings file, like --config",
        "LOCALLLM_PROJECT": f"1: also read {PROJECT_FILE} in the working folder",
        "LOCALLLM_TESTING": "1: allow the variables for tests",
        **{name: f"{meaning}; for tests, refused without LOCALLLM_TESTING=1" for name, meaning in TEST_ONLY.items()},
        "LOCALLLM_TEST_MODELS": "folder of the two real models for the tests",
        "HF_HOME": "the Hugging Face cache, shared with other tools",
        "HF_HUB_CACHE": "the model folder of that cache",
        "HF_TOKEN": "the hub's access token",
        "HF_ENDPOINT": "URL of another hub",
        "HF_HUB_OFFLINE": "1: same as `offline = true`",
        "NO_COLOR": "any value: no colors",
    }
)


def _whole(low: int, high: int) -> Kind:
    return within(Range(low, high, "", whole=True))


def _key(kind: Kind, default: Any, meaning: str, name: str = "") -> Any:
    return field(default=default, metadata={"kind": kind, "meaning": meaning, "key": name})


def _sampled(name: str) -> Any:
    return _key(within(RANGES[name]), None, RANGES[name].about)


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: its path in the file, and the dataclass attribute that holds it."""

    path: str
    section: str
    attribute: str
    kind: Kind
    default: Any
    meaning: str

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        return "LOCALLLM_" + self.path.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """The option that sets it for one command."""
        return "--" + FLAGS.get(self.path, self.path.rpartition(".")[2]).replace("_", "-")

    def parse(self, value: Any, origin: str) -> Any:
        """Parse a value. Raises a ConfigError that names its origin."""
        try:
            return self.kind.parse(value)
        except (ValueError, TypeError, OverflowError):
            meant = nearest_key(value, dict.fromkeys(self.kind.names())) if isinstance(value, str) else ""
            given = ",".join(map(str, value)) if origin == "flag" and isinstance(value, list | tuple) else value
            shown = repr(given) if len(repr(given)) <= 60 else repr(given)[:57] + "..."
            default = self.kind.show(self.default)
            where, hint = self.path, f"localllm config set {self.path} {default or 'VALUE'}"
            source = "" if origin in ("argument", "flag", self.env) else f" ({origin})"
            if origin == "argument":
                hint = f"use {self.attribute}={self.default!r}"
            elif origin == "flag":
                where, hint = self.flag, f"drop {self.flag}"
                hint += f", or use {self.flag} {default}" if default else ""
            elif origin == self.env:
                where, hint = origin, f"`unset {origin}`"
            raise ConfigError(
                f"{where} must be {self.kind.expects}, not {shown}{source}{did_you_mean(meant)}",
                hint,
                context={"key": self.path, "origin": origin, "expects": self.kind.expects},
            ) from None


def _key_of(section: str, f: Field[Any]) -> Key:
    name = f.metadata["key"] or f.name
    path = f"{section}.{name}" if section else name
    return Key(path, section, f.name, f.metadata["kind"], f.default, f.metadata["meaning"])


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model runs.

    One object for the settings, flags and `LLM` arguments from which the planner makes the engine's plan. None means a
    field's default. Raises ConfigError for a value that a setting does not accept.
    """

    device: str = _key(DEVICE, "auto", "device to run on; auto picks a GPU that can run the model, else the CPU")
    dtype: str = _key(choice("auto", "float32", "bfloat16", "float16"), "auto", "data type of activations")
    activations: str = _key(
        choice("auto", "fp8", "nvfp4", "int8"),
        "auto",
        "format to quantize activations to: fp8 or nvfp4 for long prompts on a GPU; int8 for all on the CPU, less"
        " exact but faster on some CPUs (docs/quality.md); auto: unquantized on a GPU, 16 bits on the CPU",
    )
    ctx: int | Literal["auto", "max"] = _key(
        TOKENS, "auto", "context window; auto: what fits, up to the model's limit and on a CPU to 8,192"
    )
    kv: str = _key(choice("auto", "bf16", "fp16", "f32", "int8", "fp8"), "auto", "data type of the KV cache")
    gpu_mem: float = _key(within(Range(0.05, 1, "")), 0.92, "maximum fraction of a GPU's memory to use")
    graphs: bool = _key(FLAG, True, "replay decode steps as CUDA graphs")
    threads: int | Auto = _key(or_auto(_whole(1, 1024)), "auto", "CPU threads; auto: one per usable core")
    deterministic: bool | Auto = _key(or_auto(FLAG), "auto", "batching never changes an answer; auto: on the CPU")
    prefix_cache: bool = _key(FLAG, True, "keep pages of finished prompts for reuse by prompts with the same prefix")
    kv_store: int = _key(
        SIZE,
        0,
        "disk space for KV pages of prompts and answers, so that a chat continued after a restart is not read again;"
        " anyone who can read the disk can learn what was said; 0 keeps none",
    )
    packed_store: int | Auto = _key(
        or_auto(SIZE),
        "auto",
        "disk space for repacked weights of large models in the layout that the CPU reads, for faster starts; written"
        " when idle or at the end of a command; auto: up to a tenth of the free space, on a local disk; 0 keeps none",
    )
    speculation: str = _key(
        choice("auto", "off", "ngram", "draft", "mtp"),
        "auto",
        "speculative decoding, which changes no answer; ngram: continue repeated text; draft: ask the draft model; mtp:"
        " use the model's MTP head; auto: whatever measures faster",
    )
    mmproj: str = _key(
        TEXT,
        "auto",
        "image encoder of a GGUF model; auto: the mmproj file next to it; off: none; or a file",
    )
    draft: str = _key(
        TEXT,
        "",
        "smaller model with the same vocabulary, or a drafter published for the model, for speculative decoding; empty:"
        " only a drafter (mtp-*.gguf, dflash-*.gguf, eagle3-*.gguf) next to the model",
    )
    adapters: tuple[str, ...] = _key(
        ADAPTERS, (), "LoRA adapters to load with the model, each as NAME=PATH; PATH is a PEFT folder"
    )
    experts: str = _key(
        choice("auto", "device", "host"),
        "auto",
        "where to keep MoE experts; device: on the GPU; host: in host memory, computed by the CPU; auto: GPU first, and"
        " the rest in host memory",
    )
    tensor_parallel: int | Auto = _key(
        or_auto(_whole(1, 8)),
        1,
        "GPUs of this machine to split the model across; auto: as many as it needs; with device cpu, the number of"
        " processes",
    )
    split: str = _key(
        choice("auto", "tensor", "layers"),
        "auto",
        "how to split a model across GPUs; tensor: each holds a part of every layer, and all compute at once; layers:"
        " each holds some of the layers, and they take turns; auto: the faster one for the link between them",
    )
    max_parallel: int = _key(_whole(1, 1024), 4, "requests to run at the same time")
    ttl_s: float = _key(DURATION, 1800.0, "unload a model after this idle time", "ttl")
    # arguments of the Python API that are not settings
    quant: str = (
        "auto"  # format to convert linear layers to on loading: auto, "" (as stored), or a `quant.encode` target
    )
    prefill_budget: int | None = None  # prompt tokens per step; None leaves it to the plan
    page_size: int = 16  # tokens
    debug_invariants: bool = False  # check all page counts after every step

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                value = f.default
            elif f.metadata:
                value = _key_of("engine", f).parse(value, "argument")
            object.__setattr__(self, f.name, value)

    @property
    def adapter_paths(self) -> dict[str, str]:
        """The folder of each adapter, by its name."""
        return dict(one.split("=", 1) for one in self.adapters)


@dataclass(frozen=True, slots=True)
class PullConfig:
    """Limits on downloads."""

    max_auto_bytes: int = _key(SIZE, 32 << 30, "largest download that a family name may pick", "max_auto")


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Unset keys use the model's recommended values, else temperature 0.8, top-k 40, top-p 0.95 and min-p 0.05."""

    temperature: float | None = _sampled("temperature")
    top_k: int | None = _sampled("top_k")
    top_p: float | None = _sampled("top_p")
    min_p: float | None = _sampled("min_p")
    typical_p: float | None = _sampled("typical_p")
    repetition_penalty: float | None = _sampled("repetition_penalty")
    presence_penalty: float | None = _sampled("presence_penalty")
    frequency_penalty: float | None = _sampled("frequency_penalty")
    seed: int | None = _sampled("seed")
    max_tokens: int | None = _sampled("max_tokens")

    def given(self) -> dict[str, float | int]:
        """The keys that are set, as arguments of `SamplingParams`."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Conversations."""

    system: str = _key(TEXT, "", "system message of every new chat")
    think: bool | Auto = _key(or_auto(FLAG), "auto", "reasoning, for models that can switch it")
    save: bool = _key(FLAG, True, "keep chats on disk")
    title: str = _key(choice("auto", "off"), "auto", "auto: the first line of the first message")


@dataclass(frozen=True, slots=True)
class UiConfig:
    """The full-screen interface."""

    theme: str = _key(THEME, "localllm-dark", "color theme")
    code_theme: str = _key(CODE_THEME, "auto", "colors of code; auto: those of the theme")
    mouse: bool = _key(FLAG, True, "handle the mouse")
    animations: bool | Auto = _key(or_auto(FLAG), "auto", "auto: off over ssh")
    thinking: str = _key(choice("auto", "expanded", "collapsed", "hidden"), "auto", "how to show reasoning")
    stats: str = _key(choice("footer", "off"), "footer", "where to show speeds: below each answer, or nowhere")
    enter: str = _key(choice("send", "newline"), "send", "what Enter does; newline: Alt+Enter or Ctrl+J sends")
    sidebar: bool | Auto = _key(or_auto(FLAG), "auto", "show the list of saved chats; auto: from 120 columns on")
    keys: str = _key(choice("default", "vim"), "default", "keyboard style")
    notify: str = _key(
        choice("never", "unfocused", "always"), "unfocused", "signal the end of an answer (bell, title, OSC 9)"
    )
    column: int = _key(_whole(0, 1000), 100, "maximum text width in columns; 0: full width")
    history_window: int = _key(_whole(1, 10_000), 16, "number of messages kept on screen")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP endpoint."""

    host: str = _key(TEXT, "127.0.0.1", "address to listen on")
    port: int = _key(_whole(0, 65535), 8000, "port; 0 picks a free one")
    api_key_file: str = _key(TEXT, "", "file of API keys; clients must send one of them")
    cors: tuple[str, ...] = _key(ORIGINS, (), "web origins allowed to call")


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of sampling values, with a system message and a model."""

    system: str | None = None
    model: str | None = None
    sampling: SamplingConfig = SamplingConfig()


@dataclass(frozen=True, slots=True)
class UserConfig:
    """All settings with their origins. `origins[path]` is `default`, `flag`, `env NAME` or `file PATH`."""

    model: str = _key(TEXT, "", "default model")
    offline: bool = _key(FLAG, False, "never use the network")
    engine: EngineOptions = EngineOptions()
    pull: PullConfig = PullConfig()
    sampling: SamplingConfig = SamplingConfig()
    chat: ChatConfig = ChatConfig()
    ui: UiConfig = UiConfig()
    server: ServerConfig = ServerConfig()
    aliases: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    mcp_servers: Mapping[str, Any] = field(default_factory=dict)  # [mcp.servers], as `localllm.chat.mcp` reads it
    origins: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # the warnings about unknown keys and variables
    broken: str = ""  # why a settings file could not be read at all; also one of the warnings

    def get(self, path: str) -> Any:
        """The value of a key such as `engine.ctx` or `aliases.work`. Raises ConfigError for an unknown name."""
        table, _, name = path.partition(".")
        if table in TABLES and name:
            if name not in getattr(self, table):
                raise ConfigError(f"{path} is not set", f"localllm config set {path} VALUE")
            return getattr(self, table)[name]
        found = find_key(path)
        return getattr(getattr(self, found.section) if found.section else self, found.attribute)

    def origin(self, path: str) -> str:
        """Where the value of a key came from."""
        return self.origins.get(path, "default")


SECTIONS: Mapping[str, type] = MappingProxyType(
    {"engine": EngineOptions, "pull": PullConfig, "sampling": SamplingConfig}
    | {"chat": ChatConfig, "ui": UiConfig, "server": ServerConfig}
)
TABLES = ("aliases", "presets", "keys")  # tables whose keys the user chooses


def _keys() -> Iterator[Key]:
    for section, holder in {"": UserConfig, **SECTIONS}.items():
        yield from (_key_of(section, f) for f in fields(holder) if f.metadata)


KEYS: Mapping[str, Key] = MappingProxyType({key.path: key for key in _keys()})


def environment() -> dict[str, str]:
    """Every environment variable that the program reads, with its meaning."""
    return {key.env: f"same as `{key.path}`" for key in KEYS.values()} | dict(ENVIRONMENT)


def find_key(path: str) -> Key:
    """The key at a path. Raises ConfigError with the nearest name for an unknown one."""
    if path in KEYS:
        return KEYS[path]
    if path in SECTIONS:
        raise ConfigError(f"{path!r} is a table, not a setting", "localllm config list", context={"key": path})
    near = nearest_key(path)
    raise ConfigError(
        f"unknown setting {path!r}{did_you_mean(near)}",
        f"localllm config get {near}" if near else "localllm config list",
        context={"key": path},
    )


def nearest_key(path: str, among: Mapping[str, Any] = KEYS) -> str:
    """The name in `among` that was probably meant, or ""."""
    leaves = {p.rsplit(".", 1)[-1]: p for p in among}
    if path.rsplit(".", 1)[-1] in leaves:  # the right name in the wrong table
        return leaves[path.rsplit(".", 1)[-1]]
    near = nearest(path, among, 0.8) or nearest(path, leaves, 0.75)
    return leaves.get(near, near)
