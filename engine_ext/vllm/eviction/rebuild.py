# SPDX-License-Identifier: Apache-2.0
"""What computing a chunk again costs, relative to the first of a prompt. Pure.

A token behind `n` others takes a + b * n seconds (attention), so a prompt of n tokens takes a * n + b * n ** 2 / 2,
and seconds / n is a straight line in n. Only b / a matters here; it is fitted to what the router predicts.
"""

from __future__ import annotations

_FADE = 0.999
_LEAST_WEIGHT = 20.0
_LEAST_SPREAD = 0.05


class RebuildCost:
    """Least squares with fading sums; the given ratio until there were enough prompts of different lengths."""

    def __init__(self, attention_per_token: float) -> None:
        self._ratio = attention_per_token
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def attention_per_token(self) -> float:
        """The ratio b / a."""
        return self._ratio

    def weight(self, end_token: int) -> float:
        """Of a chunk that ends there; 1 for the beginning."""
        return 1.0 + self._ratio * end_token

    def observe(self, tokens: int, seconds: float) -> None:
        """Computing a whole prompt is expected to take so long. Non-positive values do not count."""
        if tokens <= 0 or seconds <= 0:
            return
        x, y = float(tokens), seconds / tokens
        self._n = self._n * _FADE + 1
        self._x = self._x * _FADE + x
        self._y = self._y * _FADE + y
        self._xx = self._xx * _FADE + x * x
        self._xy = self._xy * _FADE + x * y
        spread = self._xx / self._n - (self._x / self._n) ** 2
        if self._n < _LEAST_WEIGHT or spread < _LEAST_SPREAD * (self._x / self._n) ** 2:
            return
        slope = (self._xy / self._n - self._x * self._y / self._n**2) / spread
        base = self._y / self._n - slope * self._x / self._n
        if base > 0 and slope >= 0:
            self._ratio = 2 * slope / base
