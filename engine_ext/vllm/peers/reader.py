# SPDX-License-Identifier: Apache-2.0
"""The consumer: asks the sources of a plan, answers the engine's lookups, pulls, joins. Pure; time is an argument.

The engine asks chunk by chunk, again in every step, until each is HIT or MISS; what it asks within one step goes to a
source as one question (`flush`). A chunk is HIT only when no earlier chunk of the plan is in doubt: a chunk behind a
gap is worth nothing, so its bytes are not moved before the gap is ruled out. The engine stops at the first MISS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from engine_ext.transfer.control.peer import (
    BlocksNotPulled,
    BlocksPulled,
    BlocksReleased,
    Found,
    NotFound,
    PeerLink,
)
from engine_ext.vllm.plan import Plan
from engine_ext.vllm.quarantine import Quarantine
from engine_ext.vllm.reports.sink import OK

from .account import Account
from .foreign import ForeignPulls
from .jobs import Finished, Job, Part
from .request import OPEN, Chunk, ChunkState, PlannedRequest, PullState

ReaderEvent = Found | NotFound | BlocksPulled | BlocksNotPulled | BlocksReleased


class Answer(Enum):
    HIT = auto()
    MISS = auto()
    RETRY = auto()


@dataclass(frozen=True, slots=True)
class _Question:
    """A lookup that a peer has not answered."""

    request: PlannedRequest
    state: PullState
    keys: list[bytes]
    asked_s: float


class Reader:
    """All requests with a plan. Nothing here waits; `on_event` and `tick` move it on."""

    def __init__(
        self,
        link: PeerLink,
        quarantine: Quarantine,
        account: Account,
        foreign: ForeignPulls,
        *,
        block_bytes: int,
        longest_pull_s: float,
    ) -> None:
        self._link = link
        self._quarantine = quarantine
        self._account = account
        self._foreign = foreign
        self._block_bytes = block_bytes
        self._longest_pull_s = longest_pull_s
        self._requests: dict[str, PlannedRequest] = {}
        self._to_ask: dict[tuple[str, int], tuple[PlannedRequest, PullState]] = {}
        self._asked: dict[int, _Question] = {}
        self._parts: dict[int, Part] = {}
        self._held: set[int] = set()
        self._finished: list[Finished] = []
        self._ending: set[str] = set()

    # What the engine says

    def new_request(self, request_id: str, plan: Plan, now_s: float) -> None:
        request = self._requests[request_id] = PlannedRequest(request_id, plan, now_s, self._longest_pull_s)
        self._account.began(request)
        for index, state in enumerate(request.pulls):
            if state.pull.kind == "p2p":
                state.foreign = self._foreign.open(f"{plan.plan_id}.{index}.{request_id}", state.pull.source)
                state.refusal = "not_allowed" if state.foreign is None else None

    def plans(self, request_id: str, start_token: int, end_token: int) -> bool:
        """Whether this chunk of the request is one that its plan has a source for."""
        request = self._requests.get(request_id)
        return request is not None and request.covering(start_token, end_token) is not None

    def lookup(self, request_id: str, key: bytes, start_token: int, end_token: int, now_s: float) -> Answer:
        """HIT: leased to us, `submit` it. RETRY: ask again next step. MISS: not from here, or not in time."""
        request = self._requests.get(request_id)
        index = request.covering(start_token, end_token) if request is not None else None
        if request is None or index is None:
            return Answer.MISS
        state = request.pulls[index]
        chunk = state.chunks.get(key)
        if chunk is None:
            chunk = self._want(request, index, key, end_token, now_s)
        if chunk.state in OPEN and state.foreign is not None:
            self._ask_foreign(request, state, key, now_s)
        if now_s >= state.deadline_s and state.refusal is None:
            self._drop(request, state, "deadline", now_s)
        if chunk.state in OPEN:
            return Answer.RETRY
        if chunk.state is ChunkState.FOUND:
            return Answer.RETRY if request.open_up_to(index) else Answer.HIT
        return Answer.MISS

    def flush(self, now_s: float) -> None:
        """Sends what was asked since the last flush, one question per source and request."""
        to_ask, self._to_ask = self._to_ask, {}
        for request, state in to_ask.values():
            keys = [key for key in state.unsent if state.chunks[key].state is ChunkState.NEW]
            state.unsent = []
            if not keys:
                continue
            keys.sort(key=lambda key: state.chunks[key].end_token)
            find_id = self._link.find(state.pull.source, keys, request.plan.tenant, state.deadline_s)
            self._asked[find_id] = _Question(request, state, keys, now_s)
            self._account.asked(request, state, len(keys))
            state.finds.add(find_id)
            for key in keys:
                state.chunks[key].state = ChunkState.ASKED
                state.chunks[key].find_id = find_id

    def submit(self, request_id: str, job_id: int, chunks: Sequence[tuple[bytes, int]], now_s: float) -> None:
        """Pulls these chunks; `take_finished` says how it ended, never later than the last deadline among them."""
        job = Job(job_id, len(chunks), now_s)
        request = self._requests.get(request_id)
        parts = request.cut(job, chunks, now_s) if request is not None else []
        for find_id, part in parts:
            if find_id is not None:
                job.parts += 1
                self._parts[self._link.pull(find_id, part.chunks, part.deadline_s)] = part
            elif request is not None and self._foreign.begin(part):
                job.parts += 1
                request.pulls[part.pull].ask_again()
        if not job.parts:
            self._finished.append(job.finish(self._block_bytes, now_s))

    def scheduled(self, request_id: str, now_s: float) -> None:
        """The engine computes it now and asks no more: leases go back."""
        request = self._requests.get(request_id)
        if request is not None:
            for state in request.pulls:
                self._drop(request, state, "not_needed", now_s)

    def finished(self, request_id: str, now_s: float) -> None:
        """The request is over or was aborted: its pulls are too, at the next `take` of the link."""
        self.scheduled(request_id, now_s)
        if self._requests.pop(request_id, None) is None:
            return
        self._ending.add(request_id)
        for pull_id, part in self._parts.items():
            if part.request_id == request_id:
                self._link.abort(pull_id)
        for part in self._foreign.open_parts():
            if part.request_id == request_id:
                self._give_up(part, "aborted", now_s)
        self._maybe_report(request_id)

    def abort_all(self, now_s: float) -> None:
        """Every open pull fails at the next `take`; requests go on without their plans' sources."""
        for pull_id in self._parts:
            self._link.abort(pull_id)
        for part in self._foreign.open_parts():
            self._give_up(part, "aborted", now_s)
        for request in self._requests.values():
            for state in request.pulls:
                self._drop(request, state, "aborted", now_s)

    # What the peers say

    def on_event(self, event: ReaderEvent, now_s: float) -> None:
        match event:
            case Found(find_id, keys, seconds):
                self._answered(find_id, keys, seconds)
            case NotFound(find_id, reason, detail):
                self._unanswered(find_id, reason.value, detail, now_s)
            case BlocksPulled(pull_id, _, seconds):
                if (part := self._parts.pop(pull_id, None)) is not None:
                    self._ended(part, list(part.chunks), OK, now_s, seconds)
            case BlocksNotPulled(pull_id, reason, arrived, quarantined, _):
                self._quarantine.hold(quarantined)
                self._held.update(quarantined)
                if (part := self._parts.pop(pull_id, None)) is not None:
                    good = set(arrived)
                    in_place = [key for key, chunk in part.chunks.items() if chunk in good]
                    self._ended(part, in_place, reason.value, now_s, now_s - part.started_s)
            case BlocksReleased(blocks, _):
                ours = self._held.intersection(blocks)
                self._held -= ours
                self._quarantine.release(ours)

    def foreign_ended(self, part_id: int, now_s: float, *, complete: bool) -> None:
        """The in-tree tier finished a part of ours."""
        part = self._foreign.ended(part_id, now_s, complete=complete)
        if part is not None:
            arrived = list(part.chunks) if complete else []
            self._ended(part, arrived, OK if complete else "failed", now_s, now_s - part.started_s)

    def tick(self, now_s: float) -> None:
        """Deadlines that nobody else keeps."""
        for request in self._requests.values():
            for state in request.pulls:
                if state.open and now_s >= state.deadline_s:
                    self._drop(request, state, "deadline", now_s)
        for part in self._foreign.open_parts():
            if now_s >= part.deadline_s:
                self._give_up(part, "deadline", now_s)
        self._foreign.tick(now_s)

    def take_finished(self) -> list[Finished]:
        finished, self._finished = self._finished, []
        return finished

    @property
    def busy(self) -> bool:
        """Whether a load job is open."""
        return bool(self._parts or self._foreign.open_parts())

    # Inside

    def _want(self, request: PlannedRequest, index: int, key: bytes, end_token: int, now_s: float) -> Chunk:
        state = request.pulls[index]
        chunk = request.want(index, key, end_token)
        if state.refusal is not None:
            state.missed(chunk)
            self._account.asked(request, state, 1)
            self._account.failed(request, state, 1, state.refusal, now_s - request.started_s)
        elif state.foreign is not None:
            self._account.asked(request, state, 1)
        else:
            state.unsent.append(key)
            self._to_ask[request.request_id, index] = (request, state)
        return chunk

    def _ask_foreign(self, request: PlannedRequest, state: PullState, key: bytes, now_s: float) -> None:
        """The in-tree tier answers key by key. Once it knows one, all that it knows are taken together."""
        if self._foreign.lookup(state.foreign, key) is None:
            return
        answers = [0, 0]
        for other, chunk in state.chunks.items():
            if chunk.state in OPEN and (there := self._foreign.lookup(state.foreign, other)) is not None:
                state.settle(chunk, there=there)
                answers[there] += 1
        self._account.answered(request, state, answers[1], answers[0], now_s - request.started_s)

    def _answered(self, find_id: int, keys: frozenset[bytes], seconds: float) -> None:
        question = self._asked.pop(find_id, None)
        if question is None:
            return
        state, asked = question.state, [question.state.chunks[key] for key in question.keys]
        there = sum(key in keys for key in question.keys)
        self._account.answered(question.request, state, there, len(asked) - there, seconds)
        for key, chunk in zip(question.keys, asked, strict=True):
            state.settle(chunk, there=key in keys)
        self._give_back(state, find_id)

    def _unanswered(self, find_id: int, reason: str, detail: str, now_s: float) -> None:
        question = self._asked.pop(find_id, None)
        if question is None:
            return
        state = question.state
        state.finds.discard(find_id)  # there is no lease to give back
        seconds = now_s - question.asked_s
        self._account.failed(question.request, state, len(question.keys), reason, seconds, detail)
        for key in question.keys:
            state.missed(state.chunks[key])

    def _ended(
        self, part: Part, arrived: Sequence[bytes], outcome: str, now_s: float, seconds: float
    ) -> None:
        self._account.pulled(part, len(arrived), len(arrived) * self._block_bytes, seconds, outcome)
        request = self._requests.get(part.request_id)
        if request is not None:
            state = request.pulls[part.pull]
            in_place = set(arrived)
            for key in part.chunks:
                state.chunks[key].state = ChunkState.SETTLED if key in in_place else ChunkState.MISSING
            self._give_back(state, state.chunks[next(iter(part.chunks))].find_id)
        over = part.job.ended(arrived, self._block_bytes, now_s)
        if over is not None:
            self._finished.append(over)
        self._maybe_report(part.request_id)

    def _give_up(self, part: Part, reason: str, now_s: float) -> None:
        self._foreign.give_up(part)
        self._ended(part, (), reason, now_s, now_s - part.started_s)

    def _give_back(self, state: PullState, find_id: int | None) -> None:
        """Ends the lease of a lookup of which nothing more will be pulled."""
        if find_id is not None and find_id in state.finds and not state.wants_more_of(find_id):
            state.finds.discard(find_id)
            self._link.forget(find_id)

    def _drop(self, request: PlannedRequest, state: PullState, reason: str, now_s: float) -> None:
        """Nothing more comes from here: open questions are dropped, leases given back, pulls under way go on."""
        open_chunks = state.open
        for chunk in state.unsettled():
            state.missed(chunk)
        if open_chunks:
            self._account.failed(request, state, open_chunks, reason, now_s - request.started_s)
        for find_id in state.finds:
            self._asked.pop(find_id, None)
            self._link.forget(find_id)
        state.finds.clear()
        if state.foreign is not None and not any(
            part.foreign is state.foreign for part in self._foreign.open_parts()
        ):
            self._foreign.close(state.foreign)
            state.foreign = None
        state.refusal = state.refusal or reason

    def _maybe_report(self, request_id: str) -> None:
        """The report of a finished request goes out when its last pull is over."""
        if request_id in self._ending and not any(
            part.request_id == request_id for part in (*self._parts.values(), *self._foreign.open_parts())
        ):
            self._ending.discard(request_id)
            self._account.finished(request_id)
