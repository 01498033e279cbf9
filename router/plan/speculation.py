# SPDX-License-Identifier: Apache-2.0
"""Blocks that a rank does not hold yet but will: those of prompts that were sent there a moment ago. Pure.

Without them every request of a burst with one prefix is placed as if it were the first: the events that tell of its
blocks come when the engine schedules them, which may be seconds later. The blocks count from the decision on, until
the request that brings them ends or ``SPECULATIVE_S`` have passed; from then on only events tell. A rank that
disappoints, because it caches nothing or has given up what it began, is trusted less (``router.decisions.trust``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.plan.candidate import Residence

SPECULATIVE_S = 60.0
"""Longer than a prompt waits on a fleet that is of use; short against the time for which a lost request is counted."""


def lasting_s(speculative_s: float) -> float:
    """For how long; 0 as configured is not at all, not even for what is sent at the same instant."""
    return speculative_s or -math.inf


def expected(known: Residence, blocks: int) -> Residence:
    """``known`` with the first ``blocks`` of the prompt in HBM."""
    if not blocks:
        return known
    end = max([blocks, *(span[1] for span in known.hbm if span[0] <= blocks)])
    beyond = tuple(span for span in known.hbm if span[0] > blocks)
    return Residence(((0, end), *beyond), known.ram, known.storage)


def hbm_blocks(residence: Sequence[Residence]) -> int:
    """Blocks of all prompts that are in HBM."""
    return sum(end - start for one in residence for start, end in one.hbm)
