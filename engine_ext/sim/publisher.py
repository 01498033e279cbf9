# SPDX-License-Identifier: Apache-2.0
"""The engine's event socket and its replay socket, as ``ZmqEventPublisher`` of vLLM 0.32 serves them.

    PUB     [topic, seq (8 bytes, big-endian, from 0), payload]
    ROUTER  asked ["", start (8 bytes)], answers ["", topic, seq, payload] per kept batch from there on,
            then ["", "", -1 (8 bytes), ""]

The buffer keeps the last ``buffer_steps`` batches. Unlike vLLM's, the ROUTER has no high-water mark, so a long
replay is never cut short in silence.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import zmq
import zmq.asyncio

from engine_ext.sim.events import BatchEncoder, KvEvent

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_REBIND_S = 5.0


class EventPublisher:
    """Sockets, sequence numbers and replay buffer of one engine process."""

    def __init__(
        self,
        encoder: BatchEncoder,
        events: str | None,
        replay: str | None,
        topic: str = "",
        buffer_steps: int = 10_000,
    ) -> None:
        """``events`` and ``replay`` are endpoints to bind, port 0 for any; None for no socket."""
        self._encoder = encoder
        self._topic = topic.encode()
        self.buffer_steps = buffer_steps
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._context: zmq.asyncio.Context | None = None
        self._next_seq = 0
        self.published = 0
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.events_port: int | None = None
        self.replay_port: int | None = None
        self._endpoints = (events, replay)

    async def open(self) -> None:
        """Bind both sockets; a port that the last process has just left is tried again for a while."""
        events, replay = self._endpoints
        self._context = context = zmq.asyncio.Context()
        if events is not None:
            self._pub = zmq.Socket(context, zmq.PUB)
            self._pub.set_hwm(100_000)
            self.events_port = await _bind(self._pub, events)
        if replay is not None:
            self._router = context.socket(zmq.ROUTER)
            self._router.set_hwm(0)
            self.replay_port = await _bind(self._router, replay)
            self._task = asyncio.create_task(self._serve_replay(self._router))

    @property
    def next_seq(self) -> int:
        """Sequence number of the next batch."""
        return self._next_seq

    def publish(self, events: Sequence[KvEvent], *, send: bool = True, keep: bool = True) -> None:
        """One batch takes the next number; it may be held back from the socket or from the buffer."""
        self.publish_payload(self._encoder.encode(time.time(), events), send=send, keep=keep)

    def publish_payload(self, payload: bytes, *, send: bool = True, keep: bool = True) -> None:
        """The same with a payload that is encoded already, well or badly."""
        seq = self._next_seq
        self._next_seq += 1
        if keep:
            self._buffer.append((seq, payload))
        if send and self._pub is not None:
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            self.published += 1

    async def close(self) -> None:
        """Close both sockets; nothing is delivered afterwards."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)
        if self._context is not None:
            self._context.term()

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3:
                continue  # as vLLM, which logs it
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for seq, payload in list(self._buffer):
                if seq >= first:
                    await router.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
            await router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


async def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str) -> int:
    deadline = time.monotonic() + _REBIND_S
    while True:
        try:
            socket.bind(endpoint)
            break
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.01)
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
