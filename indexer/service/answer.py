# SPDX-License-Identifier: Apache-2.0
"""From runs of blocks to the answer of ``/query``. Pure.

Tokens in ``scores`` and ``gpu`` are the leading run in HBM; ``cpu`` and ``disk`` are how far the prompt reaches when
RAM continues it, and then storage. RAM in doubt does not count, and is told apart in ``tiers``, where blocks are
counted wherever in the prompt they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from indexer.identity import Tier, WorkerId
from indexer.index import Run
from indexer.service.registry import Place

_DOUBTFUL = 3

Rows = dict[tuple[WorkerId, int], "RankRow"]


@dataclass(slots=True)
class RankRow:
    """What one rank holds of a prompt: spans of blocks by tier, the doubtful of RAM last."""

    instance: str
    spans: tuple[list[tuple[int, int]], ...] = field(default_factory=lambda: ([], [], [], []))

    def reach(self) -> tuple[int, int, int]:
        """Blocks reached with HBM alone, with RAM after it, with storage after both."""
        hbm = _reach(self.spans[Tier.HBM], 0)
        ram = _reach(self.spans[Tier.RAM], hbm)
        return hbm, ram, _reach(self.spans[Tier.STORAGE], ram)

    def blocks(self) -> dict[str, int]:
        hbm, ram, storage, doubtful_ram = self.spans
        return {
            "hbm": _blocks(hbm),
            "ram": _blocks(ram),
            "storage": _blocks(storage),
            "doubtful_ram": _blocks(doubtful_ram),
        }


def rows(runs: Iterable[Run], places: Mapping[int, Place]) -> Rows:
    """Runs by rank. A store counts for every rank of its stream; O(runs + stores' runs * ranks)."""
    found: Rows = {}
    stores: list[tuple[Place, int, int]] = []
    for slot, tier, start, end, doubtful in runs:
        place = places.get(slot)
        if place is None:
            continue
        if place.is_store:
            stores.append((place, start, end))
            continue
        row = found.get((place.registration, place.dp_rank))
        if row is None:
            row = found[place.registration, place.dp_rank] = RankRow(place.instance)
        row.spans[_DOUBTFUL if doubtful else tier].append((start, end))
    for place, start, end in stores:
        found.setdefault((place.registration, place.dp_rank), RankRow(place.instance))
        for (registration, _), row in found.items():
            if registration == place.registration:
                row.spans[Tier.STORAGE].append((start, end))
    return found


def answer(found: Rows, block_size: int) -> dict[str, object]:
    """``scores``, ``frequencies`` and ``instances`` of an answer."""
    scores: dict[str, dict[str, int]] = {}
    instances: dict[str, dict[str, Any]] = {}
    for (_, dp_rank), row in found.items():
        hbm, ram, storage = row.reach()
        if not storage:
            continue
        name, rank = row.instance, str(dp_rank)
        entry = instances.get(name)
        if entry is None:
            entry = instances[name] = {
                "longest_matched": 0,
                "gpu": 0,
                "dp": {},
                "cpu": 0,
                "disk": 0,
                "tiers": {},
            }
        entry["gpu"] = max(entry["gpu"], hbm * block_size)
        entry["cpu"] = max(entry["cpu"], ram * block_size)
        entry["disk"] = entry["longest_matched"] = max(entry["disk"], storage * block_size)
        entry["tiers"][rank] = row.blocks()
        if hbm:
            ranks = entry["dp"]
            ranks[rank] = max(ranks.get(rank, 0), hbm * block_size)
            scores[name] = ranks
    return {"scores": scores, "frequencies": [], "instances": instances}


def _reach(spans: list[tuple[int, int]], position: int) -> int:
    for start, end in spans:
        if start <= position < end:
            return end
    return position


def _blocks(spans: list[tuple[int, int]]) -> int:
    count = 0
    for start, end in spans:
        count += end - start
    return count
