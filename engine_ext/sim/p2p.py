# SPDX-License-Identifier: Apache-2.0
"""The control channel between simulated workers: who holds which block in RAM.

A protocol of our own (vLLM's is ZMQ and NIXL): each message is a 4-byte big-endian length and a msgpack map. A
connection carries one question and its answers, of which the last one leaves nothing unknown; no data moves, the
puller models the time that would take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from engine_ext.sim.output import PeerAnswer

_LARGEST_BYTES = 64 * 1024 * 1024


class LookupQuestion(msgspec.Struct, frozen=True):
    """Which of these blocks can be pulled? ``space`` names the asker's hash space and block size."""

    kv_request_id: str
    space: bytes
    block_hashes: list[bytes]
    waits: bool = False
    """As ``PeerLookup.waits``."""


class LookupReply(msgspec.Struct, frozen=True):
    """Per block; and how long the pull has to wait for the source's link. None in ``hits``: another one follows."""

    hits: list[bool | None]
    wait_s: float


Answers = asyncio.Queue[PeerAnswer | None]
"""What a question is answered with, one after the other; None when no more will come."""


class PeerServer:
    """Answers other workers' lookups."""

    def __init__(self, answer: Callable[[LookupQuestion], Answers]) -> None:
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
                await _pass_on(self._answer(question), reader, writer)
            else:
                await _reply(writer, PeerAnswer([False] * len(question.block_hashes), 0.0))
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError, ValueError):
            pass  # the asker takes the closed connection for a miss
        finally:
            self._open.discard(writer)
            writer.close()


async def _pass_on(answers: Answers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until all is said, nothing more will come, or the asker has given up."""
    gone = asyncio.ensure_future(reader.read())
    try:
        while True:
            coming = asyncio.ensure_future(answers.get())
            await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                return
            answer = coming.result()
            if answer is None:
                return
            await _reply(writer, answer)
            if answer.is_last:
                return
    finally:
        gone.cancel()
        await asyncio.wait({gone})  # however it ended is of no interest
        _ = gone.cancelled() or gone.exception()


async def _reply(writer: asyncio.StreamWriter, answer: PeerAnswer) -> None:
    _write(writer, msgspec.msgpack.encode(LookupReply(answer.hits, answer.wait_s)))
    await writer.drain()


async def ask_peer(
    host: str, port: int, question: LookupQuestion, timeout_s: float, heard: Callable[[LookupReply], None]
) -> None:
    """Ask a peer; ``heard`` is called with each reply, never if it is dead, silent or speaks nonsense."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            _write(writer, msgspec.msgpack.encode(question))
            last = False
            while not last:
                reply = msgspec.msgpack.decode(await _read(reader), type=LookupReply)
                heard(reply)
                last = None not in reply.hits
    except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError, ValueError):
        return
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
