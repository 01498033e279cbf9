# SPDX-License-Identifier: Apache-2.0
"""The workers that one source brought into the fleet. Runs on the fleet's event loop."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from router.fleet.discovery.targets import Add, Remove, Replace, Restart, SetReady, Step, Target, by_id, steps
from router.fleet.fleet import Fleet

_log = logging.getLogger(__name__)


class Roster:
    """Makes the fleet what a source wants it to be, and leaves workers of others alone."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[str, Target] = {}
        self.clashes: tuple[str, ...] = ()
        """Names that the fleet has from elsewhere, as of the last ``set``."""

    def __len__(self) -> int:
        return len(self._known)

    def set(self, targets: Iterable[Target]) -> bool:
        """Add, change and remove; whether anything was done. O(known + targets)."""
        wanted = by_id(targets)
        foreign = [name for name in wanted if name not in self._known and self._fleet.get(name) is not None]
        for name in foreign:
            if name not in self.clashes:
                _log.warning("worker %s is in the fleet already, from elsewhere; it is left as it is", name)
            del wanted[name]
        self.clashes = tuple(foreign)
        todo = list(steps(self._known, wanted))
        for step in todo:
            self._take(step)
        for name, target in wanted.items():
            known = self._known.get(name)
            if known is not None and target.incarnation:
                self._known[name] = replace(known, incarnation=target.incarnation)
        return bool(todo)

    def _take(self, step: Step) -> None:
        match step:
            case Remove(worker_id):
                del self._known[worker_id]
                self._fleet.remove(worker_id)
                _log.info("worker %s is gone", worker_id)
            case Replace(target):
                self._known[target.spec.id] = target
                self._fleet.replace(target.spec)
                self._fleet.set_ready(target.spec.id, target.ready)
                _log.info("worker %s changed", target.spec.id)
            case Restart(worker_id):
                self._fleet.restarted(worker_id)
                _log.info("worker %s restarted", worker_id)
            case SetReady(worker_id, ready):
                self._known[worker_id] = replace(self._known[worker_id], ready=ready)
                self._fleet.set_ready(worker_id, ready)
            case Add(target):
                self._known[target.spec.id] = target
                self._fleet.add(target.spec)
                _log.info("worker %s is new", target.spec.id)
