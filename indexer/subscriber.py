# SPDX-License-Identifier: Apache-2.0
"""The ZMQ edge of the indexer: one thread that feeds every stream and carries out what it asks for.

A SUB socket per (worker, rank) with a monitor, a DEALER socket per running replay, and an inbox for commands
from other threads. Protocol: ``vllm/distributed/kv_events.py``; replay frames before vLLM 0.26 lack the topic.

Ordering rule: monitor events of a socket are read after its messages were taken and before they are used. If
the connection broke in between, those messages may belong to either process, so they are thrown away where a
replay will bring them again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from indexer.errors import ReplayError
from indexer.frames import END_OF_REPLAY, receive_live, receive_replayed
from indexer.identity import WorkerId, WorkerRank
from indexer.stream import (
    Action,
    Apply,
    ClearSuspect,
    EventStream,
    MarkPartial,
    MarkSuspect,
    NewIncarnation,
    RequestReplay,
    StreamPosition,
    StreamState,
)

log = logging.getLogger(__name__)

_POLL_MS = 100
_MESSAGES_PER_TURN = 256  # per socket, so that one busy worker does not starve the others
# Per socket. What is not taken in yet waits at the engine, which keeps 100,000 messages: here it would take several KB a
# message of every worker, and the heap would not give that back.
_RECEIVE_HIGH_WATER_MARK = 128


class EventSink(Protocol):
    """What the subscriber tells; called on its thread only."""

    def apply_many(self, rank: WorkerRank, last_seq: int, payloads: Sequence[bytes]) -> None:
        """Consecutive batches, of which the last has this sequence number."""

    def new_incarnation(self, worker: WorkerId, reason: str) -> None: ...
    def partial(self, rank: WorkerRank, reason: str) -> None: ...
    def suspect(self, rank: WorkerRank, reason: str | None) -> None:
        """``reason`` None: the suspicion is over."""

    def connection(self, rank: WorkerRank, connected: bool) -> None: ...
    def tick(self) -> None:
        """Some time has passed, with or without events."""


@dataclass(frozen=True, slots=True)
class RankEndpoints:
    """Where one rank publishes, and where it replays from (None: nowhere)."""

    rank: WorkerRank
    events: str
    replay: str | None
    resume: StreamPosition | None = None
    """Where the map that is there already ends."""


@dataclass(slots=True)
class _Channel:
    endpoints: RankEndpoints
    stream: EventStream
    subscription: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None = None
    failed: bool = False
    """Events of it could not be applied at least once."""


class EventSubscriber:
    """Subscribes to workers as they come and go. ``start`` and ``stop`` once each."""

    def __init__(self, sink: EventSink, clock: Callable[[], float], replay_timeout_s: float = 5.0) -> None:
        self._sink = sink
        self._clock = clock
        self._replay_timeout_s = replay_timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._inbox: zmq.Socket[bytes]
        self._outbox: zmq.Socket[bytes]
        self._poller = zmq.Poller()
        self._channels: dict[WorkerRank, _Channel] = {}
        self._by_socket: dict[zmq.Socket[bytes], _Channel] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox_lock = threading.Lock()
        self._next_tick_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        """Open the sockets: nothing needs closing before, so an owner that fails to be built leaves nothing behind."""
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PAIR)
        self._outbox = self._context.socket(zmq.PAIR)
        self._inbox.bind("inproc://commands")
        self._outbox.connect("inproc://commands")
        self._poller.register(self._inbox, zmq.POLLIN)
        self._thread.start()

    def stop(self) -> None:
        """Close every socket and end the thread; nothing to do where ``start`` was not called."""
        if self._thread.ident is None:
            return
        if self._thread.is_alive():
            self._send(None)
            self._thread.join()
        self._outbox.close(0)
        self._inbox.close(0)
        self._context.term()

    def add(self, endpoints: Sequence[RankEndpoints]) -> None:
        """Subscribe to the ranks of a worker."""

        def open_all() -> None:
            for one in endpoints:
                try:
                    self._open(one)
                except zmq.ZMQError as error:
                    log.error("cannot subscribe to %s: %s", one.events, error)
                    self._sink.partial(one.rank, f"cannot subscribe to {one.events}: {error}")

        self._send(open_all)

    def remove(self, worker: WorkerId) -> None:
        """Unsubscribe from all ranks of a worker."""

        def close_all() -> None:
            for channel in self._of(worker):
                self._close(channel)

        self._send(close_all)

    def process_started(self, worker: WorkerId, start_time_s: float) -> None:
        """Pass on ``process_start_time_seconds`` of a worker."""

        def tell() -> None:
            for channel in self._of(worker):
                self._carry_out(channel, channel.stream.process_started(start_time_s, self._clock()))

        self._send(tell)

    def restarted(self, worker: WorkerId, reason: str) -> None:
        """Whoever runs the worker says that its process is another one."""

        def tell() -> None:
            for channel in self._of(worker)[:1]:  # the others hear of it as its siblings
                self._carry_out(channel, channel.stream.restarted(reason, self._clock()))

        self._send(tell)

    def between_batches(self, command: Callable[[], None]) -> None:
        """Run this on the thread while no batch is being applied; it must be short."""
        self._send(command)

    def channels(self, worker: WorkerId) -> list[tuple[RankEndpoints, EventStream]]:
        """The streams of a worker with their addresses, by rank; to be used on the thread."""
        found = [(channel.endpoints, channel.stream) for channel in self._of(worker)]
        return sorted(found, key=lambda one: one[0].rank.dp_rank)

    def streams(self) -> dict[WorkerRank, EventStream]:
        """The streams, to read their counters and states; they belong to the thread."""
        return {rank: channel.stream for rank, channel in list(self._channels.items())}

    def _send(self, command: Callable[[], None] | None) -> None:
        self._commands.put(command)
        with self._outbox_lock:
            self._outbox.send(b"")

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for channel in list(self._channels.values()):
                self._close(channel)

    def _turn(self) -> bool:
        for socket, _ in self._poller.poll(_POLL_MS):
            if socket is self._inbox:
                self._inbox.recv()
                command = self._commands.get()
                if command is None:
                    return False
                command()
                continue
            channel = self._by_socket.get(socket)
            if channel is None:
                continue  # closed by an earlier event of this turn
            if socket is channel.replay:
                self._read_replay(channel)
            else:
                self._read_subscription(channel)
        now_s = self._clock()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + _POLL_MS / 1000
            for channel in list(self._channels.values()):
                self._carry_out(channel, channel.stream.tick(now_s))
            self._sink.tick()
        return True

    def _read_subscription(self, channel: _Channel) -> None:
        messages: list[tuple[int, bytes]] = []
        for _ in range(_MESSAGES_PER_TURN):
            try:
                message = receive_live(channel.subscription)
            except ReplayError as error:
                self._sink.partial(channel.endpoints.rank, str(error))
                continue
            if message is None:
                break
            messages.append(message)
        if self._read_monitor(channel) and channel.endpoints.replay is not None:
            return
        now_s = self._clock()
        taken = self._take(channel, messages, now_s)
        for seq, payload in messages[taken:]:
            self._carry_out(channel, channel.stream.live(seq, payload, now_s))

    def _take(
        self,
        channel: _Channel,
        messages: Sequence[tuple[int, bytes]],
        now_s: float,
        *,
        replayed: bool = False,
    ) -> int:
        """Apply those of the first messages that just come next, all at once; returns how many."""
        taken = channel.stream.take(messages, now_s, replayed=replayed)
        if taken:
            payloads = [payload for _, payload in messages[:taken]]
            self._apply(channel, messages[taken - 1][0], payloads)
        return taken

    def _apply(self, channel: _Channel, last_seq: int, payloads: Sequence[bytes]) -> None:
        """What cannot be applied leaves a gap that is told; the other ranks are followed on."""
        rank = channel.endpoints.rank
        try:
            self._sink.apply_many(rank, last_seq, payloads)
        except Exception as error:
            if not channel.failed:  # not once per event
                log.exception("events of %s could not be applied", rank)
            channel.failed = True
            self._sink.partial(rank, f"events could not be applied: {error}")

    def _read_monitor(self, channel: _Channel) -> bool:
        """Tell the stream of connections made and broken; True when one broke."""
        broke = False
        while int(channel.monitor.get(zmq.EVENTS)) & zmq.POLLIN:  # ``poll`` takes three times as long
            event = recv_monitor_message(channel.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._sink.connection(channel.endpoints.rank, connected=True)
                self._carry_out(channel, channel.stream.connected(self._clock()))
            elif event == zmq.EVENT_DISCONNECTED:
                broke = True
                self._sink.connection(channel.endpoints.rank, connected=False)
                self._close_replay(channel)
                self._carry_out(channel, channel.stream.disconnected())
        return broke

    def _read_replay(self, channel: _Channel) -> None:
        """Messages up to the end of the replay, or to where a new one was asked for."""
        socket = channel.replay
        messages: list[tuple[int, bytes]] = []
        ended, failure = False, None
        while socket is not None and len(messages) < _MESSAGES_PER_TURN:
            try:
                message = receive_replayed(socket)
            except ReplayError as error:
                failure = str(error)
                break
            if message is None:
                break
            if message is END_OF_REPLAY:
                ended = True
                break
            messages.append(message)
        now_s = self._clock()
        at = 0
        while at < len(messages) and channel.replay is socket:
            taken = self._take(channel, messages[at:], now_s, replayed=True)
            if not taken:
                self._carry_out(channel, channel.stream.replayed(*messages[at], now_s))
            at += taken or 1
        if channel.replay is not socket:
            return  # what is left belongs to a replay that is void
        if failure is not None:
            self._close_replay(channel)
            self._carry_out(channel, channel.stream.replay_failed(failure, now_s))
        elif ended:
            self._close_replay(channel)
            self._carry_out(channel, channel.stream.replay_ended(now_s))

    def _carry_out(self, channel: _Channel, actions: Sequence[Action]) -> None:
        rank = channel.endpoints.rank
        for action in actions:
            match action:
                case Apply(seq, payload):
                    self._apply(channel, seq, [payload])
                case RequestReplay(start_seq):
                    self._open_replay(channel, start_seq)
                case NewIncarnation(reason):
                    self._sink.new_incarnation(rank.worker, reason)
                    self._restart_siblings(channel)
                case MarkPartial(reason):
                    self._sink.partial(rank, reason)
                case MarkSuspect(reason):
                    self._sink.suspect(rank, reason)
                case ClearSuspect():
                    self._sink.suspect(rank, None)
        if channel.stream.state is not StreamState.REPLAYING:
            self._close_replay(channel)

    def _restart_siblings(self, channel: _Channel) -> None:
        for sibling in self._of(channel.endpoints.rank.worker):
            if sibling is not channel:
                self._carry_out(sibling, sibling.stream.sibling_restarted(self._clock()))

    def _of(self, worker: WorkerId) -> list[_Channel]:
        return [channel for rank, channel in self._channels.items() if rank.worker == worker]

    def _open(self, endpoints: RankEndpoints) -> None:
        subscription = self._context.socket(zmq.SUB)
        subscription.set(zmq.LINGER, 0)
        subscription.set(zmq.RCVHWM, _RECEIVE_HIGH_WATER_MARK)
        subscription.set(zmq.RECONNECT_IVL, 100)
        subscription.set(zmq.RECONNECT_IVL_MAX, 2000)
        # A host that vanished without closing its side is found by missing heartbeats.
        subscription.set(zmq.HEARTBEAT_IVL, 5000)
        subscription.set(zmq.HEARTBEAT_TIMEOUT, 15000)
        subscription.subscribe(b"")
        monitor = subscription.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        stream = EventStream(
            has_replay=endpoints.replay is not None,
            replay_timeout_s=self._replay_timeout_s,
            resume=endpoints.resume,
        )
        channel = _Channel(endpoints, stream, subscription, monitor)
        self._channels[endpoints.rank] = channel
        for socket in (subscription, monitor):
            self._by_socket[socket] = channel
            self._poller.register(socket, zmq.POLLIN)
        try:
            subscription.connect(endpoints.events)
        except zmq.ZMQError:
            self._close(channel)
            raise

    def _close(self, channel: _Channel) -> None:
        self._close_replay(channel)
        channel.subscription.disable_monitor()
        for socket in (channel.monitor, channel.subscription):
            self._forget(socket)
        del self._channels[channel.endpoints.rank]

    def _open_replay(self, channel: _Channel, start_seq: int) -> None:
        self._close_replay(channel)
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        # The whole history may come at once; a high-water mark would make the engine drop parts of it.
        socket.set(zmq.RCVHWM, 0)
        socket.connect(channel.endpoints.replay or "")
        socket.send_multipart([b"", start_seq.to_bytes(8, "big")])
        channel.replay = socket
        self._by_socket[socket] = channel
        self._poller.register(socket, zmq.POLLIN)

    def _close_replay(self, channel: _Channel) -> None:
        if channel.replay is not None:
            self._forget(channel.replay)
            channel.replay = None

    def _forget(self, socket: zmq.Socket[bytes]) -> None:
        self._by_socket.pop(socket, None)
        self._poller.unregister(socket)
        socket.close(0)
