# SPDX-License-Identifier: Apache-2.0
"""The service: owns the index and its subscriber, and finds the call for a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from indexer.hashing import HashKey
from indexer.index import IndexLimits, open_index
from indexer.service.calls import Calls, Reply
from indexer.service.http import JSON, Answer, Request, refusal
from indexer.service.metrics import CONTENT_TYPE, ServiceMetrics
from indexer.service.quick import QuickQueries
from indexer.service.recovery import registrations_of_peers
from indexer.service.registry import Registry
from indexer.service.requests import RequestError
from indexer.service.sink import WideningHolders
from indexer.snapshot.making import SnapshotMaker
from indexer.snapshot.peers import CONTENT_TYPE as SNAPSHOT_TYPE
from indexer.snapshot.recovery import IndexRecovery, RecoveryPlan
from indexer.subscriber import EventSubscriber

log = logging.getLogger(__name__)

DEFAULT_SNAPSHOT_BYTES = 4 * 2**30

Call = Callable[[bytes], Reply | Awaitable[Reply]]


class IndexerApp:
    """Made without I/O; ``start`` and ``stop`` once each."""

    def __init__(
        self,
        key: HashKey,
        peers: Sequence[str] = (),
        limits: IndexLimits | None = None,
        *,
        snapshot: Path | None = None,
        snapshot_interval_s: float = 60.0,
        snapshot_max_bytes: int = DEFAULT_SNAPSHOT_BYTES,
        offload_grace_s: float = 0.0,
    ) -> None:
        """``snapshot``: the file that what is held is kept in; None for none.

        ``offload_grace_s``: see ``indexer.holders.WorkerHolders``, of all engines.
        """
        self.holders = WideningHolders(open_index(key, limits or IndexLimits()), time.monotonic)
        self.subscriber = EventSubscriber(self.holders, time.monotonic)
        maker = SnapshotMaker(self.holders, self.subscriber, key.id, time.time, snapshot_max_bytes)
        self.recovery = IndexRecovery(
            maker, RecoveryPlan(peers, path=snapshot, interval_s=snapshot_interval_s)
        )
        self.registry = Registry(self.holders, self.subscriber, self.recovery.recalled, offload_grace_s)
        self._peers = tuple(peers)
        self._metrics = ServiceMetrics(self.registry, self.holders, self.subscriber)
        self._quick = QuickQueries(self.registry, self.holders)
        calls = Calls(self.registry, self.holders, self.subscriber, key, self._peers)
        self._calls: Mapping[str, tuple[str, Call]] = {
            "/query": ("POST", calls.query),
            "/query_by_hash": ("POST", calls.query_by_hash),
            "/register": ("POST", calls.register),
            "/unregister": ("POST", calls.unregister),
            "/register_peer": ("POST", calls.register_peer),
            "/deregister_peer": ("POST", calls.deregister_peer),
            "/workers": ("GET", calls.workers),
            "/peers": ("GET", calls.peers),
            "/dump": ("GET", calls.dump),
        }

    async def start(self) -> None:
        """Recall what was held, and follow what the first peer that answers has registered.

        Raises:
            WriterLockedError: another process writes the snapshot's file.
        """
        self.recovery.claim()
        self.subscriber.start()
        await self.recovery.start()
        for request in await registrations_of_peers(self._peers):
            try:
                self.registry.register(request)
            except RequestError as error:
                log.warning("a peer's registration is not taken: %s", error)

    async def stop(self) -> None:
        """Keep what is held, and end all subscriptions."""
        await self.recovery.stop()
        self.subscriber.stop()

    def answer(self, request: Request) -> Answer | Awaitable[Answer]:
        """The answer to a request, at once where it can be."""
        started_s = time.perf_counter()
        known = self._calls.get(request.path)
        if known is None:
            return self._other(request)
        if request.method != known[0]:
            return self._done(request, started_s, refusal(405, f"{request.path} is asked with {known[0]}"))
        try:
            reply = known[1](request.body)
        except RequestError as error:
            return self._done(request, started_s, refusal(error.status, str(error)))
        if isinstance(reply, tuple):
            return self._done(request, started_s, Answer(reply[0], msgspec.json.encode(reply[1]), JSON))
        return self._later(request, started_s, reply)

    def gate(self, received: bytes) -> bytes | int | None:
        """The answer to a plain ``/query``, as ``indexer.service.http.Gate``."""
        started_s = time.perf_counter()
        shown = self._quick.request(received)
        if isinstance(shown, bytes):
            self._metrics.answered("/query", 200, time.perf_counter() - started_s)
        return shown

    async def _later(self, request: Request, started_s: float, reply: Awaitable[Reply]) -> Answer:
        status, value = await reply
        return self._done(request, started_s, Answer(status, msgspec.json.encode(value), JSON))

    def _done(self, request: Request, started_s: float, answer: Answer) -> Answer:
        self._metrics.answered(request.path, answer.status, time.perf_counter() - started_s)
        return answer

    async def _snapshot(self, request: Request, started_s: float) -> Answer:
        body = await asyncio.to_thread(lambda: b"".join(self.recovery.pieces()))
        return self._done(request, started_s, Answer(200, body, SNAPSHOT_TYPE.encode()))

    def _other(self, request: Request) -> Answer | Awaitable[Answer]:
        if request.path == "/snapshot" and request.method == "GET":
            return self._snapshot(request, time.perf_counter())
        if request.path not in ("/health", "/metrics", "/snapshot"):
            return refusal(404, f"there is no {request.path}")
        if request.method not in ("GET", "HEAD"):
            return refusal(405, f"{request.path} is asked with GET")
        if request.path == "/health":
            return Answer(200, b'{"status":"ok"}')
        return Answer(200, self._metrics.text(), CONTENT_TYPE)
