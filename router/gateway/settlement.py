# SPDX-License-Identifier: Apache-2.0
"""What the dispatcher is told of one attempt, each thing once."""

from __future__ import annotations

from router.gateway.answer import Answer
from router.gateway.routing import Attempt
from router.request import Outcome


class Settlement:
    """Ends an attempt once, with the usage seen so far."""

    __slots__ = ("_done", "_first_byte_told", "answer", "attempt")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.answer: Answer | None = None
        self._done = False
        self._first_byte_told = False

    def progress(self, answer: Answer) -> None:
        if answer.begun and not self._first_byte_told:
            self._first_byte_told = True
            self.attempt.first_byte()

    def finish(self, outcome: Outcome) -> None:
        if self._done:
            return
        self._done = True
        status = None if self.answer is None else self.answer.status
        try:
            if self.answer is not None and self.answer.usage is not None:
                self.attempt.usage(self.answer.usage)
        finally:
            self.attempt.finish(outcome, status)

    def abandon(self) -> None:
        """The client left; after ``[DONE]`` that is how many clients end a good answer."""
        if self.answer is not None and self.answer.is_complete:
            self.finish(self.answer.outcome)
        else:
            self.finish(Outcome.CLIENT_GONE)
