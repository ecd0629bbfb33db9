"""Random keys over every screen: there is always a way back to the prompt, and no draft is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from textual.events import Key
from textual.keys import _character_to_key

from localllm.config import UiConfig

from .conftest import Chat, chat
from .test_panels import long_chat

SIZES = ((118, 34), (80, 24), (60, 20), (40, 12))
BURST = 12
# what leaves the program is pressed too, and does nothing here; keys that delete text are left out
PANELS = ("f1", "f2", "f3", "f4", "f9", "f12", *(f"ctrl+{letter}" for letter in "oprstbgnqc"))
MOVES = ("up", "down", "left", "right", "home", "end", "pageup", "pagedown", "tab", "shift+tab", "alt+up", "alt+down")
TYPED = tuple("abcdefgijkmnopqrstvxyz/@[]?!0 ")
SENT = (
    "!oom", "!crash", "!full", "!think", "!md", "long", "/attach notes.txt", "/model fake", "/model fake-huge",
    "/model fake-download", "/model nosuch", "/new", "/undo", "/edit", "/regen", "/theme nord", "/params",
)  # fmt: skip
MARK = 0x4E00  # drafts are told apart by one letter each, which no key types
LETTER = 0x3400  # and what is typed at the end of each burst by another
ESCAPES = 10  # more than any screen has to be closed


def drafts(running: Chat) -> str:
    """All that can be brought back into the prompt."""
    screen, prompt = running.screen, running.prompt
    return "\n".join([prompt.text, screen.draft, *prompt.sent_before, *prompt._drafts.values()])


def press(running: Chat, *keys: str) -> None:
    """As fast as a terminal that was stuck: nothing waits for what a key does."""
    for key in keys:
        typed = key if len(key) == 1 else None
        running.app.post_message(Key(_character_to_key(key) if typed else key, typed))


async def settled(running: Chat) -> None:
    """Every key has arrived."""
    await running.pilot.pause(0)
    await running.pilot.pause(0)


async def back_at_the_prompt(running: Chat, letter: str) -> None:
    """Esc, as often as somebody would try it; then a letter arrives, also where a text that comes back displaces it."""
    for _ in range(ESCAPES):
        if running.app.screen is running.screen and running.app.focused is running.prompt:
            break
        press(running, "escape")
        await settled(running)
    assert running.app.screen is running.screen, running.app.screen
    assert running.app.focused is running.prompt, running.app.focused
    press(running, letter)
    await running.until(lambda: letter in drafts(running) or running.app.failure)
    assert running.app.failure is None


async def walk(running: Chat, keys: int, chance: random.Random, share: float) -> None:
    """Press so many keys, in bursts; this share of them the screen cannot follow."""
    width, height = running.app.size
    for number in range(-(-keys // BURST)):
        mark = chr(MARK + number)
        if chance.random() < 0.4:
            running.prompt.put(chance.choice(SENT))
            press(running, "enter")
            await settled(running)
        running.prompt.insert(mark)
        kinds = chance.choices((PANELS, MOVES, TYPED, ("enter",), ("escape",)), (4, 4, 4, 3, 2), k=BURST)
        burst = [chance.choice(kind) for kind in kinds]
        at_once = chance.random() < share
        small = chance.random() < 0.1
        try:
            if small:
                await running.pilot.resize_terminal(30, 8)
            for key in burst:
                press(running, key)
                if not at_once:
                    await settled(running)
            await settled(running)
            if small:
                await running.pilot.resize_terminal(width, height)
                await settled(running)
            assert running.app.failure is None
            await back_at_the_prompt(running, chr(LETTER + number))
            assert mark in drafts(running), "a draft was lost"
        except AssertionError as error:
            raise AssertionError(f"burst {number}: {' '.join(burst)}: {error}") from error
        if len(running.prompt.text) > 200:
            running.prompt.put("")


async def walked(
    size: tuple[int, int], keys: int, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, share: float = 0.5
) -> None:
    """A walk in a chat with a history, beginning on the first screen or in a chat that loads."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EDITOR", "true")
    monkeypatch.setattr("localllm.tui.downloads.OWN", ["true"])  # no command of this program is run
    (folder / "notes.txt").write_text("a note")
    long_chat(folder / "chats.db", 4)
    async with chat(
        path=folder / "chats.db", size=size, tps=2000, ui=UiConfig(animations=False), home=chance.random() < 0.5
    ) as running:
        for name in ("exit", "deliver_screenshot"):
            monkeypatch.setattr(running.app, name, lambda *args, **more: None)
        await walk(running, keys, chance, share)
        await running.until(lambda: not any(worker.is_running for worker in running.app.workers))
        monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES[1:2])
async def test_any_keys_lead_back_to_the_prompt(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await walked(size, 48, SIZES.index(size), tmp_path, monkeypatch, 0.8)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("size", SIZES)
async def test_many_keys_lead_back_to_the_prompt(
    size: tuple[int, int], part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await walked(size, 500, random.SystemRandom().randrange(1 << 32), tmp_path, monkeypatch)
