# SPDX-License-Identifier: Apache-2.0
"""Where maps come from, in a process that serves: the keeper judges, and writes what our decisions stand in for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.fleet.worker import WorkerStatus
from router.map_sources import APPROXIMATE
from router.plan.decider import Prompts
from router.processes.seen import SentSeen
from router.processes.told import RankMapTold


class FollowedMaps:
    """Implements ``router.map_sources.Maps``."""

    def __init__(self, tell: Callable[[SentSeen], object]) -> None:
        self._tell = tell
        self._sources: dict[str, list[str | None]] = {}

    def put(self, worker: str, ranks: Sequence[RankMapTold]) -> None:
        """As the keeper has them."""
        if ranks:
            self._sources[worker] = [one.source for one in ranks]
        else:
            self._sources.pop(worker, None)

    def of(self, worker: str, dp_rank: int) -> str | None:
        sources = self._sources.get(worker, ())
        return sources[dp_rank] if dp_rank < len(sources) else None

    def sent(self, status: WorkerStatus, dp_rank: int, prompts: Prompts | None) -> None:
        """The token ids go to the keeper, who alone writes the index, where no events will tell of them."""
        if prompts is None or self.of(status.spec.id, dp_rank) != APPROXIMATE:
            return
        space = prompts.namespace
        ids = [one.tobytes() for one in prompts.token_ids]
        self._tell(SentSeen(status.spec.id, dp_rank, ids, space.model, space.lora, prompts.cache_salt))
