# SPDX-License-Identifier: Apache-2.0
"""The Endpoint Picker Protocol for one HTTP exchange, as a state machine: messages in, answers out. No I/O.

    headers ──▶ collecting (full duplex) ──▶ wanted ──▶ routed ──▶ response half
            ├─▶ held (buffered: headers answered, body to come) ─┤
            └─▶ wanted at once (no body, or one that is not shown) ─┘

Invariants, whatever comes in whatever order:

- At most one answer to each message. Only a body in full duplex comes back in pieces of another number; joined they
  are the body, and the end flag is on the last one, once.
- After an ``Immediate`` nothing. An ``Immediate`` never after the request went on.
- An attempt that was handed in by ``routed`` is finished exactly once, at the latest by ``close``.
- The destination in the header and in the metadata is the same value.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from router.errors import RequestError, RouterError
from router.extproc.following import Following
from router.extproc.messages import (
    FULL_DUPLEX,
    Answer,
    BodyAnswer,
    BodyMode,
    BodySeen,
    HeadersAnswer,
    HeadersSeen,
    Message,
    Modes,
    Mutation,
    Side,
    TrailersAnswer,
    TrailersSeen,
    pieces,
)
from router.extproc.names import DESTINATION
from router.extproc.picked import Observer, Picked, Tally, Wanted
from router.extproc.refusals import immediate
from router.extproc.response import OutOfOrder, ResponseHalf
from router.gateway.body import NotAJsonObjectError, insert_keys
from router.gateway.headers import REQUEST_ID, Headers, header
from router.gateway.refusal import BodyNotRoutableError, BodyTooLargeError, InternalError
from router.request import Outcome, Usage


class MessageOrderError(RequestError):
    """The proxy sent messages in an order that the protocol does not have."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What is the same for all streams."""

    max_body_bytes: int
    max_inspected_bytes: int
    """Answers in JSON above this size are not looked into for usage."""
    modes: Modes = FULL_DUPLEX
    """Where the proxy does not say."""
    tells_served: bool = False


class Ending(enum.Enum):
    """Why a stream is over."""

    CLOSED = "closed"  # by the proxy, in good order or not
    OURS = "ours"  # an error of ours, a deadline, a drain


class _Phase(enum.Enum):
    NOTHING = 0  # no headers yet
    COLLECTING = 1  # headers unanswered, body comes in
    HELD = 2  # headers answered, the proxy collects the body
    WANTED = 3  # an endpoint is being chosen
    ROUTED = 4
    PASSING = 5  # the proxy answered by itself: what still comes of the request goes nowhere


class PickerStream:
    """One stream. Feed it with ``take``; when ``wanted`` is set, go on with ``routed`` or ``refused``; then ``close``."""

    def __init__(self, settings: StreamSettings, observer: Observer, now_s: float) -> None:
        self._settings = settings
        self._observer = observer
        self._phase = _Phase.NOTHING
        self._mode, response_mode = settings.modes
        self._headers: Headers = ()
        self._subset: Sequence[str] | None = None
        self._body: list[bytes] = []
        self._body_ended = False
        self._trigger: Message | None = None
        """The message that the decision is about: it is the one that is answered then."""
        self._trailers_answered = False
        self._observing = False
        self.closed = False
        """``close`` was called."""
        self.tally = Tally(now_s)
        self._response = ResponseHalf(response_mode, self.tally, tells_served=settings.tells_served)
        self._following: Following | None = None
        self.wanted: Wanted | None = None
        self.over = False
        """Nothing more will be answered."""
        self.out_of_order = False
        """The proxy broke the protocol after its request had gone on."""

    def take(self, message: Message, now_s: float) -> Sequence[Answer]:
        """Answers to one message; not to be called while ``wanted`` is set."""
        if self.wanted is not None:
            raise RuntimeError("the decision comes first")
        if self.over or self._observing:
            return ()
        try:
            if message.side is Side.RESPONSE:
                return self._take_response(message, now_s)
            return self._take_request(message, now_s)
        except OutOfOrder as error:
            return self._break_off(str(error))

    def routed(self, picked: Picked, now_s: float) -> Sequence[Answer]:
        """The decision that was wanted."""
        wanted, trigger = self._decided()
        following = Following(picked, self._settings.max_inspected_bytes, self.tally)
        self._following = self._response.following = following
        self.tally.request, self.tally.routed_s = picked.request, now_s
        self._observer.routed(self.tally)
        try:
            body = _with_keys(wanted, picked)
        except RouterError as error:
            following.drops(Outcome.CLIENT_ERROR)
            return self._refuse(error)
        self._phase = _Phase.ROUTED
        return self._send_on(trigger, wanted, picked, body)

    def prefilled(self, outcome: Outcome, status: int | None, usage: Usage | None) -> None:
        """The prefill leg that was sent for this request is over."""
        if self._following is not None:
            self._following.prefilled(outcome, status, usage)

    def refused(self, error: RouterError) -> Sequence[Answer]:
        """There is none."""
        self._decided()
        return self._refuse(error)

    def close(self, ending: Ending, now_s: float) -> None:
        """The stream is over; later calls change nothing."""
        if self.closed:
            return
        self.closed = self.over = True
        self.wanted = None
        if ending is Ending.OURS and self._following is not None:
            self._following.drops(Outcome.CANCELLED)
        else:
            self._response.close()
        if self.tally.ended_s is None:
            self.tally.ended_s = now_s
        if not self._observing:
            self._observer.ended(self.tally)

    # Request

    def _take_request(self, message: Message, now_s: float) -> Sequence[Answer]:
        if self._phase is _Phase.PASSING:
            return ()
        if message.subset is not None:
            self._subset = message.subset
        if isinstance(message, HeadersSeen):
            answers = self._take_headers(message)
        elif self._phase is _Phase.NOTHING:
            raise OutOfOrder("a body or trailers before the headers")
        elif isinstance(message, BodySeen):
            answers = self._take_body(message)
        else:
            answers = self._take_trailers(message)
        if self.wanted is not None:
            self.tally.wanted_s = now_s
        return answers

    def _take_headers(self, message: HeadersSeen) -> Sequence[Answer]:
        if self._phase is not _Phase.NOTHING:
            raise OutOfOrder("request headers a second time")
        self._headers = message.headers
        self._observing = message.observing
        if self._observing:
            return ()
        if message.modes is not None:
            self._mode, response_mode = message.modes
            self._response = ResponseHalf(response_mode, self.tally, tells_served=self._settings.tells_served)
        if message.end_of_stream:
            return self._want(message, shows_body=True)
        if self._mode in (BodyMode.NONE, BodyMode.STREAMED):
            return self._want(message, shows_body=False)
        announced = header(message.headers, b"content-length") or b""
        if announced.isdigit() and int(announced) > self._settings.max_body_bytes:
            return self._refuse(self._too_large())
        if self._mode is BodyMode.BUFFERED:
            self._phase = _Phase.HELD
            return (HeadersAnswer(Side.REQUEST),)
        self._phase = _Phase.COLLECTING
        return ()

    def _take_body(self, message: BodySeen) -> Sequence[Answer]:
        if self._phase not in (_Phase.COLLECTING, _Phase.HELD):
            return self._let_body_pass(message)
        self.tally.request_bytes += len(message.data)
        if self.tally.request_bytes > self._settings.max_body_bytes:
            return self._refuse(self._too_large())
        self._body.append(message.data)
        if message.end_of_stream or self._phase is _Phase.HELD:
            self._body_ended = message.end_of_stream
            return self._want(message, shows_body=True)
        return ()

    def _take_trailers(self, message: TrailersSeen) -> Sequence[Answer]:
        if self._trailers_answered or self._body_ended:
            raise OutOfOrder("trailers after the end of the request")
        self._trailers_answered = True
        if self._phase is _Phase.COLLECTING:
            return self._want(message, shows_body=True)
        if self._phase is _Phase.HELD:
            raise OutOfOrder("trailers of a request whose body was to come in one message")
        return (TrailersAnswer(Side.REQUEST),)

    def _let_body_pass(self, message: BodySeen) -> Sequence[Answer]:
        """A body that needs no decision any more."""
        if self._body_ended or self._trailers_answered:
            raise OutOfOrder("a body after the end of the request")
        self._body_ended = message.end_of_stream
        self.tally.request_bytes += len(message.data)
        if self._mode is BodyMode.DUPLEX:
            return pieces(Side.REQUEST, message.data, end_of_stream=message.end_of_stream)
        return (BodyAnswer(Side.REQUEST),)

    def _want(self, trigger: Message, *, shows_body: bool) -> Sequence[Answer]:
        self._phase = _Phase.WANTED
        self._trigger = trigger
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self.wanted = Wanted(self._headers, body, self._subset, shows_body)
        return ()

    def _decided(self) -> tuple[Wanted, Message]:
        wanted, trigger = self.wanted, self._trigger
        if wanted is None or trigger is None:
            raise RuntimeError("no decision was wanted")
        self.wanted = self._trigger = None
        return wanted, trigger

    def _send_on(self, trigger: Message, wanted: Wanted, picked: Picked, body: bytes) -> Sequence[Answer]:
        """Everything that was held back, with the endpoint."""
        set_headers = [(DESTINATION.encode(), picked.destination.encode("ascii")), *picked.set_headers]
        changed = body is not wanted.body
        whole = isinstance(trigger, BodySeen) and trigger.end_of_stream
        if whole and (changed or self._mode is BodyMode.DUPLEX):
            # Of a request with trailers the length is not told: HTTP/1.1 sends those only without one.
            set_headers.append((b"content-length", str(len(body)).encode("ascii")))
        mutation = Mutation(set_headers, picked.remove_headers, picked.destination, picked.scores)
        if self._mode is BodyMode.BUFFERED and isinstance(trigger, BodySeen):
            return (BodyAnswer(Side.REQUEST, body if changed else None, mutation),)
        answers: list[Answer] = [HeadersAnswer(Side.REQUEST, mutation)]
        if isinstance(trigger, BodySeen):
            answers += pieces(Side.REQUEST, body, end_of_stream=True)
        elif isinstance(trigger, TrailersSeen):
            if self._body:
                answers += pieces(Side.REQUEST, body, end_of_stream=False)
            answers.append(TrailersAnswer(Side.REQUEST))
        return answers

    # Response

    def _take_response(self, message: Message, now_s: float) -> Sequence[Answer]:
        if self._phase in (_Phase.NOTHING, _Phase.COLLECTING, _Phase.HELD):
            # The proxy answers by itself what it has not sent on: a time-out of its own, a filter behind this one.
            self._phase = _Phase.PASSING
        return self._response.take(message, now_s)

    # Ends

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the request body is larger than {self._settings.max_body_bytes} bytes")

    def _refuse(self, error: RouterError) -> Sequence[Answer]:
        request_id = (header(self._headers, REQUEST_ID) or b"").decode("latin-1") or None
        answer = immediate(error, request_id)
        self.tally.refused_status = answer.status
        self.over = True
        return (answer,)

    def _break_off(self, what: str) -> Sequence[Answer]:
        if self._phase in (_Phase.NOTHING, _Phase.COLLECTING, _Phase.HELD):
            return self._refuse(MessageOrderError(f"the proxy sent {what}"))
        self.over = self.out_of_order = True
        return ()


def _with_keys(wanted: Wanted, picked: Picked) -> bytes:
    """The body with the keys that the route adds; the very same object where it adds none.

    Raises:
        RouterError: keys must be added, and cannot.
    """
    if not picked.insert:
        return wanted.body
    if not wanted.shows_body:
        names = ", ".join(picked.insert)
        raise InternalError(
            f"{names} must be added to a body that the proxy does not show to its endpoint picker"
        )
    try:
        return insert_keys(wanted.body, picked.insert)
    except NotAJsonObjectError as error:
        raise BodyNotRoutableError(str(error)) from error
