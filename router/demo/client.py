# SPDX-License-Identifier: Apache-2.0
"""The demo's client: streamed completions through the gateway's public API, timed from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from router.decisions.record import DecisionRecord
from router.demo.errors import DemoError
from router.demo.workload import Conversation, Workload

_DATA = b"data:"
_DONE = b"[DONE]"
_CONNECTED_WITHIN_S = 10.0
_RECORDS = 10_000
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=120.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request, as its client saw it."""

    request_id: str
    worker: str
    ttft_s: float
    """From sending to the first streamed text."""
    prompt_tokens: int
    cached_tokens: int
    """As the engine reports."""


class _Choice(msgspec.Struct):
    text: str


class _Details(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Decisions(msgspec.Struct):
    decisions: list[DecisionRecord]


class _Stream(msgspec.Struct):
    connected: bool


class _Worker(msgspec.Struct):
    health: str
    streams: list[_Stream]


class _Workers(msgspec.Struct):
    workers: list[_Worker]


class GatewayClient:
    """Calls of one gateway."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._decode = msgspec.json.Decoder(_Chunk).decode

    async def ask(self, prompt: str, max_tokens: int) -> tuple[Sample, str]:
        """One streamed completion; returns its sample and the answer.

        Raises:
            DemoError: it was refused, or its stream was cut off.
        """
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = msgspec.json.encode(body)
        sent_s = time.monotonic()
        try:
            call = self._session.post(
                f"{self._url}/v1/completions",
                data=data,
                headers={"content-type": "application/json"},
                timeout=_TIMEOUT,
            )
            async with call as response:
                if response.status != 200:
                    raise DemoError(f"a request was refused: {response.status} {await response.text()}")
                return await self._read(response, sent_s)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DemoError(f"a request failed: {error!r}") from error

    async def _read(self, response: aiohttp.ClientResponse, sent_s: float) -> tuple[Sample, str]:
        texts: list[str] = []
        first_s: float | None = None
        usage: _Usage | None = None
        done = False
        async for line in response.content:
            payload = line.removeprefix(_DATA).strip()
            if payload == _DONE:
                done = True
            elif payload:
                chunk = self._decode(payload)
                usage = chunk.usage or usage
                text = "".join(choice.text for choice in chunk.choices)
                if text and first_s is None:
                    first_s = time.monotonic()
                texts.append(text)
        if not done or first_s is None or usage is None:
            raise DemoError("a stream ended without text, usage or its end mark")
        sample = Sample(
            request_id=response.headers["x-request-id"],
            worker=response.headers["x-pointsman-worker"],
            ttft_s=first_s - sent_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
        )
        return sample, "".join(texts)

    async def decisions(self) -> list[DecisionRecord]:
        """The gateway's decision records, newest first."""
        body = await self._get(f"/admin/api/decisions?limit={_RECORDS}")
        return msgspec.json.decode(body, type=_Decisions).decisions

    async def wait_until_followed(self) -> None:
        """Until every worker is healthy and its events are followed.

        Raises:
            DemoError: that took too long.
        """
        try:
            async with asyncio.timeout(_CONNECTED_WITHIN_S):
                while not await self._followed():  # noqa: ASYNC110 - the answer is at the other end of HTTP
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise DemoError("the gateway does not follow the events of its workers") from None

    async def _followed(self) -> bool:
        workers = msgspec.json.decode(await self._get("/admin/api/workers"), type=_Workers).workers
        return all(
            worker.health == "healthy"
            and worker.streams
            and all(stream.connected for stream in worker.streams)
            for worker in workers
        )

    async def _get(self, path: str) -> bytes:
        try:
            async with self._session.get(self._url + path, timeout=_TIMEOUT) as response:
                response.raise_for_status()
                return await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DemoError(f"{path} of the gateway failed: {error!r}") from error


async def drive(client: GatewayClient, workload: Workload, on_sample: Callable[[Sample], None]) -> None:
    """Hold all conversations of a workload at their times.

    Raises:
        DemoError: a request failed.
    """
    start_s = asyncio.get_running_loop().time()
    talks = (
        _converse(client, workload.documents[one.document], one, start_s, on_sample)
        for one in workload.conversations
    )
    tasks = [asyncio.create_task(talk) for talk in talks]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _converse(
    client: GatewayClient,
    document: str,
    conversation: Conversation,
    start_s: float,
    on_sample: Callable[[Sample], None],
) -> None:
    await asyncio.sleep(start_s + conversation.start_s - asyncio.get_running_loop().time())
    prompt = document
    for turn in conversation.turns:
        await asyncio.sleep(turn.pause_s)
        prompt += f"\n\nUser: {turn.question}\n\nAssistant: "
        sample, answer = await client.ask(prompt, turn.max_tokens)
        on_sample(sample)
        prompt += answer
