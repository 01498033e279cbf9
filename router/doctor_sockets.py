# SPDX-License-Identifier: Apache-2.0
"""Probes of a worker's ZMQ sockets: does its event publisher accept us, does its replay socket answer.

Protocol (``vllm/distributed/kv_events.py``): events are PUB messages ``[topic, seq, payload]``; replay
is a ROUTER that takes ``["", start]`` (8 bytes, big-endian) from a DEALER and streams ``["", topic, seq,
payload]`` until ``seq`` is -1. Before 0.26 the topic frame is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

_END = (-1).to_bytes(8, "big", signed=True)
_PAST_EVERYTHING = (2**63 - 1).to_bytes(8, "big")
"""A start no buffer has reached: the answer is the end marker alone."""


def with_port_offset(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: vLLM adds the rank to a TCP port."""
    if rank == 0 or not endpoint.startswith("tcp://"):
        return endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}"


async def events_connect(endpoint: str, timeout_s: float) -> tuple[bool, str]:
    """Whether a SUB socket completes its handshake, and whether a batch happened to arrive."""
    async with _socket(zmq.SUB) as socket:
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint)
            async with asyncio.timeout(timeout_s):
                await recv_monitor_message(monitor)
            batch = await socket.poll(100)
        except TimeoutError:
            return False, f"no publisher at {endpoint} within {timeout_s} s"
        except zmq.ZMQError as error:
            return False, f"{endpoint}: {error}"
        finally:
            socket.disable_monitor()
            monitor.close(0)
    return True, "connected, a batch arrived" if batch else "connected"


async def replay_answers(endpoint: str, timeout_s: float) -> tuple[bool, str]:
    """Whether a replay request is answered in vLLM's protocol."""
    async with _socket(zmq.DEALER) as socket:
        try:
            socket.connect(endpoint)
            async with asyncio.timeout(timeout_s):
                await socket.send_multipart([b"", _PAST_EVERYTHING])
                frames = await socket.recv_multipart()
        except TimeoutError:
            return False, f"no answer from {endpoint} within {timeout_s} s"
        except zmq.ZMQError as error:
            return False, f"{endpoint}: {error}"
    # [empty, topic, seq, payload], or without the topic before 0.26.
    if len(frames) in {3, 4} and frames[0] == b"" and len(frames[-2]) == 8:
        return True, "answers, ends its replay" if frames[-2] == _END else "answers with batches"
    return False, f"answers with {len(frames)} frames that are no replay"


@contextlib.asynccontextmanager
async def _socket(kind: int) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        yield socket
    finally:
        context.destroy(linger=0)
