"""The endpoint beside a program that holds the model itself, such as a chat: in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence

from localllm.llm.llm import LLM

from .pool import ModelPool
from .run import CUT_S, ServeOptions, bind, drain, make_server, url_of
from .service import Service

log = logging.getLogger(__name__)

STOP_S = 2 * CUT_S + 2  # for answers to be cut and connections to be closed


class BackgroundServer:
    """Serves one loaded model, which stays its owner's: stop this before the model is closed."""

    def __init__(
        self,
        llm: LLM,
        names: Sequence[str],
        options: ServeOptions,
        ended: Callable[[BackgroundServer], None] = lambda _: None,
    ) -> None:
        """Listen; what comes is answered from now on.

        names    the model's id, then its aliases
        ended    called from its thread when the port is closed, by `stop` or by itself

        Raises ConfigError, or ServerError when the port is taken.
        """
        sock = bind(options)
        self.url = url_of(sock)
        self._ended = ended
        self._pool = ModelPool.holding(llm, names)
        self._pool.models()
        self._service = Service(self._pool, options.service)
        self._server = make_server(self._service, options.app)
        self._loop = asyncio.new_event_loop()
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, args=(sock,), name="endpoint", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """False once it has ended, by itself or by `stop`."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Close the port, cut what runs. Returns when that is done; twice does nothing."""
        try:
            self._loop.call_soon_threadsafe(self._begin_to_end)
        except RuntimeError:  # the loop is closed: it has ended
            return
        self._thread.join(STOP_S)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _run(self, sock: socket.socket) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._server.serve(sockets=[sock]))
        except Exception:
            log.exception("the endpoint ended")
        finally:
            self._service.close()
            sock.close()
            self._pool.close(0)
            self._ended(self)

    def _begin_to_end(self) -> None:
        self._ending = self._ending or self._loop.create_task(drain(self._service, self._server, 0.0))
