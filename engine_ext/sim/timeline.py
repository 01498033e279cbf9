# SPDX-License-Identifier: Apache-2.0
"""When the step under way ends, and those planned behind it of which nobody hears.

A step is *silent* when nothing comes out of it but time. The end of a run of silent steps is no event; the end of
the step behind it is, and is foretold where nothing can change its length.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from engine_ext.sim.noise import Noise
from engine_ext.sim.profile import SimProfile


class Timeline:
    """Ends of steps. One addition per planned step."""

    def __init__(self, profile: SimProfile, noise: Noise | None) -> None:
        self._profile = profile
        self._noise = noise
        self._ends_s: list[float] = []
        self.visible_s = 0.0
        """End of the next step that brings something."""

    def __bool__(self) -> bool:
        """Whether a step is under way."""
        return bool(self._ends_s)

    @property
    def end_s(self) -> float:
        """End of the last step planned; 0 without any."""
        return self._ends_s[-1] if self._ends_s else 0.0

    def begin(self, now_s: float, step_s: float) -> None:
        """A step begins, which would take ``step_s`` without noise."""
        self.visible_s = now_s + step_s * self._factors(1)[0]
        self._ends_s = [self.visible_s]

    def add_silent(self, sequences: int, context_tokens: int, steps: int, *, foretell: bool) -> None:
        """Behind a silent step of ``sequences`` sequences with that context: ``steps`` more, each a token longer.

        ``foretell``: and nothing will change the length of the step behind those.
        """
        fixed_s = self._profile.step_s(sequences, 0)
        per_token_s = self._profile.decode_s_per_context_token
        end_s = self._ends_s[0]
        factors = self._factors(steps + 2)
        for factor in factors[1:-1]:
            context_tokens += sequences
            end_s += (fixed_s + per_token_s * context_tokens) * factor
            self._ends_s.append(end_s)
        self.visible_s = end_s
        if foretell:
            context_tokens += sequences
            self.visible_s += (fixed_s + per_token_s * context_tokens) * factors[-1]

    def over_before(self, at_s: float) -> int:
        """Planned steps that end before a time."""
        return bisect_left(self._ends_s, at_s)

    def over_by(self, at_s: float) -> int:
        """Planned steps that end at a time or before."""
        return bisect_right(self._ends_s, at_s)

    def cut(self, over: int) -> int:
        """``over`` of the planned steps are over: the one behind them is the last now. Returns how many were taken."""
        if not self._ends_s:
            return 0
        taken = min(over, len(self._ends_s) - 1)
        self._ends_s = [self._ends_s[taken]]
        self.visible_s = self._ends_s[0]
        self._take(taken)
        return taken

    def end(self) -> int:
        """All of them are over. Returns how many they were."""
        taken = len(self._ends_s)
        self._ends_s = []
        self._take(taken)
        return taken

    def _take(self, steps: int) -> None:
        if self._noise is not None:
            self._noise.steps_taken(steps)

    def _factors(self, steps: int) -> Sequence[float]:
        """Noise of the step under way and of those behind it."""
        return [1.0] * steps if self._noise is None else self._noise.step_factors(steps)
