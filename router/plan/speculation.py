# SPDX-License-Identifier: Apache-2.0
"""Blocks that a rank does not hold yet but will: those of prompts that were sent there a moment ago. Pure.

vLLM files the blocks of a prompt as it schedules it, so whatever is scheduled behind it finds them. Events tell of them
only then, which may be seconds later: without this every request of a burst with one prefix would be placed as if it
were the first. The blocks count from the decision on, until the request that brings them ends or ``SPECULATIVE_S`` have
passed; from then on only events tell. While a request waits for a pull, vLLM lets others pass: its blocks count for
those that wait longer than the pull takes. (What loads from the worker's own tiers lets others pass too, but they load
the same.) A rank that disappoints, because it caches nothing or gave up what it began, is trusted less
(``router.decisions.trust``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.plan.candidate import Plan, Residence

SPECULATIVE_S = 60.0
"""Longer than a prompt waits on a fleet that is of use; short against the time for which a lost request is counted."""


def lasting_s(speculative_s: float) -> float:
    """For how long; 0 as configured is not at all, not even for what is sent at the same instant."""
    return speculative_s or -math.inf


def loading_s(plan: Plan) -> float:
    """From the decision until those behind the request find its blocks; infinite for a decode leg.

    What a prefill worker hands over comes when that one is done, which its own load says little of.
    """
    if plan.handover is not None:
        return math.inf
    terms = plan.terms
    if plan.source is None:
        return 0.0
    return terms.queue_s + terms.admit_s + terms.ram_s + terms.peer_s + terms.storage_s


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
