# SPDX-License-Identifier: Apache-2.0
"""Messages of a KV event stream, read from ZMQ sockets frame by frame (``vllm/distributed/kv_events.py``).

``recv_multipart`` asks the socket after each frame whether there are more, which takes longer than to receive the
frame. A message here has a known number of frames, so only its last is received as an object that knows.
"""

from __future__ import annotations

from typing import Final

import zmq

from indexer.errors import ReplayError

Message = tuple[int, bytes]
"""Sequence number and payload."""

END_OF_REPLAY: Final[Message] = (-1, b"")
_END_SEQUENCE = b"\xff" * 8


def receive_live(socket: zmq.Socket[bytes]) -> Message | None:
    """``[topic, seq, payload]`` if one has arrived, None if not.

    Raises:
        ReplayError: the message is something else. Where it had fewer frames, the next one is lost too.
    """
    try:
        socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return _rest(socket)


def receive_replayed(socket: zmq.Socket[bytes]) -> Message | None:
    """``["", topic, seq, payload]`` or, before vLLM 0.26, ``["", seq, payload]`` if one has arrived, None if not.

    Returns:
        ``END_OF_REPLAY`` where the sequence number is the end marker.

    Raises:
        ReplayError: the message is something else.
    """
    try:
        frames = socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    if len(frames) not in (3, 4) or frames[0] != b"" or len(frames[-2]) != 8:
        raise ReplayError(f"{len(frames)} frames from the replay endpoint")
    if frames[-2] == _END_SEQUENCE:
        return END_OF_REPLAY
    return int.from_bytes(frames[-2], "big"), frames[-1]


def _rest(socket: zmq.Socket[bytes]) -> Message:
    """Sequence and payload. All frames of a message arrive together, so what is not there will not come."""
    try:
        seq = socket.recv(zmq.NOBLOCK)
        last = socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        raise ReplayError("a message with fewer frames than topic, sequence and payload") from None
    if len(seq) == 8 and not last.more:
        return int.from_bytes(seq, "big"), last.bytes
    while last.more:
        last = socket.recv(zmq.NOBLOCK, copy=False)
    raise ReplayError("frames that are not topic, sequence and payload")
