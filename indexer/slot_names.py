# SPDX-License-Identifier: Apache-2.0
"""How a slot is named in an index that other processes read: whose it is."""

from __future__ import annotations

from dataclasses import dataclass

from indexer.identity import WorkerId

_STORE = "store"
_RANK = "rank"


@dataclass(frozen=True, slots=True)
class SlotName:
    """A rank of an incarnation of a worker, or the store that a worker attaches (``is_store``; rank 0)."""

    worker: WorkerId
    dp_rank: int
    incarnation: int
    is_store: bool = False

    def encode(self) -> str:
        """``rank 2 5 worker`` or ``store 0 5 worker``. The index keeps 320 bytes of it."""
        return f"{_STORE if self.is_store else _RANK} {self.dp_rank} {self.incarnation} {self.worker}"


def parse_slot_name(name: bytes) -> SlotName | None:
    """What ``encode`` gave; None for anything else."""
    parts = name.decode(errors="replace").split(" ", 3)
    if (
        len(parts) != 4
        or parts[0] not in (_STORE, _RANK)
        or not (parts[1].isdecimal() and parts[2].isdecimal())
    ):
        return None
    return SlotName(WorkerId(parts[3]), int(parts[1]), int(parts[2]), parts[0] == _STORE)
