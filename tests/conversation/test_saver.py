"""The thread that keeps chats on disk outlives whoever asked it."""

from __future__ import annotations

import threading
from pathlib import Path

from localllm.conversation.saver import Saver
from localllm.history.store import History


def test_a_read_that_nobody_waits_for_any_more_ends_nothing(tmp_path: Path) -> None:
    saver = Saver(lambda: History(tmp_path / "chats.db"))
    goes_on = threading.Event()
    first = saver.run(lambda history: goes_on.wait(10))
    given_up = saver.run(lambda history: history.chats())
    assert given_up.cancel()  # as when a dialog is closed before its list has come
    goes_on.set()
    assert first.result(10)
    assert saver.run(lambda history: history.chats()).result(10) == []
    saver.close()
