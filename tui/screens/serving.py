"""The endpoint of the chat: on and off as asked for, and out of the way while the model changes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from localllm.conversation.serving import OFF, says, wished_port
from localllm.errors import ConfigError, LocalLLMError

if TYPE_CHECKING:
    from localllm.conversation.serving import Endpoint

    from .chat import ChatScreen


class Serving:
    """What /serve and --serve do. The port is opened and closed in a thread."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen

    @property
    def _endpoint(self) -> Endpoint | None:
        return self._screen.chat_app.endpoint

    @property
    def url(self) -> str:
        """Where it answers now; "" while it does not."""
        return self._endpoint.url if self._endpoint is not None else ""

    async def command(self, text: str) -> None:
        """/serve [port|off]. Raises ConfigError."""
        app, port = self._screen.chat_app, wished_port(text)
        if self._endpoint is None:
            raise ConfigError("this chat has no engine of its own to serve", "localllm serve")
        if port == OFF:
            was, app.serves = self.url or app.serves != OFF, OFF
            await self.pause()
            self._screen.flash("closed: no other program uses this model now" if was else "it is not being served")
        elif port is None and self.url:
            await self._screen.transcript.say(says(self.url))
        else:
            app.serves = port
            if self._screen.phase == "ready":
                await self.go_on()
            else:
                self._screen.flash("other programs can use it as soon as it is ready")

    async def go_on(self) -> None:
        """The model is ready: answer, if that is wished for."""
        app, screen, endpoint = self._screen.chat_app, self._screen, self._endpoint
        if endpoint is None or app.serves == OFF:
            return
        try:
            url = await asyncio.to_thread(endpoint.start, app.model, app.serves)
        except LocalLLMError as error:
            app.serves = OFF
            await screen.transcript.say(f"! {error.message}" + (f" ({error.hint})" if error.hint else ""), "warning")
        else:
            app.serves = int(url.rsplit(":", 1)[-1])  # the same one after the next model
            await screen.transcript.say(says(url))

    async def pause(self) -> None:
        """The model is about to go: nobody may use it any more."""
        if self._endpoint is not None and self.url:
            await asyncio.to_thread(self._endpoint.stop)
