# SPDX-License-Identifier: Apache-2.0
"""A scripted engine: real PUB and ROUTER sockets, whose every message is what a test says."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import zmq

END = b"\xff" * 8

Frames = list[bytes]
Script = Callable[[int, "ScriptedEngine"], Iterable[Frames]]
"""From the start that was asked for to what is answered (without the client's identity)."""


def reply(seq: int, payload: bytes, *, topic: bytes | None = b"") -> Frames:
    """One replayed batch; ``topic`` None leaves the frame out, as vLLM before 0.26."""
    head = [b""] if topic is None else [b"", topic]
    return [*head, seq.to_bytes(8, "big"), payload]


def end() -> Frames:
    return [b"", b"", END, b""]


def honest(start: int, engine: ScriptedEngine) -> Iterable[Frames]:
    """Everything that is kept from ``start`` on, then the end."""
    for seq, payload in sorted(engine.kept.items()):
        if seq >= start:
            yield reply(seq, payload)
    yield end()


class ScriptedEngine:
    """One process of one rank. ``events`` and ``replay`` rebind addresses of an earlier one."""

    def __init__(
        self,
        *,
        events: str = "tcp://127.0.0.1:*",
        replay: str | None = "tcp://127.0.0.1:*",
        script: Script = honest,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.set(zmq.XPUB_VERBOSER, 1)
        self._pub.set(zmq.SNDHWM, 0)
        self._pub.bind(events)
        self.events = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay: str | None = None
        self.kept: dict[int, bytes] = {}
        self.script = script
        self.asked: list[int] = []
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if replay is not None:
            router = self._context.socket(zmq.ROUTER)
            router.set(zmq.SNDHWM, 0)
            router.bind(replay)
            self.replay = router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._thread = threading.Thread(target=self._serve, args=(router,), daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def wait_for_subscriber(self, timeout_s: float = 30.0) -> None:
        """Returns once a subscription has arrived: what is sent from then on is delivered.

        Subscribers that left before it are skipped.
        """
        message = b"\0"
        while message == b"\0":
            assert self._pub.poll(int(timeout_s * 1000)), "nobody subscribed"
            message = self._pub.recv()
        assert message == b"\1"

    def batch(self, payload: bytes, *, send: bool = True, keep: bool = True) -> int:
        """The next batch in order; returns its number."""
        seq = next(self._numbers)
        if keep:
            self.kept[seq] = payload
        if send:
            self.send(seq, payload)
        return seq

    def send(self, seq: int, payload: bytes) -> None:
        """A live batch with any number."""
        self._pub.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    def send_frames(self, frames: Sequence[bytes]) -> None:
        """Anything at all."""
        self._pub.send_multipart(frames)

    def skip_to(self, seq: int) -> None:
        """The next batch gets this number."""
        self._numbers = itertools.count(seq)

    def close(self) -> None:
        """As if the process had been killed. Closing twice is fine."""
        if self._pub.closed:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._pub.close(0)
        self._context.term()

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        while not self._stop.is_set():
            if not router.poll(20):
                continue
            client, empty, start = router.recv_multipart()
            assert empty == b""
            self.asked.append(int.from_bytes(start, "big"))
            for frames in self.script(self.asked[-1], self):
                router.send_multipart([client, *frames])
        router.close(0)
