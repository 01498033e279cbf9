# SPDX-License-Identifier: Apache-2.0
"""How the ranking is made: by predicted seconds, or, to compare with, by rules that do not look at the index."""

from __future__ import annotations

import itertools
from random import Random
from typing import Literal, Protocol

from router.plan.candidate import Question
from router.plan.planner import Planned, Planner

PolicyName = Literal["kv_aware", "round_robin", "least_load"]


class Policy(Protocol):
    """Ranks the candidates of a question."""

    @property
    def name(self) -> str: ...

    @property
    def looks_at_index(self) -> bool:
        """False: the request need not be tokenised."""

    def rank(self, question: Question, random: Random) -> Planned: ...


class KvAware:
    """Least predicted cost, path included."""

    name: PolicyName = "kv_aware"
    looks_at_index = True

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def rank(self, question: Question, random: Random) -> Planned:
        return self._planner.plan(question, random)


class RoundRobin:
    """Each worker in turn."""

    name: PolicyName = "round_robin"
    looks_at_index = False

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._turns = itertools.count()

    def rank(self, question: Question, random: Random) -> Planned:
        order = sorted(question.candidates, key=lambda candidate: (candidate.worker, candidate.dp_rank))
        turn = next(self._turns) % len(order)
        return Planned(tuple(self._planner.price_local(question, one) for one in order[turn:] + order[:turn]))


class LeastLoad:
    """Fewest requests in flight, equals by chance."""

    name: PolicyName = "least_load"
    looks_at_index = False

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def rank(self, question: Question, random: Random) -> Planned:
        order = sorted(question.candidates, key=lambda candidate: (candidate.in_flight, random.random()))
        return Planned(tuple(self._planner.price_local(question, candidate) for candidate in order))


def make_policy(name: PolicyName, planner: Planner) -> Policy:
    """The policy of that name."""
    policies: dict[PolicyName, type[KvAware | RoundRobin | LeastLoad]] = {
        "kv_aware": KvAware,
        "round_robin": RoundRobin,
        "least_load": LeastLoad,
    }
    return policies[name](planner)
