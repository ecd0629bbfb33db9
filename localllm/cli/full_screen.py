"""The Textual interface of `chat`, in this terminal or in a browser tab."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

from localllm.cli.frame import logs
from localllm.cli.frame.command import Env
from localllm.cli.start import Start, backend_of, farewell, session_of
from localllm.config import UserConfig
from localllm.terminal import locale_encoding


def in_tab() -> bool:
    """Whether this process draws a browser tab (`web.py`): it has pipes instead of a terminal."""
    return "TEXTUAL_DRIVER" in os.environ


def full_screen(env: Env, config: UserConfig, start: Start) -> int:
    """Run the Textual interface; afterwards print one line on the normal screen."""
    if not env.console.out_tty and not in_tab():
        env.console.warn("stdout is not a terminal: the chat is drawn on stderr and stdout stays empty")
    from localllm.tui.stderr_guard import stderr_to

    logs.no_stderr()
    choice = start.choice
    gc.disable()  # until the first frame is drawn
    with stderr_to(logs.path()):
        from localllm.tui.app import ChatApp
        from localllm.tui.frame import ScreenOptions

        session = session_of(env, config, start, backend_of(env, config, start))
        os.environ.setdefault("ESCDELAY", "50")
        if not in_tab():  # exported by a shell, these would fix the size
            for name in ("LINES", "COLUMNS"):
                os.environ.pop(name, None)
        options = ScreenOptions(
            ui=config.ui, keys=config.keys, name=choice.name if choice else None, home=choice is None,
            offline=env.offline, log_file=logs.path(), encoding=locale_encoding(),
        )  # fmt: skip
        app = ChatApp(session, options)
        gc.freeze()
        app.run(mouse=config.ui.mouse, inline=start.inline, inline_no_clear=start.inline)
        start.saver.close()
        if session.endpoint is not None:
            session.endpoint.stop()
        if session.tools is not None:
            session.tools.close()
        close_soon(session.backend)
    if app.failure is not None and not app.ended:
        raise app.failure  # becomes a one-line error and a log entry
    if app.wants_restart:
        _restart(session.model, session.conversation.id)
    farewell(env, session.conversation, start.saver, session.model)
    return app.ended


def _restart(model: str, chat_id: str) -> None:
    words = [sys.executable, "-P", "-m", "localllm", "chat", model, "--resume", chat_id]
    sys.stdout.flush()
    os.execv(sys.executable, words)


def close_soon(backend: Any, wait_s: float = 3.0) -> None:
    """Close the backend, but do not make a user who has left wait for a model that is still loading."""
    import threading

    closing = threading.Thread(target=backend.close, name="close", daemon=True)
    closing.start()
    closing.join(wait_s)
