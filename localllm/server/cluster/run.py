"""`serve --ray`: the door in this process, the replicas in Ray's processes; a signal drains both."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

from localllm.server.run import Hooks, ServeOptions, listening, server_of, signals, url_of

from .affinity import Fleet
from .deployment import LOCAL, FleetOptions, connect, deploy, is_deployed, leave, share_of
from .door import Door
from .replica import ReplicaOptions

TICK_S = 0.1


def serve(options: ServeOptions, replicas: ReplicaOptions, fleet: FleetOptions, address: str, hooks: Hooks) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Replicas end with the command that started them.

    Raises ConfigError or ServerError if the port is in use, no cluster answers, or no replica can start.
    """
    with listening(options) as socks:
        asyncio.run(_Running(Door(options, options.token), hooks).run(socks, replicas, fleet, address))


class _Running:
    """Runs the door, which answers 503 until the replicas are ready."""

    def __init__(self, door: Door, hooks: Hooks) -> None:
        self._door, self._hooks = door, hooks
        self._server = server_of(door.app)

    async def run(self, socks: list[socket.socket], replicas: ReplicaOptions, fleet: FleetOptions, at: str) -> None:
        url = url_of(socks[0])
        with signals(self._door, self._server, self._hooks):
            self._hooks.listening(url)
            starting = asyncio.ensure_future(self._start(url, replicas, fleet, at))
            ticking = asyncio.ensure_future(self._tick())
            try:
                await self._server.serve(sockets=socks)
            finally:
                ticking.cancel()
                starting.cancel()
                await asyncio.to_thread(leave, ends_replicas=self._door.ends_answers)
        error = starting.exception() if starting.done() and not starting.cancelled() else None
        if error is not None and not self._door.is_draining:
            raise error

    async def _start(self, url: str, replicas: ReplicaOptions, fleet: FleetOptions, address: str) -> None:
        """Connect to Ray and start the replicas, in a thread since each takes seconds to minutes; then report ready."""
        door = self._door

        def work() -> None:
            door.cluster = connect(address)
            share, engine = share_of(fleet, replicas.engine, is_local=address == LOCAL)
            door.ends_answers = not is_deployed()
            door.handle = deploy(replace(replicas, engine=engine), share)

        try:
            await asyncio.to_thread(work)
            while not Fleet.running:
                await asyncio.sleep(TICK_S)
        except BaseException:
            self._server.should_exit = True
            raise
        if not door.is_draining:
            self._hooks.ready(url, door)

    async def _tick(self) -> None:
        while True:
            self._hooks.tick()
            await asyncio.sleep(TICK_S)
