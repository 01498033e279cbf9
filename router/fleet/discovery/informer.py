# SPDX-License-Identifier: Apache-2.0
"""Keeps the objects of one resource as the API server has them: list, then watch, for good.

    list all pages ──▶ watch from the list's version ──ended in order──▶ watch from the last version seen
        ▲                          │
        └── 410 Gone, at once ─────┤
        └── broken, refused ───────┘ after a pause that doubles

Only a watch that the server ended in order is taken up where it stopped. After anything else the list is read again
and what it lacks is gone: a DELETED that nobody saw cannot leave a ghost. What was known stays until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random
from typing import Generic, Protocol

import aiohttp

from router.fleet.discovery.store import ObjectStore, ObjectT
from router.fleet.discovery.watching import GONE, ApiError, Event, Lines, What, Wire

_log = logging.getLogger(__name__)

_PAGE = 500
_LATE_S = 10.0
"""How long a watch may outlive the time it was asked for."""
_ABSENT = 404


class ListWatch(Protocol):
    """What is asked of an API server."""

    async def read(self, path: str, query: Mapping[str, str]) -> bytes:
        """The body of a 200 answer.

        Raises:
            ApiError: another answer.
            OSError, aiohttp.ClientError, TimeoutError: no answer.
        """
        ...

    def watch(
        self, path: str, query: Mapping[str, str], limit_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The chunks of an answer as they come; raises as ``read`` does, and when it lasts longer than ``limit_s``."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take and how long to wait."""

    watch_s: float = 60.0
    pause_min_s: float = 0.2
    pause_max_s: float = 15.0


@dataclass(slots=True)
class InformerState:
    """For metrics and messages."""

    synced: bool = False
    """A list was read, at least once."""
    trouble: str | None = None
    """Why what is known may be old; None while a watch runs."""
    lists: int = 0
    failures: int = 0
    absent: bool = False
    """The server does not know the resource."""
    malformed: int = 0
    """Objects of the last list that could not be read."""


class Informer(Generic[ObjectT]):
    """One resource under one path; ``run`` until cancelled."""

    def __init__(
        self,
        api: ListWatch,
        path: str,
        wire: Wire[ObjectT],
        on_change: Callable[[], None],
        selector: Mapping[str, str] | None = None,
        pace: Pace | None = None,
        random: Random | None = None,
    ) -> None:
        """``on_change`` is called after a list and after each event that changed something, on the event loop."""
        self.objects: ObjectStore[ObjectT] = ObjectStore()
        self.state = InformerState()
        self.answered = asyncio.Event()
        """A list was read, or there is no such resource."""
        self._api = api
        self._path = path
        self._wire = wire
        self._on_change = on_change
        self._labels = ",".join(f"{key}={value}" for key, value in sorted((selector or {}).items()))
        self._pace = pace or Pace()
        self._random = random or Random()
        self._pause_s = self._pace.pause_min_s
        self._followed = True
        """A watch was taken up since the version was last gone."""

    async def run(self) -> None:
        """List and watch; returns never."""
        while True:
            try:
                version = await self._list()
                while True:
                    version = await self._watch(version)
            except ApiError as error:
                if error.status == GONE and self._followed:
                    self._followed = False
                    _log.info("%s: the version is gone, listed again", self._path)
                    continue
                await self._wait(str(error), error.status)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                await self._wait(f"{type(error).__name__}: {error}", 0)

    async def _wait(self, why: str, status: int) -> None:
        state = self.state
        state.failures += 1
        state.trouble = f"{self._path}: {why}"
        if status != _ABSENT or not state.absent:
            _log.warning("%s", state.trouble)
        state.absent = status == _ABSENT
        if state.absent:
            self.answered.set()  # there are none, which is an answer to whoever waits for a first list
        await self._pause()

    async def _pause(self) -> None:
        """Doubles until a watch brings something; replicas that lost the same server do not come back all at once."""
        await asyncio.sleep(self._pause_s * self._random.uniform(0.5, 1.0))
        self._pause_s = min(self._pause_s * 2, self._pace.pause_max_s)

    async def _list(self) -> str:
        items: list[ObjectT] = []
        malformed, more = 0, ""
        while True:
            query = {"limit": str(_PAGE), **self._selected()}
            if more:
                query["continue"] = more
            page = self._wire.page(await self._api.read(self._path, query))
            items += page.items
            malformed += page.malformed
            more = page.more
            if not more:
                break
        self.objects.replace_all(items)
        state = self.state
        state.lists += 1
        state.synced, state.trouble, state.absent, state.malformed = True, None, False, malformed
        self.answered.set()
        self._on_change()
        return page.version

    async def _watch(self, version: str) -> str:
        """Follow one watch until the server ends it; the version to go on from."""
        limit_s = self._pace.watch_s
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(limit_s))),
            **self._selected(),
        }
        lines, quiet = Lines(), True
        async with self._api.watch(self._path, query, limit_s + _LATE_S) as chunks:
            async for chunk in chunks:
                for line in lines.feed(chunk):
                    event = self._wire.event(line)
                    version = event.version or version
                    self._apply(event)
                    quiet = False
                    self._followed = True
                    self._pause_s = self._pace.pause_min_s
        if quiet:
            await self._pause()  # a server that ends every watch at once is not asked in a tight circle
        return version

    def _apply(self, event: Event[ObjectT]) -> None:
        if event.one is None:
            return
        store = self.objects
        if store.delete(event.one) if event.what is What.DELETED else store.put(event.one):
            self._on_change()

    def _selected(self) -> dict[str, str]:
        return {"labelSelector": self._labels} if self._labels else {}
