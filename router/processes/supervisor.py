# SPDX-License-Identifier: Apache-2.0
"""The supervisor: starts the keeper and the serving processes, starts those again that die, ends them all.

One that lives and no longer answers is killed first. It does nothing else, so that nothing else can end it. It holds what must outlive any of them: the ports, the keeper's
sockets (who connects while that is started again waits for it), and the directory of what is shared.

    supervisor ─┬─ keeper       events, index, fleet, health, what is learnt, admin API
                └─ serving 0…N  requests; each decides by itself

Each process has one end of a socket pair: it is told there what it is, tells when it serves, and ends when the other
end is gone, so none outlives the supervisor, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from router.config import Config
from router.processes.frames import Frames, frame
from router.processes.heartbeat import Heartbeat
from router.processes.restarts import Restarts
from router.processes.shared_places import SharedPlaces
from router.processes.start import FromChild, Ping, Pong, ProcessState, Service, Start, States, Up

_log = logging.getLogger(__name__)
_KEEPER = "keeper"
_GRACE_S = 15.0
"""Beyond what a process may take for its requests; then it is killed."""
_MOST_REQUEST_S = 10.0
EXIT_DEAD = 1


@dataclass(slots=True)
class _Child:
    """One process, over all its lives."""

    name: str
    process: int | None
    restarts: Restarts = field(default_factory=Restarts)
    running: asyncio.subprocess.Process | None = None
    generation: int = 0
    channel: asyncio.StreamWriter | None = None
    up: asyncio.Future[Up] | None = None
    hangs: int = 0

    @property
    def state(self) -> ProcessState:
        pid = self.running.pid if self.running is not None else None
        return ProcessState(self.name, pid, self.restarts.count, self.hangs)


class Supervisor:
    """``run`` once."""

    def __init__(self, service: Service, config: Config, places: SharedPlaces) -> None:
        """``config`` with the ports that ``places`` hold."""
        self._service = service
        self._config = config
        self._places = places
        self._keeper = _Child(_KEEPER, None)
        self._serving = [_Child(f"serving-{i}", i) for i in range(config.server.processes)]
        self._stopping = asyncio.Event()
        self._failed: int | None = None
        """Exit code of a process that could not even be started once."""
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        try:
            if await self._start():
                await self._stopping.wait()
        finally:
            await self._stop()
        return self._failed or 0

    async def _start(self) -> bool:
        """Whether all processes serve; prints where."""
        # Those that serve wait for the keeper by themselves, who finds what is wrong with the configuration first.
        ups = await self._first_start([self._keeper, *self._serving])
        if ups is None:
            return False
        self._tell_keeper()
        print(json.dumps(ups[-1].addresses), flush=True)
        return True

    async def _first_start(self, children: Sequence[_Child]) -> list[Up] | None:
        loop = asyncio.get_running_loop()
        for child in children:
            child.up = loop.create_future()
            self._tasks.append(loop.create_task(self._keep_alive(child), name=child.name))
        ups = [child.up for child in children if child.up is not None]
        all_up = asyncio.ensure_future(asyncio.wait(ups))
        stopping = loop.create_task(self._stopping.wait())
        await asyncio.wait((all_up, stopping), return_when=asyncio.FIRST_COMPLETED)
        for waiting in (all_up, stopping):
            waiting.cancel()
        await asyncio.gather(all_up, stopping, return_exceptions=True)
        return [up.result() for up in ups] if all(up.done() for up in ups) else None

    async def _keep_alive(self, child: _Child) -> None:
        """Start a process, and again whenever it died, until all are stopped."""
        while not self._stopping.is_set():
            code = await self._live(child)
            if self._stopping.is_set():
                return
            if child.up is not None and not child.up.done():
                # It never served: its configuration is wrong, and would be again.
                self._failed = code if code > 0 else EXIT_DEAD
                self._stopping.set()
                return
            if child.process is not None:
                self._places.died(child.process)
            again_s = child.restarts.died(time.monotonic())
            pause_s = again_s - time.monotonic()
            _log.error("%s died (%s); started again in %.1f s", child.name, _how(code), pause_s)
            self._tell_keeper()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), max(pause_s, 0.0))

    async def _live(self, child: _Child) -> int:
        """One life; returns how it ended."""
        ours, theirs = socket.socketpair()
        listeners = self._places.keeper_listeners() if child.process is None else {}
        child.generation += 1
        child.restarts.started(time.monotonic())
        start = Start(
            service=self._service,
            process=child.process,
            processes=len(self._serving),
            config=msgspec.to_builtins(self._config),
            directory=str(self._places.directory),
            listeners=listeners,
            generation=child.generation,
        )
        with theirs:
            running = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "router.processes.child", str(theirs.fileno())),
                pass_fds=(theirs.fileno(), *listeners.values()),
                # What the terminal sends is for the supervisor, who ends them in order.
                process_group=0,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        child.running, child.channel = running, writer
        if self._stopping.is_set():
            _signal(child, signal.SIGTERM)
        writer.write(frame(start))
        frames: Frames[FromChild] = Frames(reader, FromChild)  # type: ignore[arg-type]
        hearing = asyncio.create_task(self._hear(child, frames))
        try:
            return await running.wait()
        finally:
            child.running = child.channel = None
            hearing.cancel()
            writer.close()

    async def _hear(self, child: _Child, frames: Frames[FromChild]) -> None:
        """Until this life of the process ends; from when it serves it is also asked whether it still turns."""
        beat = Heartbeat(self._config.server.hung_after_s)
        watching: asyncio.Task[None] | None = None
        try:
            while (message := await frames.next()) is not None:
                if isinstance(message, Pong):
                    beat.heard(message.number)
                elif watching is None:
                    watching = asyncio.create_task(self._watch(child, beat))
                    self._serves(child, message)
        finally:
            if watching is not None:
                watching.cancel()

    def _serves(self, child: _Child, up: Up) -> None:
        _log.info("%s serves (pid %s)", child.name, child.running.pid if child.running else None)
        if child.up is not None and not child.up.done():
            child.up.set_result(up)
        self._tell_keeper()

    async def _watch(self, child: _Child, beat: Heartbeat) -> None:
        """Kill a process that hangs; ``_keep_alive`` sees that it died. Those that are ending have limits of their own."""
        while not self._stopping.is_set():
            number = beat.tick(time.monotonic())
            if beat.is_hung:
                child.hangs += 1
                _log.error("%s has not answered for %.1f s and is killed", child.name, beat.silent_s)
                _signal(child, signal.SIGKILL)
                return
            if number is not None and child.channel is not None:
                child.channel.write(frame(Ping(number)))
            await asyncio.sleep(beat.period_s)

    def _tell_keeper(self) -> None:
        if self._keeper.channel is not None:
            states = States([child.state for child in (self._keeper, *self._serving)])
            self._keeper.channel.write(frame(states))

    async def _stop(self) -> None:
        """Those that serve first: what they observed last is for the keeper to keep."""
        self._stopping.set()
        epp = self._config.epp
        drain_s = epp.drain_delay_s + epp.drain_timeout_s if self._service is Service.PICKER else 0.0
        await self._end(self._serving, drain_s + _MOST_REQUEST_S + _GRACE_S)
        await self._end([self._keeper], _GRACE_S)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end(self, children: Sequence[_Child], limit_s: float) -> None:
        for child in children:
            _signal(child, signal.SIGTERM)
        tasks = [task for task in self._tasks if task.get_name() in {child.name for child in children}]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=limit_s)
        for child in children if late else ():
            if child.running is not None:
                _log.error("%s did not end and is killed", child.name)
                _signal(child, signal.SIGKILL)
        if late:
            await asyncio.wait(late)


def _signal(child: _Child, number: signal.Signals) -> None:
    if child.running is not None and child.running.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.running.send_signal(number)


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
