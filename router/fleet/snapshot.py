# SPDX-License-Identifier: Apache-2.0
"""Lists of workers that are made once and used for many requests.

Whoever prepares something for a list (the native planner does) may keep it as long as it is given the same list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import overload

from router.fleet.worker import WorkerStatus


class _Workers(Sequence[WorkerStatus]):
    """Equal to any sequence of the same statuses."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[WorkerStatus]:
        raise NotImplementedError

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    @overload
    def __getitem__(self, index: int) -> WorkerStatus: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WorkerStatus]: ...
    def __getitem__(self, index: int | slice) -> WorkerStatus | Sequence[WorkerStatus]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class Snapshot(_Workers):
    """Statuses in which nothing that planning looks at has changed since this was made.

    The fleet gives out another one after every such change; gauges may change within.
    """

    __slots__ = ("_statuses",)

    def __init__(self, statuses: Collection[WorkerStatus] = ()) -> None:
        self._statuses = tuple(statuses)

    def __iter__(self) -> Iterator[WorkerStatus]:
        return iter(self._statuses)

    def __len__(self) -> int:
        return len(self._statuses)

    def __bool__(self) -> bool:
        return bool(self._statuses)


class Excluding(_Workers):
    """A snapshot without some workers; the snapshot in it is still the same object."""

    __slots__ = ("names", "snapshot")

    def __init__(self, snapshot: Snapshot, names: Collection[str]) -> None:
        self.snapshot = snapshot
        self.names = frozenset(names)

    def __iter__(self) -> Iterator[WorkerStatus]:
        return (status for status in self.snapshot if status.spec.id not in self.names)


def excluding(workers: Sequence[WorkerStatus], names: Collection[str]) -> Sequence[WorkerStatus]:
    """``workers`` without those of these names."""
    if not names:
        return workers
    if isinstance(workers, Excluding):
        return Excluding(workers.snapshot, workers.names.union(names))
    if isinstance(workers, Snapshot):
        return Excluding(workers, names)
    return [status for status in workers if status.spec.id not in names]
