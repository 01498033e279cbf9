# SPDX-License-Identifier: Apache-2.0
"""``envoy.service.ext_proc.v3.ExternalProcessor``: one call per HTTP exchange, its messages to a ``PickerStream``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from router.errors import RouterError
from router.extproc.messages import Message
from router.extproc.picked import Observer, Picked, Wanted
from router.extproc.picker import Picker
from router.extproc.stream import Ending, PickerStream, StreamSettings
from router.extproc.wire import message_of, response_of
from router.gateway.refusal import InternalError

_log = logging.getLogger(__name__)
_WATCH_AFTER_S = 0.02


class _ProxyGoneError(Exception):
    """The proxy ended the stream while its decision was awaited."""


class ExternalProcessor(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    """Serves streams of one picker."""

    def __init__(
        self,
        picker: Picker,
        settings: StreamSettings,
        observer: Observer,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._picker = picker
        self._settings = settings
        self._observer = observer
        self._monotonic_s = monotonic_s
        self.draining = False
        """Streams that end from now on were ended by us."""
        self.open_streams = 0

    async def Process(self, _requests: object, context: Any) -> None:  # noqa: N802 - the name is the protocol's
        """One stream. It ends when the proxy ends it, when it was answered at once, or with an error status."""
        stream = PickerStream(self._settings, self._observer, self._monotonic_s())
        messages = _Messages(context)
        ending = Ending.OURS
        self.open_streams += 1
        try:
            await self._run(stream, messages, context)
            ending = Ending.CLOSED
        except _ProxyGoneError:
            ending = Ending.CLOSED
        except asyncio.CancelledError:
            ending = Ending.OURS if self.draining else Ending.CLOSED
            raise
        finally:
            self.open_streams -= 1
            messages.stop()
            stream.close(ending, self._monotonic_s())
        if stream.out_of_order:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "messages out of order")

    async def _run(self, stream: PickerStream, messages: _Messages, context: Any) -> None:
        while not stream.over and (message := await messages.read()) is not None:
            answers = stream.take(message, self._monotonic_s())
            if stream.wanted is not None:
                answers = await self._decide(stream, stream.wanted, messages)
            for answer in answers:
                await context.write(response_of(answer))

    async def _decide(self, stream: PickerStream, wanted: Wanted, messages: _Messages) -> Any:
        picked: Picked | None = None
        try:
            async with _WhileProxyStays(messages) as waiting:
                picked = await self._picker.pick(wanted)
        except RouterError as error:
            return stream.refused(error)
        except Exception:
            _log.exception("an endpoint could not be picked")
            return stream.refused(InternalError("the endpoint picker failed on this request"))
        if picked is None or waiting.gone:
            if picked is not None:
                stream.routed(picked, self._monotonic_s())
            raise _ProxyGoneError
        return stream.routed(picked, self._monotonic_s())


class _Messages:
    """Reads a stream; one message may be read ahead while something else is waited for."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._ahead: asyncio.Task[Message | None] | None = None

    async def read(self) -> Message | None:
        """The next message that holds something; None at the end."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return await ahead
        return await self._next()

    def read_ahead(self) -> asyncio.Task[Message | None]:
        """Read the message that ``read`` will return."""
        if self._ahead is None:
            self._ahead = asyncio.get_running_loop().create_task(self._next(), name="ext_proc read ahead")
        return self._ahead

    def stop(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    async def _next(self) -> Message | None:
        while (request := await self._context.read()) is not grpc.aio.EOF:
            message = message_of(request)
            if message is not None:
                return message
        return None


class _WhileProxyStays:
    """Cancels the block it surrounds when the proxy ends the stream, and swallows that cancellation.

    Most decisions are made before the stream is looked at for the first time.
    """

    def __init__(self, messages: _Messages) -> None:
        self._messages = messages
        self._scope = asyncio.timeout(None)
        self._start: asyncio.TimerHandle | None = None
        self._ahead: asyncio.Task[Message | None] | None = None
        self.gone = False

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._start = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._watch)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if self._start is not None:
            self._start.cancel()
        if self._ahead is not None:
            self._ahead.remove_done_callback(self._on_message)
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            return True
        return False

    def _watch(self) -> None:
        self._ahead = self._messages.read_ahead()
        self._ahead.add_done_callback(self._on_message)

    def _on_message(self, ahead: asyncio.Task[Message | None]) -> None:
        if ahead.cancelled() or ahead.exception() is not None or ahead.result() is None:
            self.gone = True
            self._scope.reschedule(asyncio.get_running_loop().time())
