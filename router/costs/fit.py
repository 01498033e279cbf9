# SPDX-License-Identifier: Apache-2.0
"""Constants of the cost model from measured rows of (tokens, recompute seconds, pull seconds). Pure.

Recompute is ``start + a n + b n^2 / 2``: least squares of the relative error, with constants that may not be
negative. Pull is ``floor + c n``: the median of the slopes of all pairs and the median of what is left (Theil and
Sen), since single measurements of a transfer are sometimes far off.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.costs.profile import MeasuredRow


@dataclass(frozen=True, slots=True)
class RecomputeFit:
    """Seconds to prefill n tokens from nothing."""

    start_s: float
    s_per_token: float
    s_per_token_squared: float

    def seconds(self, tokens: int) -> float:
        return self.start_s + self.s_per_token * tokens + self.s_per_token_squared * tokens * tokens / 2


@dataclass(frozen=True, slots=True)
class PullFit:
    """Seconds until the first token when n tokens are pulled from an idle, connected peer."""

    floor_s: float
    s_per_token: float

    def seconds(self, tokens: int) -> float:
        return self.floor_s + self.s_per_token * tokens


def fit_recompute(rows: Sequence[MeasuredRow], start_limit_s: float | None = None) -> RecomputeFit:
    """The best of all non-negative solutions: those with some constants held at zero are tried too.

    ``start_limit_s``: the start is also part of a pull's floor, so it cannot be longer than that leaves room for.

    Raises:
        ValueError: fewer than three rows.
    """
    if len(rows) < 3:
        raise ValueError("three constants need three rows")
    free = _best(rows, 0.0, itertools.product((False, True), repeat=3))
    if start_limit_s is None or free.start_s <= start_limit_s:
        return free
    return _best(rows, start_limit_s, ((False, a, b) for a in (False, True) for b in (False, True)))


def _best(rows: Sequence[MeasuredRow], start_s: float, choices: Iterable[tuple[bool, ...]]) -> RecomputeFit:
    best: tuple[float, RecomputeFit] | None = None
    for used in choices:
        constants = _least_squares(rows, start_s, [i for i, use in enumerate(used) if use])
        if constants is None or min(constants) < 0:
            continue
        constants[0] += start_s
        fit = RecomputeFit(*constants)
        error = sum((fit.seconds(row.tokens) / row.recompute_s - 1) ** 2 for row in rows)
        if best is None or error < best[0]:
            best = (error, fit)
    if best is None:
        raise ValueError("no constants fit these rows")
    return best[1]


def fit_pull(rows: Sequence[MeasuredRow]) -> PullFit:
    """Median slope, never negative, and the median floor that goes with it.

    Raises:
        ValueError: fewer than two rows.
    """
    if len(rows) < 2:
        raise ValueError("two constants need two rows")
    slopes = [(b.pull_s - a.pull_s) / (b.tokens - a.tokens) for a, b in itertools.combinations(rows, 2)]
    slope = max(statistics.median(slopes), 0.0)
    return PullFit(statistics.median(row.pull_s - slope * row.tokens for row in rows), slope)


def _least_squares(rows: Sequence[MeasuredRow], start_s: float, columns: Sequence[int]) -> list[float] | None:
    """Weighted normal equations over the chosen columns of (1, n, n^2 / 2), solved by elimination.

    ``start_s`` is taken off every row first.
    """
    if not columns:
        return None
    design = [[(1.0, row.tokens, row.tokens**2 / 2)[c] / row.recompute_s for c in columns] for row in rows]
    size = len(columns)
    scale = [max(abs(line[i]) for line in design) for i in range(size)]
    design = [[line[i] / scale[i] for i in range(size)] for line in design]
    targets = [1 - start_s / row.recompute_s for row in rows]
    matrix = [
        [sum(line[i] * line[j] for line in design) for j in range(size)]
        + [sum(line[i] * target for line, target in zip(design, targets, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r, i=i: abs(matrix[r][i]))  # type: ignore[misc]
        if abs(matrix[pivot][i]) < 1e-12:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for r in range(size):
            if r != i:
                factor = matrix[r][i] / matrix[i][i]
                matrix[r] = [x - factor * y for x, y in zip(matrix[r], matrix[i], strict=True)]
    constants = [0.0, 0.0, 0.0]
    for i, column in enumerate(columns):
        constants[column] = matrix[i][size] / matrix[i][i] / scale[i]
    return constants
