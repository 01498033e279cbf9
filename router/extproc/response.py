# SPDX-License-Identifier: Apache-2.0
"""The response half of a stream: lets everything through as it is, and reads along. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from router.extproc.following import Following
from router.extproc.messages import (
    NO_CHANGE,
    Answer,
    BodyAnswer,
    BodyMode,
    BodySeen,
    HeadersAnswer,
    HeadersSeen,
    Message,
    Mutation,
    Side,
    TrailersAnswer,
    pieces,
)
from router.extproc.names import TEST_SERVED
from router.extproc.picked import Tally


class OutOfOrder(Exception):
    """A message that cannot come at this point."""


class ResponseHalf:
    """States: nothing yet, headers seen, ended. One answer to each message; a body may come back in more pieces."""

    def __init__(self, mode: BodyMode, tally: Tally, *, tells_served: bool) -> None:
        """``tells_served``: repeat in a header what the proxy says of who served, for tests of gateways."""
        self._mode = mode
        self._tally = tally
        self._tells_served = tells_served
        self.following: Following | None = None
        """None: nothing was routed, so the answer is the proxy's own."""
        self.begun = False
        self.ended = False

    def take(self, message: Message, now_s: float) -> Sequence[Answer]:
        """Answer one message.

        Raises:
            OutOfOrder: headers a second time, or anything after the end.
        """
        if self.ended:
            raise OutOfOrder("a message after the end of the response")
        if isinstance(message, HeadersSeen):
            return self._headers(message, now_s)
        self.begun = True
        if isinstance(message, BodySeen):
            return self._body(message, now_s)
        self._end(now_s)
        return (TrailersAnswer(Side.RESPONSE),)

    def close(self) -> None:
        """The stream is over."""
        if self.following is None:
            return
        if self.begun and self._mode is BodyMode.NONE:
            self.following.ends_unseen()
        else:
            self.following.leaves()

    def _headers(self, message: HeadersSeen, now_s: float) -> Sequence[Answer]:
        if self.begun:
            raise OutOfOrder("response headers after the response has begun")
        self.begun = True
        added = [] if self.following is None else [*self.following.begins(message.headers, message.served)]
        if self._tells_served:
            told = message.served or "fail: the proxy does not say who served"
            added.append((TEST_SERVED, told.encode("ascii", "replace")))
        if message.end_of_stream:
            self._end(now_s)
        return (HeadersAnswer(Side.RESPONSE, Mutation(added) if added else NO_CHANGE),)

    def _body(self, message: BodySeen, now_s: float) -> Sequence[Answer]:
        self._tally.response_bytes += len(message.data)
        if self.following is not None:
            self.following.passes(message.data, now_s)
        if message.end_of_stream:
            self._end(now_s)
        if self._mode is BodyMode.DUPLEX:
            return pieces(Side.RESPONSE, message.data, end_of_stream=message.end_of_stream)
        return (BodyAnswer(Side.RESPONSE),)

    def _end(self, now_s: float) -> None:
        self.ended = True
        self._tally.ended_s = now_s
        if self.following is not None:
            self.following.ends()
