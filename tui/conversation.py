"""A conversation and what a user can do to it by typing: turns, slash commands, settings. No Textual, no output.

Shared by the full-screen interface and the line mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.config import KEYS
from localllm.errors import ConfigError
from localllm.request import Failed, Message, Timing, Usage


@dataclass(frozen=True, slots=True)
class Slash:
    """A slash command: its name, the shape of its argument, its meaning."""

    name: str
    argument: str
    meaning: str


SLASHES = (
    Slash("help", "", "keys and commands"),
    Slash("new", "", "start a new chat"),
    Slash("system", "[text|off]", "show or set the instructions for the model"),
    Slash("set", "[key value]", "show or set sampling: temperature, top_p, seed, …"),
    Slash("stats", "", "speeds, memory and what runs"),
    Slash("copy", "[n|code|all]", "copy the last answer, answer n, its last code block, or all"),
    Slash("quit", "", "leave"),
)
ALIASES = {"bye": "quit", "exit": "quit", "q": "quit", "?": "help"}
_BARE_QUIT = ("exit", "quit", ":q")


@dataclass(frozen=True, slots=True)
class Typed:
    """A line as understood: a message (`command` is empty), or a slash command with its argument."""

    text: str
    command: str = ""


def understand(line: str) -> Typed:
    """What a typed line means. `//x` is the message "/x". Raises ConfigError for an unknown command."""
    text = line.strip()
    if text in _BARE_QUIT:
        return Typed("", "quit")
    if text.startswith("//"):
        return Typed(text[1:])
    if not text.startswith("/"):
        return Typed(line.strip("\n"))
    word, _, rest = text[1:].partition(" ")
    name = ALIASES.get(word.lower(), word.lower())
    if name not in {slash.name for slash in SLASHES}:
        near = [slash.name for slash in SLASHES if word and slash.name.startswith(word[0].lower())]
        meant = f"; did you mean /{near[0]}?" if near else ""
        raise ConfigError(f"there is no command /{word}{meant}", f"/help lists them; //{word} sends it as a message")
    return Typed(rest.strip(), name)


def matching(prefix: str) -> list[Slash]:
    """Commands for a half-typed one: those that start with it, then those that hold its letters in order."""
    wanted = prefix.removeprefix("/").lower()
    starts = [slash for slash in SLASHES if slash.name.startswith(wanted)]
    return starts + [slash for slash in SLASHES if slash not in starts and _subsequence(wanted, slash.name)]


def _subsequence(letters: str, name: str) -> bool:
    rest = iter(name)
    return all(letter in rest for letter in letters)


@dataclass(slots=True)
class Exchange:
    """A question and what became of it."""

    user: str
    text: str = ""
    reasoning: str = ""
    stop: str = ""
    """empty until it has ended"""
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    failed: Failed | None = None
    forgotten: bool = False
    """the user agreed to leave it out, because the context window is full"""

    @property
    def counts(self) -> bool:
        """Whether the model sees it in the next turn: a question that got no answer is left out."""
        return bool(self.text) and not self.forgotten


class Conversation:
    """Turns so far, instructions, and the sampling a user has set.

    `sampling` is the very dictionary that the backend's default parameters read, so that /set holds from the next turn.
    """

    def __init__(self, system: str = "", sampling: dict[str, Any] | None = None) -> None:
        self.system = system
        self.sampling = sampling if sampling is not None else {}
        self.exchanges: list[Exchange] = []

    def ask(self, text: str) -> Exchange:
        """Add a question."""
        exchange = Exchange(text)
        self.exchanges.append(exchange)
        return exchange

    def messages(self, exchange: Exchange) -> list[Message]:
        """What the model is sent for `exchange`: instructions, the turns before it, its question."""
        messages = [Message(role="system", content=self.system)] if self.system else []
        for earlier in self.exchanges:
            if earlier is exchange:
                break
            if earlier.counts:
                messages.append(Message(role="user", content=earlier.user))
                messages.append(Message(role="assistant", content=earlier.text))
        return [*messages, Message(role="user", content=exchange.user)]

    def oldest_half(self, exchange: Exchange) -> list[Exchange]:
        """The turns to offer for leaving out before `exchange`: half of those that count, at least one."""
        counting = [e for e in self.exchanges if e.counts and e is not exchange]
        return counting[: (len(counting) + 1) // 2]

    def remove(self, exchange: Exchange) -> None:
        """Take back a question."""
        if exchange in self.exchanges:
            self.exchanges.remove(exchange)

    def clear(self) -> None:
        """Forget all turns; instructions and sampling stay."""
        self.exchanges.clear()

    def set_system(self, text: str) -> str:
        """/system: returns what to say."""
        if not text:
            return f"system: {self.system}" if self.system else "no system message; /system TEXT sets one"
        self.system = "" if text == "off" else text
        return "system message set, it holds from the next message" if self.system else "system message removed"

    def set_sampling(self, text: str) -> str:
        """/set: returns what to say. Raises ConfigError for an unknown key or a value outside its range."""
        words = text.replace("=", " ").split()
        names = {path.removeprefix("sampling."): key for path, key in KEYS.items() if path.startswith("sampling.")}
        if not words:
            shown = (
                ", ".join(f"{key} {value}" for key, value in self.sampling.items()) or "nothing, the model's own hold"
            )
            return f"set: {shown}. Keys: {', '.join(names)}"
        name = {"temp": "temperature"}.get(words[0], words[0])
        if name not in names:
            raise ConfigError(f"there is no setting {name!r}", f"one of {', '.join(names)}")
        if len(words) == 1:
            return f"{name} is {self.sampling.get(name, 'the model’s own')}"
        if words[1] in ("off", "auto", "default"):
            self.sampling.pop(name, None)
            return f"{name} is the model's own again"
        try:
            self.sampling[name] = names[name].kind.parse(words[1])
        except (ValueError, TypeError):
            raise ConfigError(f"{name} is {words[1]!r}: expected {names[name].kind.expects}", "") from None
        return f"{name} = {number(self.sampling[name])}, from the next message"

    def pick(self, what: str) -> tuple[str, str]:
        """/copy: (text, what it is). Raises ConfigError when there is no such thing."""
        answers = [exchange for exchange in self.exchanges if exchange.text]
        if not answers:
            raise ConfigError("there is no answer to copy yet", "")
        if what == "all":
            parts = [f"**{e.user}**\n\n{e.text}" for e in answers]
            return "\n\n".join(parts), "the chat"
        if what.startswith("code"):
            blocks = code_blocks(answers[-1].text)
            if not blocks:
                raise ConfigError("the last answer has no code block", "")
            return blocks[-1], "the last code block"
        if what and (not what.isdigit() or not 1 <= int(what) <= len(answers)):
            raise ConfigError(
                f"/copy {what}: there are answers 1 to {len(answers)}", "/copy, /copy 2, /copy code, /copy all"
            )
        number = int(what) if what else len(answers)
        return answers[number - 1].text, "the last answer" if not what else f"answer {number}"

    @property
    def summary(self) -> str:
        """'3 turns · 120 tokens · 90.1 tok/s avg'; empty before the first answer."""
        done = [e for e in self.exchanges if e.usage.completion_tokens]
        if not done:
            return ""
        tokens = sum(e.usage.completion_tokens for e in done)
        rates = [e.timing.decode_tps for e in done if e.timing.decode_tps]
        rate = f" · {sum(rates) / len(rates):.0f} tok/s avg" if rates else ""
        return f"{_count(len(done), 'turn')} · {_count(tokens, 'token')}{rate}"


def number(value: Any) -> str:
    """A setting's value for people: 0.3, 0, 42."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _count(many: int, word: str) -> str:
    return f"{many:,} {word}{'' if many == 1 else 's'}"


def code_blocks(text: str) -> list[str]:
    """The contents of the fenced blocks of a Markdown text; one that is left open counts."""
    blocks: list[list[str]] = []
    fence = ""
    for line in text.split("\n"):
        bare = line.strip()
        if not fence and bare.startswith(("```", "~~~")):
            fence = bare[: len(bare) - len(bare.lstrip(bare[0]))]
            blocks.append([])
        elif fence and bare.startswith(fence) and not bare.strip(fence[0]):
            fence = ""
        elif fence:
            blocks[-1].append(line)
    return ["\n".join(block) for block in blocks]


def stats_text(exchange: Exchange) -> str:
    """The line below an answer: '↑ 1,204 (cached 1,024)  ↓ 312  ·  91.4 tok/s  ·  TTFT 41 ms'."""
    usage, timing = exchange.usage, exchange.timing
    cached = f" (cached {usage.cached_tokens:,})" if usage.cached_tokens else ""
    parts = [f"↑ {usage.prompt_tokens:,}{cached}  ↓ {usage.completion_tokens:,}"]
    if timing.decode_tps:
        parts.append(f"{timing.decode_tps:.1f} tok/s")
    if usage.completion_tokens:
        parts.append(f"TTFT {timing.ttft_s * 1000:.0f} ms")
    ends = {"abort": f"stopped by you · {usage.completion_tokens:,} tokens", "length": "reached the length limit"}
    return "  ·  ".join([*parts, *([ends[exchange.stop]] if exchange.stop in ends else [])])


def failure_lines(failed: Failed) -> Sequence[str]:
    """A failure as lines: what, and what to do next."""
    steps = [failed.hint] if failed.hint else []
    why = [f"  why  {failed.why}"] if failed.why else []
    steps += [f"{command}   {note}".rstrip() for command, note in failed.fixes if command != failed.hint]
    return [
        f"✗ {failed.message}   [{failed.code}]",
        *why,
        *(f"  {'try' if i == 0 else '   '}  {s}" for i, s in enumerate(steps)),
    ]
