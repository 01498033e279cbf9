# SPDX-License-Identifier: Apache-2.0
"""One request with a plan: which source each chunk belongs to, and what is known about it. Pure.

A chunk belongs to the pull whose token range holds all of it, so a pull is rounded inwards to whole chunks. Its
life: NEW (wanted, not yet asked) -> ASKED -> FOUND (leased to us) -> LOADING -> SETTLED, or MISSING from anywhere
before LOADING. A chunk that was missed or whose pull failed stays missing for this request, so that the engine
computes it instead of asking for ever.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from engine_ext.vllm.plan import Plan, Pull

from .jobs import Job, Part


class ChunkState(Enum):
    NEW = auto()
    ASKED = auto()
    FOUND = auto()
    LOADING = auto()
    SETTLED = auto()
    MISSING = auto()


OPEN = (ChunkState.NEW, ChunkState.ASKED)


@dataclass(slots=True)
class Chunk:
    """One wanted chunk. `end_token` is its place in the prompt."""

    end_token: int
    state: ChunkState = ChunkState.NEW
    find_id: int | None = None


@dataclass(slots=True)
class PullState:
    """One pull of the plan."""

    pull: Pull
    deadline_s: float
    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    unsent: list[bytes] = field(default_factory=list)
    open: int = 0
    """Chunks of which it is not known whether they are there."""
    finds: set[int] = field(default_factory=set)
    """Lookups whose answer or lease we have not given back."""
    refusal: str | None = None
    """Why nothing is asked here (any more)."""
    foreign: Any = None
    """The in-tree tier's handle, for pulls of kind `p2p`."""

    def settle(self, chunk: Chunk, *, there: bool) -> None:
        """The source has answered; only of a chunk that is still in doubt."""
        if chunk.state in OPEN:
            self.open -= 1
            chunk.state = ChunkState.FOUND if there else ChunkState.MISSING

    def missed(self, chunk: Chunk) -> None:
        """It does not come from here, whatever the source may say."""
        self.open -= chunk.state in OPEN
        chunk.state = ChunkState.MISSING

    def ask_again(self) -> None:
        """What the source had found counts no more, because a load has ended that round (in-tree peers only)."""
        for chunk in self.chunks.values():
            if chunk.state is ChunkState.FOUND:
                chunk.state = ChunkState.ASKED
                self.open += 1

    def wants_more_of(self, find_id: int) -> bool:
        """Whether chunks of this lookup are still to be pulled, or on their way."""
        live = (*OPEN, ChunkState.FOUND, ChunkState.LOADING)
        return any(c.find_id == find_id and c.state in live for c in self.chunks.values())

    def unsettled(self) -> list[Chunk]:
        """Chunks that no pull has taken yet: asked for or leased."""
        return [c for c in self.chunks.values() if c.state in OPEN or c.state is ChunkState.FOUND]


class PlannedRequest:
    """A request and the pulls of its plan, in the order of the prompt."""

    def __init__(self, request_id: str, plan: Plan, now_s: float, longest_s: float) -> None:
        self.request_id = request_id
        self.plan = plan
        self.started_s = now_s
        self.pulls = [
            PullState(pull, now_s + min(pull.deadline_ms / 1000, longest_s))
            for pull in sorted(plan.pulls, key=lambda one: one.start_token)
        ]
        self._starts = [state.pull.start_token for state in self.pulls]
        self._owner: dict[bytes, int] = {}

    def covering(self, start_token: int, end_token: int) -> int | None:
        """The pull whose range holds the whole chunk. O(log pulls)."""
        index = bisect_right(self._starts, start_token) - 1
        if index < 0 or end_token > self.pulls[index].pull.end_token:
            return None
        return index

    def want(self, index: int, key: bytes, end_token: int) -> Chunk:
        """The engine asks for this chunk, of this pull, for the first time."""
        state = self.pulls[index]
        chunk = state.chunks[key] = Chunk(end_token)
        state.open += 1
        self._owner[key] = index
        return chunk

    def cut(
        self, job: Job, chunks: Iterable[tuple[bytes, int]], now_s: float
    ) -> list[tuple[int | None, Part]]:
        """A load job by source, and by lookup where a source was asked in several; what is not FOUND is left out."""
        grouped: dict[tuple[int, int | None], Part] = {}
        for key, block in chunks:
            index = self._owner.get(key)
            if index is None:
                continue
            state = self.pulls[index]
            chunk = state.chunks[key]
            if chunk.state is not ChunkState.FOUND:
                continue
            chunk.state = ChunkState.LOADING
            place = (index, chunk.find_id)
            if place not in grouped:
                grouped[place] = Part(
                    job=job,
                    request_id=self.request_id,
                    pull=index,
                    chunks={},
                    source=state.pull.source,
                    kind=state.pull.kind,
                    started_s=now_s,
                    deadline_s=state.deadline_s,
                    foreign=state.foreign,
                )
            grouped[place].chunks[key] = block
        return [(find_id, part) for (_, find_id), part in grouped.items()]

    def open_up_to(self, index: int) -> bool:
        """Whether a chunk of this pull or of one before it is still in doubt."""
        return any(state.open for state in self.pulls[: index + 1])
