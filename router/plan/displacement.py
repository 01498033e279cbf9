# SPDX-License-Identifier: Apache-2.0
"""What the blocks that a plan brings into HBM cost the requests whose blocks give way to them.

HBM is full of cached blocks in any fleet that has run for a while, so each token that is computed or loaded takes the
place of one that may be asked for again, which then has to be promoted from RAM, or comes from farther away, while
its request waits. A request that stays with the worker that holds its blocks displaces only its new tokens; one that
moves, by a pull or by computing again, displaces its whole prompt and leaves a copy behind that nobody needs. On an
idle fleet there is time to bring blocks back; on a busy one the waits add up like those for a GPU second, so the
weight is the same: ``gpu_seconds_weight`` plus the pressure.

``REBUILDS`` says how many promotions one displaced token stands for: some are never asked for again, others have left
RAM too by then and are computed. Measured in replay over the agentic sessions at 60, 85 and 105 % of capacity and both
Mooncake traces: 4 gave the best mean time to first token in all of them (0, 4 and 8 were tried).
"""

from __future__ import annotations

from router.costs.model import CostModel

REBUILDS = 4.0


def displaced_s(weight: float, costs: CostModel, brought_tokens: int) -> float:
    """Weighted seconds lost by others when ``brought_tokens`` come into HBM."""
    return REBUILDS * weight * costs.displaced_s(brought_tokens)
