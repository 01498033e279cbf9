# SPDX-License-Identifier: Apache-2.0
"""Questions of the scheduler and the answers that came from the file system. Pure; for one thread.

A verdict stays until no request that asked is left, so that one request sees one answer; a load that failed turns it
into a miss, and a key is then probed anew only for a request that had not asked before. An unanswered question becomes a
miss at its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Verdict(Enum):
    HIT = "hit"
    MISS = "miss"
    WAIT = "wait"


@dataclass(slots=True)
class _Question:
    verdict: Verdict
    asked_s: float
    requests: set[str] = field(default_factory=set)


class Lookups:
    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._questions: dict[bytes, _Question] = {}
        self._keys: dict[str, set[bytes]] = {}
        self._unsent: list[bytes] = []

    def __len__(self) -> int:
        return len(self._questions)

    def ask(self, key: bytes, request: str, now_s: float, *, known: bool) -> Verdict:
        """The verdict for this request; `known` says that the key was seen recently. O(1)."""
        question = self._questions.get(key)
        if question is None:
            question = self._questions[key] = _Question(Verdict.WAIT, now_s)
            self._open(key, question, now_s, known=known)
        elif question.verdict is Verdict.MISS and request not in question.requests:
            self._open(key, question, now_s, known=known)
        elif question.verdict is Verdict.WAIT and now_s - question.asked_s > self._deadline_s:
            question.verdict = Verdict.MISS
        question.requests.add(request)
        self._keys.setdefault(request, set()).add(key)
        return question.verdict

    def take_unsent(self) -> list[bytes]:
        """Keys to ask the file system about, each once per question."""
        unsent, self._unsent = self._unsent, []
        return [key for key in unsent if key in self._questions]

    def answer(self, key: bytes, *, found: bool) -> None:
        """Only an open question takes an answer."""
        question = self._questions.get(key)
        if question is not None and question.verdict is Verdict.WAIT:
            question.verdict = Verdict.HIT if found else Verdict.MISS

    def settle(self, key: bytes, *, found: bool) -> None:
        """What a transfer proved, whatever was answered before."""
        question = self._questions.get(key)
        if question is not None:
            question.verdict = Verdict.HIT if found else Verdict.MISS

    def forget(self, request: str) -> None:
        for key in self._keys.pop(request, ()):
            question = self._questions[key]
            question.requests.discard(request)
            if not question.requests:
                del self._questions[key]

    def _open(self, key: bytes, question: _Question, now_s: float, *, known: bool) -> None:
        question.asked_s = now_s
        question.verdict = Verdict.HIT if known else Verdict.WAIT
        if not known:
            self._unsent.append(key)
