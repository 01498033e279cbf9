# SPDX-License-Identifier: Apache-2.0
"""What a serving process tells the keeper: who it is, what it observed, answers to questions. Values only."""

from __future__ import annotations

import msgspec

from router.costs.observation import DecodeObservation, Observation, PullObservation, TierObservation
from router.request import Outcome


class OutcomeSeen(msgspec.Struct, tag="outcome", frozen=True):
    """How an attempt at a worker ended."""

    worker: str
    outcome: Outcome
    at_s: float


class TtftSeen(msgspec.Struct, tag="ttft", frozen=True):
    seen: Observation
    at_s: float


class DecodeSeen(msgspec.Struct, tag="decode", frozen=True):
    seen: DecodeObservation
    at_s: float


class PullSeen(msgspec.Struct, tag="pull", frozen=True):
    seen: PullObservation
    at_s: float


class TierSeen(msgspec.Struct, tag="tier", frozen=True):
    seen: TierObservation
    at_s: float


class TrustSeen(msgspec.Struct, tag="trust", frozen=True):
    """Of the tokens promised at a worker, those that were there: (promised, kept)."""

    worker: str
    before: tuple[int, int] | None
    """What was said of the same plan a moment ago; None for the first time."""
    after: tuple[int, int]
    at_s: float


class BlocksMadeSeen(msgspec.Struct, tag="blocks", frozen=True):
    """A prompt sent at that time was answered well, and must have made blocks there."""

    worker: str
    sent_at_s: float


class SentSeen(msgspec.Struct, tag="sent", frozen=True):
    """A request went to a rank whose map is approximate."""

    worker: str
    dp_rank: int
    token_ids: list[bytes]
    """Of each prompt, 4 bytes a token as in memory."""
    model: str
    lora: str | None
    cache_salt: str | None


Seen = SentSeen | OutcomeSeen | TtftSeen | DecodeSeen | PullSeen | TierSeen | TrustSeen | BlocksMadeSeen


class SampleTold(msgspec.Struct, array_like=True, frozen=True):
    """One number of a metric."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class FamilyTold(msgspec.Struct, array_like=True, frozen=True):
    """A metric; of counters and histograms what was added since the last time."""

    name: str
    text: str
    kind: str
    samples: list[SampleTold]


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first message of a process."""

    process: int
    """Its number among those that serve, from 0."""
    pid: int


class Batch(msgspec.Struct, tag="batch", frozen=True):
    """What was observed since the batch before."""

    number: int
    seen: list[Seen]
    dropped: int
    """Observations that did not fit since the batch before."""


class Counted(msgspec.Struct, tag="counted", frozen=True):
    """The metrics of the process."""

    families: list[FamilyTold]


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """To the question of that number; ``error`` where it could not be answered."""

    number: int
    body: bytes
    error: str | None = None


FromServing = Hello | Batch | Counted | Answer
