"""What the slash commands do: one method each, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from localllm.config import set_key
from localllm.conversation.attachments import Attachment, read_attachments
from localllm.conversation.slash import Typed
from localllm.conversation.storage import saved_chat, saved_messages
from localllm.conversation.tree import Exchange
from localllm.errors import ConfigError
from localllm.terminal import clean_line, tokens_short

if TYPE_CHECKING:
    from .chat import ChatScreen


class Commands:
    """Runs what was typed. Failures of the user's are ConfigErrors, shown by the screen."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        names = [name for name in dir(self) if name.startswith("_do_")]
        self.names = {name.removeprefix("_do_") for name in names}

    async def run(self, typed: Typed) -> None:
        """One command with its argument."""
        do: Callable[[str], Awaitable[None]] = getattr(self, f"_do_{typed.command}")
        await do(typed.text)

    async def _say(self, text: str) -> None:
        await self._screen.transcript.say(text)

    def _exchange(self, text: str) -> Exchange:
        """The exchange of answer n, or the last one."""
        turns = self._screen.conversation.exchanges
        if not turns:
            raise ConfigError("there is nothing in this chat yet", "")
        if not text:
            return turns[-1]
        if not text.isdigit() or not 1 <= int(text) <= len(turns):
            raise ConfigError(f"{text}: there are questions 1 to {len(turns)}", "")
        return turns[int(text) - 1]

    # --- the program -------------------------------------------------------------------------------------------------

    async def _do_quit(self, text: str) -> None:
        self._screen.chat_app.exit()

    async def _do_help(self, text: str) -> None:
        self._screen.action_help()

    async def _do_keys(self, text: str) -> None:
        self._screen.action_help()

    async def _do_logs(self, text: str) -> None:
        self._screen.action_logs()

    async def _do_engine(self, text: str) -> None:
        self._screen.action_engine()

    async def _do_serve(self, text: str) -> None:
        await self._screen.serving.command(text)

    async def _do_ps(self, text: str) -> None:
        self._screen.chat_app.show_command("ps")

    async def _do_plan(self, text: str) -> None:
        self._screen.chat_app.show_command("plan", *text.split())

    async def _do_doctor(self, text: str) -> None:
        self._screen.chat_app.show_command("doctor")

    async def _do_bench(self, text: str) -> None:
        if self._screen.may_change():
            model = self._screen.chat_app.model
            self._screen.chat_app.show_command("bench", model, *(text.split() or ["-r", "2"]))

    async def _do_theme(self, text: str) -> None:
        app = self._screen.chat_app
        if not text:
            app.search_themes()
            return
        if text not in app.available_themes:
            raise ConfigError(f"there is no theme {text}", "one of " + ", ".join(sorted(app.available_themes)))
        app.theme = text
        self._screen.flash(f"theme {text}; `localllm config set ui.theme {text}` keeps it")

    async def _do_model(self, text: str) -> None:
        if not text:
            self._screen.action_models()
            return
        await self._screen.load(text)

    async def _do_stats(self, text: str) -> None:
        await self._say(self._screen.chat_app.stats_text(self._screen.conversation))

    # --- chats -------------------------------------------------------------------------------------------------------

    async def _do_new(self, text: str) -> None:
        await self._screen.clear()
        self._screen.flash("new chat")

    async def _do_chats(self, text: str) -> None:
        from localllm.tui.widgets.sidebar import Sidebar

        self._screen.call_later(self._screen.action_chats)
        if text:
            from textual.widgets import Input

            self._screen.query_one(Sidebar).query_one(Input).value = text

    async def _do_rename(self, text: str) -> None:
        if not text:
            raise ConfigError("/rename needs a title", "/rename Build notes")
        self._screen.conversation.title = clean_line(text)[:200]
        self._screen.keep()
        self._screen.flash("renamed")

    async def _do_export(self, text: str) -> None:
        from localllm.history.export import FORMATS, render

        from .browse import default_path

        words = text.split(maxsplit=1)
        kind = words[0] if words and words[0] in FORMATS else "md"
        path = text[len(kind) :].strip() if words and words[0] in FORMATS else text
        talk = self._screen.conversation
        if not talk.roots:
            raise ConfigError("there is nothing to export yet", "")
        messages = [m for one in _all(talk.roots) for m in saved_messages(one)]
        chat = saved_chat(talk)
        name = "".join(c if c.isalnum() else "-" for c in talk.shown_title.lower()).strip("-")[:40] or "chat"
        page = await asyncio.to_thread(render, chat, list({m.id: m for m in messages}.values()), kind)
        self._screen.write_file(path or str(default_path(f"{name}.{kind}")), page)

    # --- what the model gets -----------------------------------------------------------------------------------------

    async def _do_system(self, text: str) -> None:
        await self._say(self._screen.conversation.set_system(text))
        self._screen.keep()

    async def _do_set(self, text: str) -> None:
        await self._say(self._screen.conversation.set_sampling(text))
        self._screen.keep()

    async def _do_think(self, text: str) -> None:
        await self._say(self._screen.conversation.set_think(text))

    async def _do_params(self, text: str) -> None:
        self._screen.action_params()

    async def _do_preset(self, text: str) -> None:
        presets, talk = self._screen.chat_app.presets, self._screen.conversation
        words = text.split()
        if words[:1] == ["save"] and len(words) == 2:
            await self._save_preset(words[1])
        elif not words:
            known = ", ".join(presets) or "none yet; /preset save NAME keeps these instructions and sampling"
            await self._say(f"presets: {known}")
        elif words[0] in presets:
            talk.use(presets[words[0]])
            await self._say(f"preset {words[0]}, from the next message")
        else:
            raise ConfigError(f"there is no preset {words[0]}", "one of " + (", ".join(presets) or "none yet"))

    async def _save_preset(self, name: str) -> None:
        talk = self._screen.conversation
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"{name} cannot be a preset's name", "use letters, digits, - and _")
        values = {"system": talk.system} if talk.system else {}
        values |= {key: f"{value}" for key, value in talk.sampling.items()}
        if not values:
            raise ConfigError("there are neither instructions nor sampling to save", "/system TEXT, /set temp 0.2")
        for key, value in values.items():
            set_key(f"presets.{name}.{key}", value)
        self._screen.chat_app.reload_presets()
        await self._say(f"preset {name} saved; /preset {name} uses it")

    async def _do_attach(self, text: str) -> None:
        self._screen.attached += await asyncio.to_thread(read_attachments, text)
        self._screen.flash("goes with the next message; esc on an empty prompt takes it back")

    async def _do_paste(self, text: str) -> None:
        from localllm.conversation.clipboard import paste

        found = await asyncio.to_thread(paste)
        if not found:
            raise ConfigError(
                "the clipboard is empty, or wl-paste, xclip and pbpaste are not there",
                "paste with the terminal's own key",
            )
        self._screen.attached.append(Attachment("clipboard.txt", found))

    async def _do_ctx(self, text: str) -> None:
        await self._say(await asyncio.to_thread(self._context))

    def _context(self) -> str:
        """What fills the window; called off the event loop, since counting takes a while."""
        screen = self._screen
        talk, facts, count = screen.conversation, screen.state.facts, screen.chat_app.backend.count_tokens
        turns = [one for one in talk.exchanges if one.counts]
        parts = {
            "instructions": count(talk.instructions) if talk.instructions else 0,
            "attachments": sum(count(file.block) for one in turns for file in one.attachments),
            "questions": sum(count(one.user) for one in turns),
            "answers": sum(count(one.text) for one in turns),
            "next message's files": sum(count(file.block) for file in screen.attached),
        }
        used = sum(parts.values())
        reply = talk.sampling.get("max_tokens")
        lines = [f"{name:22}{tokens:>8,}" for name, tokens in parts.items() if tokens]
        if reply:
            lines.append(f"{'reserved for a reply':22}{reply:>8,}")
        if facts.ctx:
            free = max(0, facts.ctx - used - int(reply or 0))
            lines.append(f"{'free':22}{free:>8,}   of {tokens_short(facts.ctx)}")
        left = sum(1 for one in talk.exchanges if one.forgotten)
        if left:
            lines.append(f"{left} questions are left out of the context")
        return "\n".join(lines) or "the context is empty"

    # --- turns -------------------------------------------------------------------------------------------------------

    async def _do_regen(self, text: str) -> None:
        exchange = self._exchange(text)
        if self._screen.may_change():
            await self._screen.ask_again(self._screen.conversation.again(exchange))

    async def _do_edit(self, text: str) -> None:
        self._screen.edit(self._exchange(text), True)

    async def _do_undo(self, text: str) -> None:
        exchange = self._exchange("")
        if self._screen.may_change():
            talk = self._screen.conversation
            talk.cut_after(exchange.parent) if exchange.parent is not None else talk.exchanges.clear()
            await self._screen.transcript.sync()
            self._screen.keep()
            self._screen.prompt.put(exchange.user)
            self._screen.flash("taken back; it stays as a branch")

    async def _do_branch(self, text: str) -> None:
        exchange = self._exchange(text)
        if self._screen.may_change():
            self._screen.conversation.cut_after(exchange)
            await self._screen.transcript.sync()
            self._screen.flash("the next message goes on from here; what came after is kept as another branch")

    async def _do_continue(self, text: str) -> None:
        exchange = self._exchange("")
        if not exchange.text or exchange.stop not in ("length", "abort", "partial", "edited", "error"):
            raise ConfigError("the last answer was not cut short", "/regen answers again")
        if self._screen.phase != "ready":
            raise ConfigError("no model is ready", "wait for it, or choose one with /model")
        if self._screen.may_change():
            await self._screen.go_on(exchange)

    async def _do_copy(self, text: str) -> None:
        chosen, what = self._screen.conversation.pick(text)
        self._screen.flash(f"{what}: {self._screen.chat_app.copy(chosen)}")

    async def _do_save(self, text: str) -> None:
        code, _ = self._screen.conversation.pick("code")
        if not text:
            raise ConfigError("/save needs a path", "/save script.py")
        self._screen.write_file(text, code)


def _all(roots: list[Exchange]) -> list[Exchange]:
    found, waiting = [], list(reversed(roots))
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += reversed(one.children)
    return found
