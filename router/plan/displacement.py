# SPDX-License-Identifier: Apache-2.0
"""What the room that a request takes in HBM costs others: those whose cached blocks give way, and those that wait.

**Cached blocks that give way** (``displaced_s``).
HBM is full of cached blocks in any fleet that has run for a while, so each token that is computed or loaded takes the
place of one that may be asked for again, which then has to be promoted from RAM, or comes from farther away, while
its request waits. A request that stays with the worker that holds its blocks displaces only its new tokens; one that
moves, by a pull or by computing again, displaces its whole prompt and leaves a copy behind that nobody needs. On an
idle fleet there is time to bring blocks back; on a busy one the waits add up like those for a GPU second, so the
weight is the same: ``gpu_seconds_weight`` plus the pressure.

``REBUILDS`` says how many promotions one displaced token stands for: some are never asked for again, others have left
RAM too by then and are computed. Measured in replay over the agentic sessions at 60, 85 and 105 % of capacity and both
Mooncake traces: 4 gave the best mean time to first token in all of them (0, 4 and 8 were tried).

**Requests that wait for room** (``occupied_s``). Blocks of requests in flight cannot give way, so once they fill HBM
the next request waits until one ends, however soon the GPU would be free. What a request shares with others in flight
at the rank is there already; only its fresh tokens take room, for as long as its answer takes. So

    occupied = w(u) * fresh tokens / capacity * output tokens * seconds per output token
    w(u)     = WAITS * min(u^5 / (1 - u), MOST_WAITS)

where u is the share of HBM that the distinct tokens in flight fill: nothing while there is room, and near full HBM as
a queue grows (u / (1 - u)) that seldom forms before (u^4). Sessions that share a prefix so gather at one worker, while
elsewhere each would take room for its whole prompt. Measured in replay over the agentic sessions at 85 and 105 % of
capacity on 8 workers: weights 1 to 8, powers 1, 2 and 5 and bounds 3 to 40 were tried; these gave the best mean time to
first token at 105 % (1.9 s; 11.9 s without the term) and cost nothing at 85 %. Where the capacity is not known the term is 0. It depends on the worker and not
on the path, so it is the same for all plans of a candidate.
"""

from __future__ import annotations

from typing import Protocol

from router.costs.model import CostModel

REBUILDS = 4.0
WAITS, MOST_WAITS = 4.0, 20.0
FULL = 0.999


class Occupied(Protocol):
    """What of a candidate says how its HBM is occupied; see ``router.plan.candidate.Candidate``."""

    @property
    def decodes(self) -> int: ...
    @property
    def fresh_tokens(self) -> int: ...
    @property
    def resident_tokens(self) -> int: ...
    @property
    def kv_capacity_tokens(self) -> int: ...


def displaced_s(weight: float, costs: CostModel, brought_tokens: int) -> float:
    """Weighted seconds lost by others when ``brought_tokens`` come into HBM."""
    return REBUILDS * weight * costs.displaced_s(brought_tokens)


def occupied_s(costs: CostModel, candidate: Occupied, output_tokens: int) -> float:
    """Seconds lost by those who wait for the room that the request's fresh tokens take at ``candidate``."""
    capacity = candidate.kv_capacity_tokens
    if not capacity:
        return 0.0
    used = min(candidate.resident_tokens / capacity, FULL)
    waits = WAITS * min(used * used * used * used * used / (1 - used), MOST_WAITS)
    stay_s = output_tokens * costs.decode_step_s(candidate.decodes + 1)
    return waits * (candidate.fresh_tokens / capacity) * stay_s
