# SPDX-License-Identifier: Apache-2.0
"""A proxy's side of the Endpoint Picker Protocol: one stream, and what came back on it, in the generated classes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from google.protobuf import json_format, struct_pb2

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")
SERVED = ("envoy.lb", "x-gateway-destination-endpoint-served")
MODES = processing_mode_pb2.ProcessingMode
FULL_DUPLEX, BUFFERED, NONE = MODES.FULL_DUPLEX_STREAMED, MODES.BUFFERED, MODES.NONE
PATIENCE_S = 20.0
POST = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}
GET = {":method": "GET", ":path": "/v1/models"}


def header_map(headers: Mapping[str, str]) -> Any:
    rows = [base_pb2.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
    return base_pb2.HeaderMap(headers=rows)


def metadata(namespace: str, key: str, value: object) -> Any:
    struct = json_format.ParseDict({key: value}, struct_pb2.Struct())
    return base_pb2.Metadata(filter_metadata={namespace: struct})


def headers_set(common: Any) -> dict[str, str]:
    """Headers that an answer sets, by name."""
    found: dict[str, str] = {}
    for option in common.header_mutation.set_headers:
        name = option.header.key.lower()
        assert name not in found, f"{name} is set twice"
        found[name] = (option.header.raw_value or option.header.value.encode()).decode()
    return found


@dataclass
class Conversation:
    """One stream. Everything that comes is kept in ``answers``."""

    call: Any
    modes: tuple[int, int] | None = (FULL_DUPLEX, FULL_DUPLEX)
    answers: list[Any] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    status: Any = None
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)
    _reader: asyncio.Task[None] | None = None
    _first: bool = True

    def start(self) -> None:
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        try:
            while (answer := await self.call.read()) is not grpc.aio.EOF:
                async with self._news:
                    self.answers.append(answer)
                    self._news.notify_all()
        except grpc.aio.AioRpcError as error:
            self.status = error.code()
        except asyncio.CancelledError:
            pass
        self.status = self.status or await _code(self.call)
        self.ended.set()
        async with self._news:
            self._news.notify_all()

    async def stop(self) -> None:
        self.call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    # What a proxy says

    async def send(self, **message: Any) -> None:
        request = pb.ProcessingRequest(**message)
        if self._first and self.modes is not None:
            request.protocol_config.request_body_mode, request.protocol_config.response_body_mode = self.modes
        self._first = False
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            await self.call.write(request)

    async def headers(
        self, headers: Mapping[str, str] = POST, *, end: bool = False, subset: object = None, **more: Any
    ) -> None:
        if subset is not None:
            more["metadata_context"] = metadata(*SUBSET, subset)
        part = pb.HttpHeaders(headers=header_map(headers), end_of_stream=end)
        await self.send(request_headers=part, **more)

    async def body(self, data: bytes, *, end: bool = True) -> None:
        await self.send(request_body=pb.HttpBody(body=data, end_of_stream=end))

    async def trailers(self) -> None:
        await self.send(request_trailers=pb.HttpTrailers())

    async def response(
        self, headers: Mapping[str, str], *, end: bool = False, served: str | None = None
    ) -> None:
        more = {} if served is None else {"metadata_context": metadata(*SERVED, served)}
        part = pb.HttpHeaders(headers=header_map(headers), end_of_stream=end)
        await self.send(response_headers=part, **more)

    async def response_body(self, data: bytes, *, end: bool = True) -> None:
        await self.send(response_body=pb.HttpBody(body=data, end_of_stream=end))

    async def response_trailers(self) -> None:
        await self.send(response_trailers=pb.HttpTrailers())

    async def hang_up(self) -> None:
        """Half close, as a proxy does at the end of an exchange, and wait for the end."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.done_writing()
        async with asyncio.timeout(PATIENCE_S):
            await self.ended.wait()

    # What came back

    def of(self, kind: str) -> list[Any]:
        """Answers of one kind, in order."""
        return [getattr(one, kind) for one in self.answers if one.WhichOneof("response") == kind]

    async def until(self, kind: str, count: int = 1) -> Any:
        """The answer that makes it so many of a kind.

        Raises:
            AssertionError: the stream ended first, or nothing came in time.
        """
        try:
            async with asyncio.timeout(PATIENCE_S), self._news:
                await self._news.wait_for(lambda: len(self.of(kind)) >= count or self.ended.is_set())
        except TimeoutError:
            raise AssertionError(f"no {kind} in {PATIENCE_S} s; came: {self.kinds()}") from None
        assert len(self.of(kind)) >= count, f"ended with {self.status} and no {kind}; came: {self.kinds()}"
        return self.of(kind)[count - 1]

    async def until_body_ends(self, kind: str = "request_body") -> bytes:
        """The body that came back, whole."""

        def ends() -> bool:
            return any(one.response.body_mutation.streamed_response.end_of_stream for one in self.of(kind))

        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: ends() or self.ended.is_set())
        return self.joined(kind)

    def joined(self, kind: str) -> bytes:
        parts = [one.response.body_mutation.streamed_response for one in self.of(kind)]
        assert all(len(part.body) <= 65_536 for part in parts), "a piece above the limit of some proxies"
        assert all(not part.end_of_stream for part in parts[:-1]), "an end flag before the last piece"
        return b"".join(part.body for part in parts)

    def kinds(self) -> list[str]:
        return [one.WhichOneof("response") for one in self.answers]

    async def destination(self) -> list[str]:
        """The endpoints of the answer to the headers; header and metadata must say the same."""
        await self.until("request_headers")
        [whole] = [one for one in self.answers if one.WhichOneof("response") == "request_headers"]
        told = headers_set(whole.request_headers.response)[DESTINATION]
        assert whole.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value == told
        return told.split(",")

    async def refusal(self) -> Any:
        """The immediate answer; nothing else may have come, nor come after it."""
        immediate = await self.until("immediate_response")
        await self.hang_up()
        assert self.kinds() == ["immediate_response"]
        return immediate


async def _code(call: Any) -> Any:
    try:
        return await call.code()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        return None


@dataclass
class PickerClient:
    """Opens streams to one picker."""

    stub: Any
    modes: tuple[int, int] | None = (FULL_DUPLEX, FULL_DUPLEX)

    @contextlib.asynccontextmanager
    async def conversation(self, modes: tuple[int, int] | None = None) -> AsyncIterator[Conversation]:
        one = Conversation(self.stub.Process(), modes or self.modes)
        one.start()
        try:
            yield one
        finally:
            await one.stop()

    async def pick(
        self, body: bytes, subset: object = None, headers: Mapping[str, str] = POST
    ) -> Sequence[str]:
        """Endpoints for one request."""
        async with self.conversation() as one:
            await one.headers(headers, subset=subset)
            await one.body(body)
            return await one.destination()


@contextlib.asynccontextmanager
async def picker_client(
    address: str, credentials: Any = None, options: Sequence[tuple[str, Any]] = ()
) -> AsyncIterator[PickerClient]:
    """A client of the picker at ``host:port``."""
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), *options]
    channel = (
        grpc.aio.insecure_channel(address, options=limits)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=limits)
    )
    async with channel:
        yield PickerClient(external_processor_pb2_grpc.ExternalProcessorStub(channel))
