"""The slash commands, without Textual: each takes the session and its argument, and returns what to say.

Commands that need the full screen (panels, prompt, branches) are in `tui.chat.commands`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from pathlib import Path

from localllm.config import load_config, set_key
from localllm.conversation import clipboard
from localllm.conversation.attachments import picture_tokens, read_documents, refuse_pictures
from localllm.conversation.documents import num_tokens, text_document
from localllm.conversation.markdown import code_blocks
from localllm.conversation.session import Session, write_new
from localllm.conversation.slash import Typed, parse_port
from localllm.conversation.storage import saved_chat, saved_messages
from localllm.conversation.tree import (
    THINK,
    effective_sampling,
    number,
    parse_sampling,
    sampling_keys,
    sampling_line,
    walked,
)
from localllm.errors import ConfigError
from localllm.request import num_images, text_of
from localllm.terminal import clean_line, counted, gib, tokens_short


def run(session: Session, typed: Typed) -> str:
    """Run one of `COMMANDS`; those in `SLOW` take a while. Raises LocalLLMError for a user error."""
    return COMMANDS[typed.command](session, typed.text)


def _new(session: Session, text: str) -> str:
    session.conversation.clear()
    session.files.clear()
    return "new chat"


def _rename(session: Session, text: str) -> str:
    if not text:
        raise ConfigError("/rename needs a title", "/rename Build notes")
    session.conversation.title = clean_line(text)[:200]
    return "renamed"


def _undo(session: Session, text: str) -> str:
    session.conversation.undo()
    return "removed the last question; it stays as a branch"


def _export(session: Session, text: str) -> str:
    from localllm.history.export import FORMATS, render

    word, _, rest = text.partition(" ")
    ending = Path(text).suffix.lower().lstrip(".")
    kind, path = (word, rest.strip()) if word in FORMATS else (ending if ending in FORMATS else "md", text)
    if path == text and path and not {".", "/"} & set(path):
        raise ConfigError(
            f"/export must be followed by {', '.join(FORMATS)} or a path, not {clean_line(text)}", "/export html"
        )
    talk = session.conversation
    if not talk.roots:
        raise ConfigError("this chat is empty", "")
    messages = {message.id: message for one in walked(talk.roots) for message in saved_messages(one)}
    page = render(saved_chat(talk), list(messages.values()), kind)
    name = "".join(c if c.isalnum() else "-" for c in talk.shown_title.lower()).strip("-")[:40] or "chat"
    return write_new(path or _free_path(f"{name}.{kind}"), page)


def _free_path(name: str) -> str:
    """An unused file name in the working folder."""
    first = Path(name)
    paths = chain([first], (first.with_stem(f"{first.stem}-{number}") for number in count(2)))
    return str(next(path for path in paths if not path.exists()))


def _system(session: Session, text: str) -> str:
    talk = session.conversation
    if not text:
        return f"system: {talk.system}" if talk.system else "no system message; set one with /system TEXT"
    talk.system = "" if text == "off" else text
    return "system message set, from the next message" if talk.system else "system message removed"


def _think(session: Session, text: str) -> str:
    talk = session.conversation
    if not text:
        return f"think is {talk.think}; choose from {', '.join(THINK)}"
    if text not in THINK:
        raise ConfigError(f"/think must be followed by one of {', '.join(THINK)}, not {text}", "/think off")
    talk.think = text
    return f"think {text}, from the next message; models that cannot switch reasoning ignore this"


def _set(session: Session, text: str) -> str:
    sampling, names = session.conversation.sampling, sampling_keys()
    words = text.replace("=", " ").split()
    if not words:
        shown = ", ".join(f"{key} {number(value)}" for key, value in sampling.items())
        return f"{f'Overrides: {shown}' if shown else 'No overrides: model defaults apply'}. Keys: {', '.join(names)}"
    values = effective_sampling(session.backend.facts(), sampling)
    name = {"temp": "temperature"}.get(words[0], words[0])
    if name not in names:
        raise ConfigError(f"unknown setting {name!r}", f"choose from {', '.join(names)}")
    if len(words) == 1:
        return sampling_line({name: values[name]}) if name in values else f"{name} is off"
    if words[1] in ("off", "auto", "default"):
        sampling.pop(name, None)
        return f"{name} is reset to the model's default"
    sampling[name] = parse_sampling(name, words[1])
    return f"{name} = {number(sampling[name])}, from the next message"


def _params(session: Session, text: str) -> str:
    """Show the parameters of the next message, and who set each."""
    talk = session.conversation
    values = effective_sampling(session.backend.facts(), talk.sampling)
    width = max(map(len, values), default=0)
    lines = [f"{name:{width}}  {number(value):>6}  {why}" for name, (value, why) in values.items()]
    return "\n".join([*lines, f"{'think':{width}}  {talk.think:>6}"])


def _preset(session: Session, text: str) -> str:
    presets, words = session.presets, text.split()
    if words[:1] == ["save"] and len(words) == 2:
        return _save_preset(session, words[1])
    known = ", ".join(presets)
    if not words:
        return f"presets: {known or 'none yet; /preset save NAME saves these instructions and sampling'}"
    if words[0] not in presets:
        raise ConfigError(
            f"unknown preset {words[0]}", f"choose from {known}" if known else "/preset save NAME saves one"
        )
    session.conversation.use(presets[words[0]])
    return f"preset {words[0]}, from the next message"


def _save_preset(session: Session, name: str) -> str:
    talk = session.conversation
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"{name} is not a valid preset name", "use letters, digits, - and _")
    values = ({"system": talk.system} if talk.system else {}) | {key: f"{v}" for key, v in talk.sampling.items()}
    if not values:
        raise ConfigError("there are no instructions or sampling values to save", "/system TEXT or /set temp 0.2")
    for key, value in values.items():
        set_key(f"presets.{name}.{key}", value)
    session.presets = load_config().presets
    return f"preset {name} saved; use it with /preset {name}"


def _attach(session: Session, text: str) -> str:
    if text == "off" or text.startswith("off "):
        return _detach(session, text[3:].strip())
    named = read_documents(text)
    refuse_pictures(named, session.backend.facts())
    session.files += named
    return f"{counted(len(session.files), 'file')} for the next message: {session.budget(session.files)}"


def _detach(session: Session, which: str) -> str:
    """Remove all files, or one by number or name."""
    names = [one.name for one in session.files]
    if not which:
        session.files.clear()
        return "removed all files from the next message"
    at = int(which) - 1 if which.isdecimal() else names.index(which) if which in names else -1
    if not 0 <= at < len(names):
        known = ", ".join(f"{i} {clean_line(name)}" for i, name in enumerate(names, 1)) or "no files"
        raise ConfigError(f"/attach off {which}: the files are {known}", "/attach off")
    return f"removed {clean_line(session.files.pop(at).name)}"


def _paste(session: Session, text: str) -> str:
    found = clipboard.paste()
    if not found:
        missing = "the clipboard is empty, or wl-paste, xclip and pbpaste are missing"
        raise ConfigError(missing, "paste with the terminal's own shortcut")
    session.files.append(text_document("clipboard.txt", found))
    return ""


def _picked(session: Session, what: str) -> tuple[str, str]:
    """(text, description) of what /copy names. Raises ConfigError when it does not exist."""
    answers = [exchange for exchange in session.conversation.exchanges if exchange.text]
    if not answers:
        raise ConfigError("there is no answer to copy yet", "")
    if what == "all":
        return "\n\n".join(f"**{one.user}**\n\n{one.text}" for one in answers), "the chat"
    if what.startswith("code"):
        blocks = code_blocks(answers[-1].text)
        if not blocks:
            raise ConfigError("the last answer has no code block", "")
        found, kind, which, usage = blocks, "code block", what.removeprefix("code").strip(), "/copy code 1"
    else:
        found, kind, which = [one.text for one in answers], "answer", what
        usage = f"/copy, /copy {len(found)}, /copy code, /copy all"
    if which and (not which.isdigit() or not 1 <= int(which) <= len(found)):
        where = "the last answer" if kind == "code block" else "this chat"
        raise ConfigError(f"/copy {what}: {where} has {counted(len(found), kind)}", usage)
    return (found[int(which) - 1], f"{kind} {which}") if which else (found[-1], f"the last {kind}")


def _copy(session: Session, text: str) -> str:
    chosen, what = _picked(session, text)
    return f"{what}: {session.copy(chosen)}"


def _save(session: Session, text: str) -> str:
    code, _ = _picked(session, "code")
    if not text:
        raise ConfigError("/save needs a path", "/save script.py")
    return write_new(text, code)


def _ctx(session: Session, text: str) -> str:
    """Show what fills the context window."""
    talk, facts, count = session.conversation, session.backend.facts(), session.backend.count_tokens
    now = next((one for one in talk.exchanges[-1:] if not one.stop), None)  # being answered
    goes_on = now is not None and now.usage.prompt_tokens > 0  # it is counted up to its last stop
    turns = [one for one in talk.exchanges if one.counts and (goes_on or one is not now)]
    asked = [one for one in turns if one.attachments]
    pictures = num_images([{"content": one.content} for one in asked])
    parts = {
        "instructions": count(talk.instructions) if talk.instructions else 0,
        "attachments": sum(count(text_of(one.content)) - count(one.user) for one in asked),
        "images": pictures * picture_tokens(facts),
        "questions": sum(count(one.user) for one in turns),
        "answers": sum(count(one.text[: one.known[1]] if one is now else one.text) for one in turns),
    }
    parts["template and reasoning"] = max(0, talk.used_tokens - sum(parts.values()))
    if now is not None and goes_on:
        _, said, thought = now.known
        parts["added to its answer"] = count(now.reasoning[thought:] + now.text[said:])
    elif now is not None:
        parts["images"] += num_images([{"content": now.content}]) * picture_tokens(facts)
        parts["this question"] = num_tokens(text_of(now.content), count)
        texts = [now.reasoning + now.text, *(one.text for one in now.rounds)]
        texts += [call.name + call.arguments for one in now.rounds for call in one.calls]
        parts["its answer so far"] = sum(map(count, texts))
    if now is not None:
        parts["results of its calls"] = num_tokens(now.results, count)
    to_come = [picture_tokens(facts) if file.picture else num_tokens(file.block, count) for file in session.files]
    parts["next message's files"] = sum(to_come)
    reply = int(talk.sampling.get("max_tokens") or 0)
    lines = [f"{name:22}{tokens:>8,}" for name, tokens in parts.items() if tokens]
    if reply:
        lines.append(f"{'reserved for answer':22}{reply:>8,}")
    if facts.ctx:
        free = max(0, facts.ctx - sum(parts.values()) - reply)
        lines.append(f"{'free':22}{free:>8,}   of {tokens_short(facts.ctx)}")
    left = sum(1 for one in talk.exchanges if one.forgotten)
    if left:
        lines.append(f"{counted(left, 'question')} dropped from the context")
    return "\n".join(lines) or "the context is empty"


def _stats(session: Session, text: str) -> str:
    facts = session.backend.facts()
    lines = [facts.run_summary or "no model is loaded yet"]
    if facts.weight_bytes:
        cached = f", {facts.pages_cached:,} cached" if facts.pages_cached else ""
        lines.append(
            f"weights {gib(facts.weight_bytes)} · KV {gib(facts.kv_bytes)} · pages {facts.pages_total:,}"
            f" ({facts.pages_free:,} free{cached})"
        )
    if facts.kv_store_limit:
        lines.append(f"pages on disk {gib(facts.kv_store_bytes)} of {gib(facts.kv_store_limit)}")
    return "\n".join([*lines, *filter(None, [session.conversation.summary])])


def _tools(session: Session, text: str) -> str:
    tools = session.tools
    if tools is None:
        raise ConfigError("this chat has no tools", "use `localllm chat --mcp FILE`, or [mcp.servers] in the settings")
    if text not in ("", "on", "off"):
        raise ConfigError(f"/tools must be followed by on or off, not {text}", "/tools")
    if text:
        tools.is_on = text == "on"
        return f"tools are {text}, from the next message"
    return tools.listed()


def _serve(session: Session, text: str) -> str:
    return session.serve(parse_port(text))


COMMANDS: dict[str, Callable[[Session, str], str]] = {
    "new": _new, "rename": _rename, "undo": _undo, "export": _export, "system": _system, "think": _think, "set": _set,
    "preset": _preset, "attach": _attach, "paste": _paste, "copy": _copy, "save": _save,
    "ctx": _ctx, "stats": _stats, "serve": _serve, "tools": _tools, "params": _params,
}  # fmt: skip
SLOW = {"export", "attach", "paste", "ctx", "serve"}
SETTINGS = {"rename", "undo", "system", "think", "set", "preset"}  # commands whose effect is saved with the chat
