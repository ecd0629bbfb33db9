"""The starting state of a chat, in line mode, full-screen or in a browser: conversation, model, engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.cli.attach import Attached, fake_engine, find_server
from localllm.cli.endpoint import ChatEndpoint
from localllm.cli.frame.command import Env
from localllm.cli.frame.console import one_of
from localllm.cli.frame.options import THINK
from localllm.cli.names import Choice
from localllm.cli.session import Sampling, make_backend
from localllm.config import Preset, UserConfig
from localllm.conversation.slash import OFF
from localllm.errors import ConfigError, LocalLLMError
from localllm.terminal import clean_line

if TYPE_CHECKING:
    from localllm.conversation.documents import Document
    from localllm.conversation.saver import Saver
    from localllm.conversation.session import Session
    from localllm.conversation.tools import Toolbox
    from localllm.conversation.tree import Conversation
    from localllm.device.processes import Record
    from localllm.history.store import History
    from localllm.interface import ChatBackend
    from localllm.llm.llm import LLM


@dataclass
class Start:
    """The starting state of a chat."""

    conversation: Conversation
    saver: Saver
    sampling: Sampling
    choice: Choice | None = None  # None: load nothing until a model is chosen
    first: str = ""
    files: tuple[Document, ...] = ()
    ctx: str | None = None
    inline: bool = False
    attached: Attached | None = None  # the server to use; None for this process
    shares: bool = False  # whether a server may run models chosen later
    serve: int | None = OFF  # port on which this chat's engine serves other programs; None for the default port
    record: Record | None = None
    tools: Toolbox | None = None


def load_chat(name: str, sampling: dict[str, Any]) -> Conversation:
    """Load a saved chat by the start of its id, or `last`; `sampling` is filled with the chat's values.

    Raises ChatNotFound, HistoryError.
    """
    from localllm.conversation.storage import restored
    from localllm.history.store import ChatNotFound, History

    with History() as history:
        if name == "last" and not history.chats(1):
            raise ChatNotFound("no chat has been saved yet", "drop --continue")
        chat = history.find(name)
        return restored(chat, history.messages(chat.id), sampling)


def preset_of(config: UserConfig, name: str | None) -> Preset:
    """A preset from the settings; an empty one without a name. Raises ConfigError for an unknown name."""
    if name is not None and name not in config.presets:
        known = ", ".join(config.presets)
        hint = f"one of: {known}" if known else f"`localllm config set presets.{name}.temperature 0.2` creates it"
        raise ConfigError(f"unknown preset {name!r}", hint)
    return Preset() if name is None else config.presets[name]


def typed_or_else(config: UserConfig, preset: str | None) -> dict[str, Any]:
    """Sampling from flags and settings; with a preset, from flags alone, which override it."""
    given = config.sampling.given()
    is_typed = {name for name in given if config.origins.get(f"sampling.{name}") == "flag"}
    return given if preset is None else {name: value for name, value in given.items() if name in is_typed}


def think_of(config: UserConfig, typed: str | None) -> str:
    """How the model reasons: the flag, else the setting. Raises ConfigError."""
    if typed is not None:
        one_of("--think", typed, THINK.split("|"), "--think off")
        return typed
    return "auto" if config.chat.think == "auto" else "on" if config.chat.think else "off"


def template_of(think: str) -> dict[str, Any]:
    """The chat template's variables about reasoning."""
    if think == "auto":
        return {}
    from localllm.conversation.tree import template_values

    return template_values(think)


def new_start(config: UserConfig, sampling: Sampling, system: str, resumed: str | None = None) -> Start:
    """Start a new conversation, or resume a saved one. Raises ChatNotFound."""
    from localllm.conversation.saver import Saver
    from localllm.conversation.tree import Conversation

    if resumed is None:
        talk = Conversation(system, sampling.given, think_of(config, None))
    else:
        typed = {name: v for name, v in sampling.given.items() if config.origins.get(f"sampling.{name}") == "flag"}
        talk = load_chat(resumed, sampling.given)
        # the saved chat's values override the settings; flags override both
        talk.sampling.update(typed)
        talk.system = system or talk.system
    talk.titles_itself = config.chat.title == "auto"
    return Start(talk, Saver(_history if config.chat.save else None), sampling)


def _history() -> History:
    from localllm.history.store import History

    return History()


@contextmanager
def noted(start: Start) -> Iterator[None]:
    """Register this process for `localllm ps`; an unwritable folder costs that entry, not the chat."""
    from localllm.device.processes import Record

    record = None
    with suppress(OSError, LocalLLMError):
        record = Record("chat")
        record.update((start.choice.shown,) if start.choice and not start.attached else ())
        start.record = record
    try:
        yield
    finally:
        if record is not None:
            record.remove()


def backend_of(env: Env, config: UserConfig, start: Start) -> ChatBackend:
    """The engine of this chat: a running server, or one in this process."""

    def note(name: str, llm: LLM) -> None:
        if start.record is not None:
            with suppress(OSError, LocalLLMError):
                plan = llm.plan
                start.record.update((clean_line(name),), device=plan.device, ctx=plan.ctx, bytes=llm.resident_bytes)

    made = make_backend(env, config, start.sampling, attached=None if start.shares else start.attached, on_loaded=note)
    if not start.shares or fake_engine():
        return made
    from localllm.backend.placed import Place, PlacedBackend

    def place(model: str) -> Place | None:
        first, start.attached = start.attached, None  # the first model's server is already known
        attached = first or find_server("auto", (model,))
        if attached is None:
            return None
        if start.record is not None:
            with suppress(OSError, LocalLLMError):
                start.record.update(())
        return Place(make_backend(env, config, start.sampling, attached=attached), attached.model, attached.url)

    return PlacedBackend(made, place)


def session_of(env: Env, config: UserConfig, start: Start, backend: ChatBackend) -> Session:
    """The session that the interface runs."""
    from localllm.conversation.session import Session

    model = (start.choice.shown or start.choice.name) if start.choice else ""
    if start.choice and os.path.isabs(start.choice.saved):
        model = start.choice.saved  # the last part of a path does not load it again
    made = Session(
        backend, start.conversation, start.saver, model, presets=config.presets, files=list(start.files),
        first=start.first, endpoint=ChatEndpoint(env, config, backend, start.record), serves=start.serve,
        tools=start.tools,
    )  # fmt: skip
    if start.shares:
        from localllm.backend.placed import PlacedBackend

        if isinstance(backend, PlacedBackend):
            backend.stays = lambda: made.serves != OFF
    return made


def farewell(env: Env, conversation: Conversation, saver: Saver, model: str) -> None:
    """Say what was saved, and how to continue."""
    if not conversation.summary and not conversation.exchanges:
        return
    summary = f" · {conversation.summary}" if conversation.summary else ""
    if saver.kept and not saver.problem:
        env.console.say(f"Saved “{clean_line(conversation.shown_title) or 'untitled'}”{summary}")
        env.console.say(
            f"Continue: localllm chat -c      Export: localllm logs export {conversation.id[:6]} -o chat.md"
        )
    else:
        if saver.kept:
            env.console.warn(f"the chat was not saved: {saver.problem}")
        env.console.say(f"{conversation.summary or conversation.shown_title}\nAgain: localllm chat {clean_line(model)}")
