# SPDX-License-Identifier: Apache-2.0
"""A question about a whole fleet whose candidates stay in the native core until someone looks at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from indexer import _core
from router.plan.candidate import Candidate, Question, Source
from router.plan.planner import Planned

Decide = Callable[[Question, int], _core.Outcome]
"""Ranks the fleet for a question, with the seed of the order of equals."""


@dataclass(frozen=True, slots=True)
class FleetAsked:
    """What ``prompts`` asks of the native core."""

    token_ids: Sequence[object]
    model: str = ""
    lora: str = ""
    first_block_keys: Sequence[str] = ()
    may_pull: bool = False
    estimated_tokens: int = 0
    pinned_rank: int | None = None


class FleetCandidates(Sequence[Candidate]):
    """Who could take the request: once ranked, the best in their order, and whoever could have most of it cached.

    Looking at them before they are ranked is an error, since only then it is known which they are.
    """

    def __init__(self, decide: Decide, types: _core.PlanTypes, names: _core.Names) -> None:
        """``types`` and ``names``: what Python values of an outcome are made of."""
        self._decide = decide
        self._types, self._names = types, names
        self._outcome: _core.Outcome | None = None
        self._made: list[Candidate] | None = None

    @property
    def sources(self) -> FleetSources:
        """The sources that are tried. Made anew each time: kept here, they would be a cycle of garbage per request."""
        return FleetSources(self)

    def rank(self, question: Question, seed: int) -> Planned:
        """The best plans of the fleet.

        Raises:
            ValueError: there are no candidates.
        """
        outcome = self._outcome = self._decide(question, seed)
        self._made = None
        if not outcome.count:
            raise ValueError("a decision needs candidates")
        return Planned(outcome.plans(self._types, self._names), outcome.count)

    @property
    def outcome(self) -> _core.Outcome:
        """What the core answered.

        Raises:
            RuntimeError: it was not asked yet.
        """
        if self._outcome is None:
            raise RuntimeError("the candidates of a fleet are known only after they were ranked")
        return self._outcome

    def made_sources(self) -> list[Source]:
        """The sources that were tried."""
        return self.outcome.sources(self._types, self._names)

    def _all(self) -> list[Candidate]:
        if self._made is None:
            self._made = self.outcome.candidates(self._types, self._names)
        return self._made

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._all()[index]


class FleetSources(Sequence[Source]):
    """The sources that were tried, once the candidates are ranked."""

    def __init__(self, candidates: FleetCandidates) -> None:
        self._candidates = candidates
        self._made: list[Source] | None = None

    def _all(self) -> list[Source]:
        if self._made is None:
            self._made = self._candidates.made_sources()
        return self._made

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> Source: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Source]: ...
    def __getitem__(self, index: int | slice) -> Source | Sequence[Source]:
        return self._all()[index]
