# SPDX-License-Identifier: Apache-2.0
"""The control channel between simulated workers: who holds which block in RAM.

A protocol of our own (vLLM's is ZMQ and NIXL): each message is a 4-byte big-endian length and a msgpack map. A
connection carries one question and one answer; no data moves, the puller models the time that would take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from engine_ext.sim.output import PeerAnswer

_LARGEST_BYTES = 64 * 1024 * 1024


class LookupQuestion(msgspec.Struct, frozen=True):
    """Which of these blocks can be pulled? ``space`` names the asker's hash space and block size."""

    kv_request_id: str
    space: bytes
    block_hashes: list[bytes]


class LookupReply(msgspec.Struct, frozen=True):
    """Per block; and how long the pull has to wait for the source's link."""

    hits: list[bool]
    wait_s: float


class PeerServer:
    """Answers other workers' lookups."""

    def __init__(self, answer: Callable[[Sequence[bytes]], PeerAnswer | None]) -> None:
        """``answer`` returns None to leave a question unanswered."""
        self._answer = answer
        self._server: asyncio.Server | None = None
        self.space = b""
        """Hash space of this worker: an asker from another one is told that nothing is held."""
        self._open: set[asyncio.StreamWriter] = set()
        self.port: int | None = None

    async def open(self, host: str, port: int) -> None:
        """Listen; port 0 takes any."""
        self._server = await asyncio.start_server(self._serve, host, port)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and drop open connections."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._open):
                writer.transport.abort()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            question = msgspec.msgpack.decode(await _read(reader), type=LookupQuestion)
            if question.space == self.space:
                answer = self._answer(question.block_hashes)
            else:
                answer = PeerAnswer([False] * len(question.block_hashes), 0.0)
            if answer is None:
                await reader.read()  # until the asker gives up
            else:
                _write(writer, msgspec.msgpack.encode(LookupReply(answer.hits, answer.wait_s)))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError, ValueError):
            pass  # the asker takes the closed connection for a miss
        finally:
            self._open.discard(writer)
            writer.close()


async def ask_peer(host: str, port: int, question: LookupQuestion, timeout_s: float) -> LookupReply | None:
    """Ask a peer; None when it is dead, silent for ``timeout_s``, or speaks nonsense."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            _write(writer, msgspec.msgpack.encode(question))
            return msgspec.msgpack.decode(await _read(reader), type=LookupReply)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError, ValueError):
        return None
    finally:
        if writer is not None:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _LARGEST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return await reader.readexactly(size)


def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(len(message).to_bytes(4, "big") + message)
