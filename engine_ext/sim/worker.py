# SPDX-License-Identifier: Apache-2.0
"""One simulated worker without its HTTP side: the engine in real time, its event sockets, its peer port.

The engine's clock is the event loop's. ``advance`` is called when the engine says it has something to do; on a
loaded machine it catches up, because steps follow each other in the engine's own time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine_ext.sim.config import SimConfig
from engine_ext.sim.core import SimEngine
from engine_ext.sim.events import BatchEncoder, EventEncoding, HashKind, KvEvent
from engine_ext.sim.faults import FaultOrder, Faults
from engine_ext.sim.output import PeerLookup, SimUsage, StepOutput
from engine_ext.sim.p2p import Answers, LookupQuestion, LookupReply, PeerServer, ask_peer
from engine_ext.sim.profile import SimProfile
from engine_ext.sim.publisher import EventPublisher
from engine_ext.sim.request import SimRequest
from engine_ext.sim.rubbish import rubbish_payloads


@dataclass(frozen=True, slots=True)
class Update:
    """Something a request's handler hears of: a token, its end, or that the worker is gone."""

    token_id: int | None
    usage: SimUsage | None = None
    finish_reason: str | None = None
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sockets:
    """Addresses to bind; port 0 takes any, None leaves the socket out."""

    host: str = "127.0.0.1"
    events: str | None = None
    replay: str | None = None
    p2p_port: int | None = None
    topic: str = ""


class SimWorker:
    """Owns one engine and everything around it but HTTP."""

    def __init__(
        self,
        config: SimConfig,
        profile: SimProfile,
        sockets: Sockets,
        encoding: EventEncoding,
        hash_kind: HashKind,
    ) -> None:
        self._config = config
        self._profile = profile
        self._sockets = sockets
        self._encoding = encoding
        self._hash_kind = hash_kind
        self._updates: dict[str, asyncio.Queue[Update]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._lookups: set[asyncio.Task[None]] = set()
        self._questions: dict[object, Answers] = {}
        """Of peers, not fully answered."""
        self.faults = Faults()
        self.engine = SimEngine(config, profile)
        self.publisher = self._new_publisher(sockets.events, sockets.replay)
        self.peers = PeerServer(self._answer_peer)
        self.pulls_served = 0
        self.started_at_s = time.time()
        self.incarnation = 0

    @property
    def open_questions(self) -> int:
        """Peers' questions that wait for blocks."""
        return len(self._questions)

    @property
    def encoder(self) -> BatchEncoder:
        """The dialect of this worker's events."""
        return BatchEncoder(self._encoding, self._hash_kind)

    async def open(self) -> None:
        """Bind the sockets and start the engine."""
        if self._sockets.p2p_port is not None:
            await self.peers.open(self._sockets.host, self._sockets.p2p_port)
            address = (self._sockets.host, self.peers.port or 0)
            self._config = replace(self._config, p2p_address=address)
        self._new_engine()
        await self.publisher.open()

    async def close(self) -> None:
        """Stop the engine, end its requests, close the sockets."""
        self.end_requests()
        await asyncio.gather(*self._lookups, return_exceptions=True)
        await self.peers.close()
        await self.publisher.close()

    # Requests

    def submit(self, request: SimRequest) -> asyncio.Queue[Update]:
        """Run a request; its updates arrive in the queue. Raises what ``SimEngine.submit`` raises."""
        self.engine.submit(request, self._now_s())
        updates: asyncio.Queue[Update] = asyncio.Queue()
        self._updates[request.request_id] = updates
        self._arm()
        return updates

    def abort(self, request_id: str) -> None:
        """Nobody listens to this request any more."""
        if self._updates.pop(request_id, None) is not None:
            self.engine.abort(request_id, self._now_s())
            self._arm()

    def reset_prefix_cache(self, *, reset_external: bool) -> bool:
        """``/reset_prefix_cache``."""
        done = self.engine.reset_prefix_cache(self._now_s(), reset_external=reset_external)
        self._arm()
        return done

    def sleep(self) -> bool:
        """``/sleep``."""
        return self.engine.sleep(self._now_s())

    def wake_up(self) -> None:
        """``/wake_up``."""
        self.engine.wake_up(self._now_s())
        self._arm()

    def event_sources(self) -> dict[str, dict[str, object]]:
        """``/kv_event_sources``: the resolved publisher configuration of rank 0."""
        publisher = self.publisher
        if publisher.events_port is None:
            return {}
        replay = None if publisher.replay_port is None else f"tcp://*:{publisher.replay_port}"
        source: dict[str, object] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{publisher.events_port}",
            "replay_endpoint": replay,
            "buffer_steps": publisher.buffer_steps,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": self._sockets.topic,
        }
        return {"0": source}

    def end_requests(self) -> None:
        """Stand still and tell every request's handler that the worker is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._lookups:
            task.cancel()
        for queue in self._updates.values():
            queue.put_nowait(Update(None, gone=True))
        self._updates.clear()
        for answers in self._questions.values():
            answers.put_nowait(None)
        self._questions.clear()

    # Faults

    async def order(self, order: FaultOrder) -> None:
        """Switch faults."""
        self.faults = order.applied_to(self.faults)
        if order.restart:
            await self._restart()
        payloads = rubbish_payloads(self._hash_kind, time.time())
        for index in range(self.faults.rubbish):
            self.publisher.publish_payload(payloads[index % len(payloads)])
        self.faults.rubbish = 0
        self._arm()

    async def _restart(self) -> None:
        """Everything a killed process loses is lost; addresses stay."""
        self.end_requests()
        await self.publisher.close()
        replay = (
            None if self._sockets.replay is None else _same(self._sockets.replay, self.publisher.replay_port)
        )
        events = (
            None if self._sockets.events is None else _same(self._sockets.events, self.publisher.events_port)
        )
        self.publisher = self._new_publisher(events, replay)
        await self.publisher.open()
        self._new_engine()
        self.pulls_served = 0
        self.started_at_s = time.time()
        self.incarnation += 1

    # The engine in real time

    def _new_engine(self) -> None:
        self.engine = SimEngine(self._config, self._profile)
        size = self._config.block_size_tokens
        self.peers.space = self.engine.root + size.to_bytes(4, "big")

    def _new_publisher(self, events: str | None, replay: str | None) -> EventPublisher:
        return EventPublisher(self.encoder, events, replay, self._sockets.topic)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _arm(self) -> None:
        """Wake up when the engine next has something to do."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self.engine.next_event_s()
        if due_s is not None and not (self.faults.stall or self.faults.hang):
            self._timer = asyncio.get_running_loop().call_at(due_s, self._tick)

    def _tick(self) -> None:
        self._deliver(self.engine.advance(self._now_s()))
        self._arm()

    def _deliver(self, out: StepOutput) -> None:
        ends = {finished.request_id: finished for finished in out.finished}
        for token in out.tokens:
            queue = self._updates.get(token.request_id)
            if queue is None:
                continue
            if token.finished:
                end = ends[token.request_id]
                queue.put_nowait(Update(token.token_id, end.usage, end.reason))
                del self._updates[token.request_id]
            else:
                queue.put_nowait(Update(token.token_id))
        for reply in out.replies:
            answers = self._questions.get(reply.ticket)
            if answers is not None:
                answers.put_nowait(reply.answer)
                if reply.answer.is_last:
                    self.pulls_served += any(reply.answer.hits)
                    del self._questions[reply.ticket]
        for batch in out.kv_batches:
            self._publish(batch)
        for lookup in out.lookups:
            task = asyncio.create_task(self._look_up(self.engine, lookup))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)

    def _publish(self, batch: Sequence[KvEvent]) -> None:
        faults = self.faults
        if faults.silence:
            return
        if faults.drop_batches > 0:
            faults.drop_batches -= 1
            self.publisher.publish(batch, send=False, keep=not faults.lose_replay)
        else:
            self.publisher.publish(batch)

    async def _look_up(self, engine: SimEngine, lookup: PeerLookup) -> None:
        def heard(reply: LookupReply) -> None:
            if engine is self.engine:
                engine.answer_lookup(
                    lookup.request_id, reply.hits, self._now_s(), wait_s=reply.wait_s, source=lookup.source
                )
                self._arm()

        question = LookupQuestion(
            lookup.kv_request_id, self.peers.space, list(lookup.block_hashes), lookup.waits
        )
        await ask_peer(lookup.host, lookup.port, question, self._profile.peer_timeout_s, heard)

    def _answer_peer(self, question: LookupQuestion) -> Answers:
        answers: Answers = asyncio.Queue()
        if self.faults.stall:
            return answers  # the asker gives up in time
        ticket = object()
        prefill = question.kv_request_id if question.waits else None
        answer = self.engine.serve_lookup(
            question.block_hashes, self._now_s(), ticket=ticket, prefill=prefill
        )
        answers.put_nowait(answer)
        if answer.is_last:
            self.pulls_served += any(answer.hits)
        else:
            self._questions[ticket] = answers
        self._arm()
        return answers


def _same(endpoint: str, port: int | None) -> str:
    return f"{endpoint.rsplit(':', 1)[0]}:{port}"
