# SPDX-License-Identifier: Apache-2.0
"""What makes a simulated engine's times uneven: log-normal factors with mean 1, from a source of chance given to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random


class Noise:
    """Factors of one engine. Equal sources of chance give equal factors, whatever is asked for ahead of time."""

    def __init__(self, random: Random, *, step_sigma: float = 0.0, transfer_sigma: float = 0.0) -> None:
        """A sigma is the standard deviation of the factor, which has mean 1.

        Raises:
            ValueError: a negative one.
        """
        if step_sigma < 0 or transfer_sigma < 0:
            raise ValueError(f"sigmas of {step_sigma} and {transfer_sigma}: they must be at least 0")
        # Two sources, so that the order of steps and transfers does not matter.
        self._steps, self._transfers = Random(random.random()), Random(random.random())
        self._step_log_sigma = math.sqrt(math.log1p(step_sigma**2))
        self._transfer_log_sigma = math.sqrt(math.log1p(transfer_sigma**2))
        self._ahead: list[float] = []

    def step_factors(self, count: int) -> Sequence[float]:
        """Factors of the next ``count`` steps, which are not yet taken."""
        while len(self._ahead) < count:
            self._ahead.append(_draw(self._steps, self._step_log_sigma))
        return self._ahead[:count]

    def steps_taken(self, count: int) -> None:
        """That many steps are over."""
        del self._ahead[:count]

    def transfer_factor(self) -> float:
        """Of the next transfer."""
        return _draw(self._transfers, self._transfer_log_sigma)


def _draw(random: Random, log_sigma: float) -> float:
    return random.lognormvariate(-(log_sigma**2) / 2, log_sigma) if log_sigma else 1.0
