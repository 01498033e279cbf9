# SPDX-License-Identifier: Apache-2.0
"""What deciding again changed, summed up. Sums of parts of a log add up to those of the whole."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from router.decisions.what_if.choices import Choice
from router.decisions.what_if.logged import Unusable

PATHS = ("hbm", "ram", "peer", "storage", "recompute")


@dataclass(slots=True)
class Sums:
    """Of all choices on one side."""

    seconds: float = 0.0
    """Predicted times to first token."""
    gpu_s: float = 0.0
    """Seconds of prefill."""
    promoted_bytes: float = 0.0
    """From RAM to the GPU, whatever was loaded from below."""
    pulled_bytes: float = 0.0
    read_bytes: float = 0.0
    """From storage."""
    tokens: Counter[str] = field(default_factory=Counter)
    """By path."""

    def add(self, choice: Choice, prompt_tokens: int) -> None:
        placed, size = choice.placed, choice.kv_bytes_per_token
        self.seconds += choice.total_s
        self.gpu_s += choice.gpu_s
        self.promoted_bytes += (placed.ram + placed.peer + placed.storage) * size
        self.pulled_bytes += placed.peer * size
        self.read_bytes += placed.storage * size
        tokens = self.tokens
        for path, count in zip(PATHS, placed, strict=False):
            if count:
                tokens[path] += count
        tokens["recompute"] += max(prompt_tokens - placed.total, 0)

    def merge(self, other: Sums) -> None:
        self.seconds += other.seconds
        self.gpu_s += other.gpu_s
        self.promoted_bytes += other.promoted_bytes
        self.pulled_bytes += other.pulled_bytes
        self.read_bytes += other.read_bytes
        self.tokens.update(other.tokens)


@dataclass(frozen=True, slots=True)
class Flip:
    """A decision that came out differently."""

    id: str
    attempt: int
    recorded_s: float
    """As it was predicted when it was made."""
    before: Choice
    """The recorded choice, at the present constants."""
    after: Choice

    @property
    def won_s(self) -> float:
        return self.before.total_s - self.after.total_s


@dataclass(slots=True)
class Tally:
    """Of a log or a part of it."""

    most_flips: int
    """That are kept, those that win or lose most."""
    decisions: int = 0
    redecided: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Decisions that were left as they are, by reason."""
    flips: int = 0
    moved: int = 0
    """Flips to another worker or rank."""
    truncated: int = 0
    """Decisions made again that had more candidates than are kept."""
    unusable: Unusable = field(default_factory=Unusable)
    kept: Sums = field(default_factory=Sums)
    """Of decisions that came out as they were."""
    flipped_before: Sums = field(default_factory=Sums)
    flipped_after: Sums = field(default_factory=Sums)
    largest: list[Flip] = field(default_factory=list)

    def skip(self, reason: str) -> None:
        self.skipped[reason] += 1

    def keep(self, choice: Choice, prompt_tokens: int) -> None:
        """A decision that came out as it was."""
        self.redecided += 1
        self.kept.add(choice, prompt_tokens)

    def flip(self, flip: Flip, prompt_tokens: int) -> None:
        """A decision that came out differently."""
        self.redecided += 1
        self.flips += 1
        self.moved += (flip.before.worker, flip.before.dp_rank) != (flip.after.worker, flip.after.dp_rank)
        self.flipped_before.add(flip.before, prompt_tokens)
        self.flipped_after.add(flip.after, prompt_tokens)
        self.largest.append(flip)
        if len(self.largest) >= 2 * self.most_flips:
            self._keep_largest()

    def merge(self, other: Tally) -> None:
        """Add another part of the same log."""
        self.decisions += other.decisions
        self.redecided += other.redecided
        self.skipped.update(other.skipped)
        self.flips += other.flips
        self.moved += other.moved
        self.truncated += other.truncated
        self.unusable.unreadable += other.unusable.unreadable
        self.unusable.other_version += other.unusable.other_version
        self.kept.merge(other.kept)
        self.flipped_before.merge(other.flipped_before)
        self.flipped_after.merge(other.flipped_after)
        self.largest += other.largest
        self._keep_largest()

    def before(self) -> Sums:
        """Of all decisions made again, as recorded."""
        return _sum(self.kept, self.flipped_before)

    def after(self) -> Sums:
        """Of all decisions made again, as they came out."""
        return _sum(self.kept, self.flipped_after)

    def _keep_largest(self) -> None:
        self.largest = heapq.nlargest(self.most_flips, self.largest, key=_weight)


def _weight(flip: Flip) -> tuple[float, str]:
    return abs(flip.won_s), flip.id


def _sum(one: Sums, other: Sums) -> Sums:
    both = Sums()
    both.merge(one)
    both.merge(other)
    return both
