"""Conversations to and from disk: each question and each answer is a message of the saved tree."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from localllm.config import KEYS
from localllm.conversation.answer import Call, Round
from localllm.conversation.documents import Document, text_document
from localllm.conversation.tree import THINK, Conversation, Exchange, sampling_keys
from localllm.errors import ConfigError
from localllm.history.records import PICTURE_URL, SavedChat, SavedMessage
from localllm.interface import Failed
from localllm.request import Timing, Usage

TOKENS = ("prompt", "cached", "completion", "reasoning")
MAX_AMOUNT = 1e12  # tokens or seconds; larger stored values are invalid


def saved_chat(talk: Conversation) -> SavedChat:
    """The chat as a saved record."""
    params = {"sampling": dict(talk.sampling), "think": talk.think, "summary": talk.summary_text}
    last = talk.exchanges[-1] if talk.exchanges else None
    leaf = None if last is None else last.answer_id if _has_answer(last) else last.question_id
    return SavedChat(talk.id, talk.shown_title, talk.model, talk.system, params, talk.created, time.time(), leaf)


def restored(chat: SavedChat, messages: list[SavedMessage], sampling: dict[str, Any] | None = None) -> Conversation:
    """Restore a saved chat. `sampling` is the dictionary to fill."""
    kept, think = chat.params.get("sampling"), chat.params.get("think")
    made = Conversation(chat.system, sampling, think if think in THINK else "auto")
    if isinstance(kept, Mapping):
        made.sampling.clear()
        made.sampling.update(_sampling(kept))
    made.id, made.title, made.model, made.created = chat.id, chat.title, chat.model, chat.created
    made.summary_text = str(chat.params.get("summary") or "")
    leaf = _restore(made, messages, chat.leaf_id)
    if leaf is not None:
        made.show(leaf)
        made.cut_after(leaf)
    elif made.roots:
        made.show(made.roots[-1])
    return made


def _sampling(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The saved sampling values that are valid settings."""
    values = {}
    for name in sampling_keys():
        with suppress(ConfigError):
            if kept.get(name) is not None:
                values[name] = KEYS[f"sampling.{name}"].parse(kept[name], "saved chat")
    return values


def _has_answer(exchange: Exchange) -> bool:
    return bool(exchange.text or exchange.reasoning or exchange.rounds or exchange.stop not in ("", "unanswered"))


def saved_messages(exchange: Exchange) -> Iterator[SavedMessage]:
    """The messages of one exchange as saved records."""
    above = exchange.parent
    parent = None if above is None else above.answer_id if _has_answer(above) else above.question_id
    sent = exchange.attachments if exchange.sent is None else exchange.sent
    files = [{"name": one.name} | ({"image": one.picture} if one.picture else {"text": one.text}) for one in sent]
    params: dict[str, Any] = {"attachments": files} if files else {}
    if exchange.user or files:
        yield SavedMessage(
            exchange.question_id, "", parent, "user", exchange.user, params=params, created=exchange.asked_at
        )
        parent = exchange.question_id
    if not _has_answer(exchange):
        return
    timing, failed = exchange.timing, exchange.failed
    stats: dict[str, Any] = {name: getattr(exchange.usage, f"{name}_tokens") for name in TOKENS}
    stats |= {"ttft_s": round(timing.ttft_s, 4), "total_s": round(timing.total_s, 4)}
    stats |= {"decode_tps": round(timing.decode_tps, 2), "thought_s": round(exchange.thought_s, 2)}
    if exchange.forgotten:
        stats["forgotten"] = True
    if failed is not None:
        stats["failed"] = {"code": failed.code, "message": failed.message, "hint": failed.hint}
    yield SavedMessage(
        exchange.answer_id, "", parent, "assistant", exchange.text, exchange.reasoning, exchange.model,
        {"rounds": [asdict(one) for one in exchange.rounds]} if exchange.rounds else {}, stats,
        exchange.asked_at + 0.001, exchange.stop or "streaming",
    )  # fmt: skip


def _restore(made: Conversation, messages: list[SavedMessage], leaf_id: int | None) -> Exchange | None:
    """Build the tree. Returns the exchange that contains `leaf_id`."""
    by_id = {message.id: message for message in messages}
    children: defaultdict[int | None, list[SavedMessage]] = defaultdict(list)
    for message in messages:
        children[message.parent_id if message.parent_id in by_id else None].append(message)
    exchanges: dict[int | None, Exchange] = {}  # by their last message
    waiting = children[None][::-1]
    while waiting:
        message = waiting.pop()
        below = children[message.id]
        waiting += reversed(below)
        if message.role == "user":
            if below and all(one.role == "assistant" for one in below):
                continue  # each answer forms an exchange with this question
            question: SavedMessage | None = message
        else:
            above = by_id.get(message.parent_id or 0)
            question = above if above and (above.role, message.role) == ("user", "assistant") else None
        first = question or message
        one = _exchange(exchanges.get(first.parent_id), question, None if question is message else message)
        made.attach(one)
        exchanges[message.id] = one
        if question is not None:
            exchanges.setdefault(question.id, one)
    return exchanges.get(leaf_id)


def _document(saved: Mapping[str, Any]) -> Document:
    """A saved attachment. Anything that is not a picture's own bytes is never sent as a picture."""
    name, picture = str(saved.get("name", "")), saved.get("image")
    if isinstance(picture, str) and PICTURE_URL.fullmatch(picture):
        return Document(name, (), picture=picture)
    return text_document(name, str(saved.get("text", "")))


def _rounds(saved: Any) -> list[Round]:
    """Saved rounds; invalid ones are dropped."""
    if not isinstance(saved, list):
        return []
    found = []
    for one in saved:
        calls = one.get("calls") if isinstance(one, dict) else None
        if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) for call in calls):
            continue
        made = [_call(call) for call in calls]
        found.append(Round(str(one.get("text") or ""), str(one.get("reasoning") or ""), made))
    return found


def _call(saved: Mapping[str, Any]) -> Call:
    texts = {name: str(saved.get(name) or "") for name in ("id", "name", "arguments", "result")}
    return Call(**texts, failed=bool(saved.get("failed")))


def _exchange(above: Exchange | None, question: SavedMessage | None, answer: SavedMessage | None) -> Exchange:
    one = Exchange(question.content if question else "", above)
    if question is not None:
        one.question_id, one.asked_at = question.id, question.created
        files = question.params.get("attachments")
        if isinstance(files, list):
            one.attachments = tuple(_document(file) for file in files if isinstance(file, dict))
    if answer is None:
        one.stop = "unanswered"
        return one
    one.answer_id, one.text, one.reasoning, one.model = answer.id, answer.content, answer.reasoning, answer.model
    one.rounds = _rounds(answer.params.get("rounds"))
    one.stop = {"done": "stop", "streaming": "partial"}.get(answer.status, answer.status)
    stats = answer.stats

    def amount(name: str) -> float:
        value = stats.get(name, 0)
        return float(value) if isinstance(value, (int, float)) and 0 <= value <= MAX_AMOUNT else 0.0

    one.usage = Usage(*(int(amount(name)) for name in TOKENS))
    one.mark()
    one.timing = Timing(ttft_s=amount("ttft_s"), total_s=amount("total_s"), decode_tps=amount("decode_tps"))
    one.thought_s, one.forgotten = amount("thought_s"), bool(stats.get("forgotten"))
    failed = stats.get("failed")
    if isinstance(failed, dict):
        one.failed = Failed(-1, str(failed.get("code")), str(failed.get("message")), str(failed.get("hint", "")))
    return one
