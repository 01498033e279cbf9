# SPDX-License-Identifier: Apache-2.0
"""What the scheduler decides: who takes part in the next step, and what is left of the queue."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine_ext.sim.request import Live


@dataclass(slots=True)
class Batch:
    """One step."""

    parts: list[tuple[Live, int]] = field(default_factory=list)
    """Requests scheduled by themselves, and how many tokens of each are computed."""
    due: list[Live] = field(default_factory=list)
    """Members of the decode set that this step does more to than compute a token."""
    decodes: int = 0
    """Members of the decode set; 0 when it takes no part."""

    def __bool__(self) -> bool:
        return bool(self.parts) or self.decodes > 0


class Queue(enum.Enum):
    """What the queue means for the next step, if nothing happens until then."""

    QUIET = "quiet"  # nobody could be admitted, whatever becomes of the blocks
    BLOCKED = "blocked"  # the first one lacks blocks: it may find them when any block changes hands
    OPEN = "open"  # the next step has to look
