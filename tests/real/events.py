# SPDX-License-Identifier: Apache-2.0
"""Reads a worker's KV events as they come off the wire, with nothing of the product in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

END_OF_REPLAY = -1


@dataclass(frozen=True, slots=True)
class Message:
    """One published batch: the three frames, and the payload decoded without a schema."""

    topic: str
    seq: int
    payload: bytes

    @property
    def events(self) -> list[dict[str, Any]]:
        decoded = msgspec.msgpack.decode(self.payload)
        return list(decoded[1])


def replay(endpoint: str, start: int = 0, timeout_s: float = 10) -> list[Message]:
    """What the worker's replay socket returns from sequence `start` on, without the end marker."""
    messages: list[Message] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = int(timeout_s * 1000)
        dealer.connect(endpoint)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            _, topic, seq, payload = dealer.recv_multipart()
            number = int.from_bytes(seq, "big", signed=True)
            if number == END_OF_REPLAY:
                return messages
            messages.append(Message(topic.decode(), number, payload))


def next_seq(endpoint: str, timeout_s: float = 10) -> int:
    """The sequence number that the next batch will carry."""
    messages = replay(endpoint, timeout_s=timeout_s)
    return messages[-1].seq + 1 if messages else 0


def events_since(endpoint: str, start: int) -> Iterator[dict[str, Any]]:
    """Every event of the batches from `start` on, in order."""
    for message in replay(endpoint, start):
        yield from message.events


def stored(events: list[dict[str, Any]], medium: str) -> list[dict[str, Any]]:
    return [e for e in events if e["type"] == "BlockStored" and e.get("medium") == medium]


def removed(events: list[dict[str, Any]], medium: str) -> list[dict[str, Any]]:
    return [e for e in events if e["type"] == "BlockRemoved" and e.get("medium") == medium]


def wait_for_events(
    endpoint: str, start: int, enough: Callable[[list[dict[str, Any]]], bool], timeout_s: float = 60
) -> list[dict[str, Any]]:
    """The events from `start` on, as soon as `enough` says they are all there. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        events = list(events_since(endpoint, start))
        if enough(events):
            return events
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout_s:g} s there were only {events!r}")
        time.sleep(0.02)
