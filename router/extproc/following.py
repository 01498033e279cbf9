# SPDX-License-Identifier: Apache-2.0
"""One routed request until its answer ends: who serves it, when it begins, what it counts, how it ends. No I/O."""

from __future__ import annotations

from router.extproc.picked import Picked, Tally
from router.gateway.answer import Answer, outcome_of_status
from router.gateway.headers import REQUEST_ID, Headers, header
from router.gateway.routing import Attempt
from router.gateway.settlement import Settlement
from router.request import Outcome, Usage


class Following:
    """Tells the attempt what passes; the attempt is finished exactly once, whatever ends the stream."""

    def __init__(self, picked: Picked, max_json_bytes: int, tally: Tally) -> None:
        self._picked = picked
        self._settlement = Settlement(picked.attempt)
        self._max_json_bytes = max_json_bytes
        self._tally = tally
        self._known = True
        """The endpoint that serves is one of ours."""
        self._status: int | None = None
        self._done = False

    def begins(self, headers: Headers, served: str | None) -> Headers:
        """The answer's headers have come, from ``served`` if the proxy says so; returns headers to set."""
        if served is not None:
            self._served_at(served)
        status = header(headers, b":status") or b""
        self._status = self._tally.status = int(status) if status.isdigit() else 0
        self._settlement.answer = Answer(self._picked.request, self._status, headers, self._max_json_bytes)
        route = self._settlement.attempt.route
        if self._known:
            return route.response_headers
        return ((REQUEST_ID, route.request_id.encode("ascii", "replace")),)

    def passes(self, piece: bytes, now_s: float) -> None:
        """The next bytes of the answer."""
        answer = self._settlement.answer
        if answer is None or self._done:
            return
        answer.feed(piece)
        if answer.begun and self._tally.first_token_s is None:
            self._tally.first_token_s = now_s
            self._end_prefill(self._settlement.attempt)
        self._settlement.progress(answer)

    def ends(self) -> None:
        """The answer is whole, as far as HTTP tells."""
        answer = self._settlement.answer
        if answer is None:
            self._finish(Outcome.OK)
            return
        answer.end()
        self._finish(answer.outcome if answer.is_complete else Outcome.WORKER_ERROR)

    def ends_unseen(self) -> None:
        """The stream is over and no body was ever to come: the status is all that is known."""
        self._finish(Outcome.CLIENT_GONE if self._status is None else outcome_of_status(self._status))

    def leaves(self) -> None:
        """The stream ended first."""
        answer = self._settlement.answer
        complete = answer is not None and answer.is_complete
        self._finish(answer.outcome if answer is not None and complete else Outcome.CLIENT_GONE)

    def drops(self, outcome: Outcome) -> None:
        """The request goes no further."""
        self._finish(outcome)

    def prefilled(self, outcome: Outcome, status: int | None, usage: Usage | None) -> None:
        """The prefill leg that the picker sent is over."""
        self._settlement.attempt.prefill_finished(outcome, status, usage)

    def _served_at(self, endpoint: str) -> None:
        worker = self._picked.worker_at(endpoint)
        moved = self._settlement.attempt.served_by(worker) if worker is not None else None
        if moved is not None:
            self._settlement.attempt = moved
            return
        # The proxy chose by itself: the load is at none of the workers that were weighed.
        self._known = False
        self._settlement.finish(Outcome.CANCELLED)

    def _finish(self, outcome: Outcome) -> None:
        if self._done:
            return
        self._done = True
        answer = self._settlement.answer
        self._tally.outcome = outcome
        self._tally.usage = answer.usage if answer is not None else None
        if outcome is Outcome.OK:
            self._end_prefill(self._settlement.attempt)
        self._settlement.finish(outcome)

    @staticmethod
    def _end_prefill(attempt: Attempt) -> None:
        """An answer that has begun shows that its prompt was computed; nobody else tells of a leg that is not ours."""
        if attempt.route.prefill is not None and attempt.route.prefill.first:
            attempt.prefill_finished(Outcome.OK, None, None)
