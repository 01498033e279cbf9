# SPDX-License-Identifier: Apache-2.0
"""What a source of workers wants the fleet to be, and the steps that lead there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from router.fleet.worker import WorkerSpec


@dataclass(frozen=True, slots=True)
class Target:
    """One worker as its source has it now."""

    spec: WorkerSpec
    incarnation: str = ""
    """Another one means another process at the same place: nothing it held before counts. Empty: not known."""
    ready: bool = True
    """Whether it may be given requests."""


@dataclass(frozen=True, slots=True)
class Remove:
    worker_id: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Its address or its abilities changed: what is known of it begins anew."""

    target: Target


@dataclass(frozen=True, slots=True)
class Restart:
    """The same worker runs another process."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class SetReady:
    worker_id: str
    ready: bool


@dataclass(frozen=True, slots=True)
class Add:
    target: Target


Step = Remove | Replace | Restart | SetReady | Add


def steps(known: Mapping[str, Target], wanted: Mapping[str, Target]) -> Iterator[Step]:
    """From ``known`` to ``wanted``: removals first, so that an address is free before it is given again.

    A worker enters once it is ready. One that ceases to be stays, without requests: its process may live and hold
    what it held. O(known + wanted).
    """
    for worker_id in known:
        if worker_id not in wanted:
            yield Remove(worker_id)
    for worker_id, target in wanted.items():
        before = known.get(worker_id)
        if before is None:
            if target.ready:
                yield Add(target)
            continue
        if before.spec != target.spec:
            yield Replace(target)
            continue
        if before.incarnation and target.incarnation and before.incarnation != target.incarnation:
            yield Restart(worker_id)
        if before.ready != target.ready:
            yield SetReady(worker_id, target.ready)


def by_id(targets: Iterable[Target]) -> dict[str, Target]:
    """Targets by the name of their worker; the first of a name stays."""
    found: dict[str, Target] = {}
    for target in targets:
        found.setdefault(target.spec.id, target)
    return found
