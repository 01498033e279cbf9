# SPDX-License-Identifier: Apache-2.0
"""How soon chunks are read again, learnt by class and age, and what a place in the tier is worth because of it.

Of the chunks of one class that reach an age bucket, some are read again within it: the share is the chance of reuse in
that bucket. From there on, with survival S and the buckets' widths w, keeping a chunk until the end of bucket e gives

    reuses  = sum of S_i * p_i          seconds = sum of S_i * w_i * (1 - p_i / 2)

and the rate of a bucket is the best reuses / seconds over all e: the index of Gittins (1979), which for a single
resource that is held until reuse or eviction is the order to give things up in. Where rates only fall with age it is
the present rate, and the order that of least recent use; where they first rise, as behind a user's pause for thought,
it keeps what is soon due and gives up something younger. (Beckmann et al., LHD, NSDI 2018, learn the same kind of
density from hits and evictions; here evicted chunks are watched on, so that old ages are seen too.)
"""

from __future__ import annotations

from .settings import Settings


class ReuseModel:
    """Classes are small integers: turn and forks, then PRIVATE, then PINNED."""

    def __init__(self, capacity: int, settings: Settings) -> None:
        self._settings = settings
        self.private_class = settings.turns * settings.forks
        self.pinned_class = self.private_class + 1
        classes = self.pinned_class + 1
        steps = settings.doublings * settings.ages_per_doubling + 1
        self.ends_s = [settings.first_age_s * 2.0 ** (i / settings.ages_per_doubling) for i in range(steps)]
        """Where each bucket but the last ends."""
        self.last_bucket = steps
        edges_s = [0.0, *self.ends_s, 2 * self.ends_s[-1]]
        self._widths_s = [edges_s[i + 1] - edges_s[i] for i in range(steps + 1)]
        self._reused = [[0.0] * (steps + 1) for _ in range(classes)]
        self._reached = [[0.0] * (steps + 1) for _ in range(classes)]
        self._weight = max(settings.prior_weight * capacity, 1.0)
        self._memory = max(settings.memory * capacity, 1.0)
        self._events = 0
        self.rates: list[list[float]] = []
        """By class and bucket: reuses per second."""
        self.refresh()

    def class_of(self, turn: int, forks: int) -> int:
        """`turn` of the last request that read the chunk; `forks`: how many others branched off behind it."""
        settings = self._settings
        return min(turn, settings.turns - 1) * settings.forks + min(forks.bit_length(), settings.forks - 1)

    def reached(self, reuse_class: int, bucket: int, chunks: int) -> None:
        """So many chunks came of that age; negative to take it back."""
        self._reached[reuse_class][bucket] += chunks

    def reused(self, reuse_class: int, bucket: int) -> None:
        """A chunk was read again at that age."""
        self._reused[reuse_class][bucket] += 1
        self._events += 1

    def refresh(self) -> None:
        """Compute the rates; halve the counts when due. O(classes * buckets ** 2), both constants."""
        everywhere = self._everywhere()
        self.rates = [self._rates(self._chances(one, everywhere)) for one in range(len(self._reused))]
        if self._events > self._memory:
            self._events //= 2
            for row in (*self._reused, *self._reached):
                row[:] = [count / 2 for count in row]

    def _everywhere(self) -> list[float]:
        """Chances of all plain classes together: what a class is taken for until it has shown its own."""
        plain = range(self.private_class)
        prior = self._weight * self._settings.prior_reuse
        return [
            (sum(self._reused[one][bucket] for one in plain) + prior)
            / (sum(self._reached[one][bucket] for one in plain) + self._weight)
            for bucket in range(self.last_bucket + 1)
        ]

    def _chances(self, reuse_class: int, everywhere: list[float]) -> list[float]:
        if reuse_class == self.private_class:
            everywhere = [self._settings.private_reuse] * len(everywhere)
        return [
            min(1.0, max(0.0, (reused + self._weight * usual) / (max(reached, 0.0) + self._weight)))
            for reused, reached, usual in zip(
                self._reused[reuse_class], self._reached[reuse_class], everywhere, strict=True
            )
        ]

    def _rates(self, chances: list[float]) -> list[float]:
        steps = list(zip(chances, self._widths_s, strict=True))
        rates = []
        for first in range(len(steps)):
            survive, reuses, seconds, best = 1.0, 0.0, 0.0, 0.0
            for chance, width_s in steps[first:]:
                reuses += survive * chance
                seconds += survive * width_s * (1 - chance / 2)
                survive *= 1 - chance
                best = max(best, reuses / seconds)
            rates.append(best)
        return rates
