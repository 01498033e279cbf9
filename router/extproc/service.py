# SPDX-License-Identifier: Apache-2.0
"""``envoy.service.ext_proc.v3.ExternalProcessor``: one call per HTTP exchange, its messages to a ``PickerStream``."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from router.errors import RouterError
from router.extproc.encode import answer_bytes
from router.extproc.http2.grpc import Call, Status
from router.extproc.messages import Answer
from router.extproc.picked import Observer, Picked, Wanted
from router.extproc.picker import Asked, Picker
from router.extproc.prefills import PrefillSender
from router.extproc.stream import Ending, PickerStream, StreamSettings
from router.extproc.wire import message_of
from router.gateway.prefill import PrefillCall
from router.gateway.refusal import InternalError

_log = logging.getLogger(__name__)


class ExternalProcessor:
    """Serves streams of one picker."""

    def __init__(
        self,
        picker: Picker,
        settings: StreamSettings,
        observer: Observer,
        monotonic_s: Callable[[], float],
        prefills: PrefillSender,
    ) -> None:
        self.picker = picker
        self.prefills = prefills
        self.settings = settings
        self.observer = observer
        self.monotonic_s = monotonic_s
        self.draining = False
        """Streams that end from now on were ended by us."""
        self.open_streams = 0

    def exchange(self, call: Call) -> Exchange:
        """The handler of a new call."""
        return Exchange(self, call)


class Exchange:
    """One stream. It ends when the proxy ends it, when it was answered at once, or with an error status."""

    __slots__ = ("_ahead", "_call", "_decision", "_half_closed", "_prefill", "_processor", "_stream")

    def __init__(self, processor: ExternalProcessor, call: Call) -> None:
        self._processor = processor
        self._call = call
        self._stream = PickerStream(processor.settings, processor.observer, processor.monotonic_s())
        self._decision: asyncio.Task[None] | None = None
        self._ahead: deque[bytes] | None = None
        """Messages that came while an endpoint was being chosen."""
        self._half_closed = False
        self._prefill: PrefillCall | None = None
        processor.open_streams += 1

    # What the proxy does

    def message(self, data: bytes) -> None:
        if self._decision is not None:
            if self._ahead is None:
                self._ahead = deque()
            self._ahead.append(data)
            return
        try:
            self._take(data)
        except Exception:
            self._fail()

    def half_closed(self) -> None:
        """The proxy says no more. Before its request was answered, that is how it gives up."""
        self._half_closed = True
        if self._decision is None or not self._ahead:
            self.gone()
            self._call.finish()

    def gone(self) -> None:
        decision, self._decision = self._decision, None
        if decision is not None:
            decision.cancel()
        self._close(Ending.OURS if self._processor.draining and not self._half_closed else Ending.CLOSED)

    # What it gets

    def _take(self, data: bytes) -> None:
        try:
            message = message_of(data)
        except DecodeError:
            self._end(Ending.CLOSED, Status.INVALID_ARGUMENT, "not a ProcessingRequest")
            return
        if message is None:
            return
        stream = self._stream
        answers = stream.take(message, self._processor.monotonic_s())
        if stream.wanted is None:
            self._answer(answers)
        else:
            self._route(stream.wanted)

    def _route(self, wanted: Wanted) -> None:
        """Answer with an endpoint at once, or as soon as there is one."""
        stream, processor = self._stream, self._processor
        try:
            picked = processor.picker.pick_now(wanted)
        except Exception as error:
            self._answer(stream.refused(_refusal(error)))
            return
        if isinstance(picked, Picked):
            self._go_on(picked)
        else:
            self._decision = asyncio.get_running_loop().create_task(self._decide(picked))

    def _answer(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._call.write(answer_bytes(answer))
        if self._stream.out_of_order:
            self._end(Ending.CLOSED, Status.INVALID_ARGUMENT, "messages out of order")
        elif self._stream.over:
            self._end(Ending.CLOSED, Status.OK, "")

    def _go_on(self, picked: Picked) -> None:
        processor, own = self._processor, picked.own_leg
        answers = self._stream.routed(picked, processor.monotonic_s())
        if own is not None and not self._stream.over:
            self._prefill = processor.prefills.send(own, self._stream.prefilled)
        self._answer(answers)

    async def _decide(self, asked: Asked) -> None:
        stream, processor = self._stream, self._processor
        try:
            try:
                # Nothing may be awaited between a pick and ``routed``: its load would be nobody's.
                picked = await processor.picker.pick(asked)
            except Exception as error:
                answers = stream.refused(_refusal(error))
                self._decision = None
                self._answer(answers)
            else:
                self._decision = None
                self._go_on(picked)
            while self._ahead and self._decision is None and not self._call.over:
                self._take(self._ahead.popleft())
            if self._half_closed and self._decision is None and not self._call.over:
                self.half_closed()
        except Exception:
            self._fail()

    # Ends

    def _fail(self) -> None:
        _log.exception("a stream failed")
        self._end(Ending.OURS, Status.INTERNAL, "the endpoint picker failed")

    def _end(self, ending: Ending, status: Status, text: str) -> None:
        self._close(ending)
        self._call.finish(status, text)

    def _close(self, ending: Ending) -> None:
        if self._stream.closed:
            return
        self._processor.open_streams -= 1
        if self._prefill is not None:
            self._prefill.stop()
        self._stream.close(ending, self._processor.monotonic_s())


def _refusal(error: Exception) -> RouterError:
    if isinstance(error, RouterError):
        return error
    _log.error("an endpoint could not be picked", exc_info=error)
    return InternalError("the endpoint picker failed on this request")
