# SPDX-License-Identifier: Apache-2.0
"""What ``/workers`` says: one row an instance of a group, one listener for each of its streams.

A listener is ``pending`` until it connects and whenever the connection is broken, ``failed`` where it could not
subscribe at all. Beyond other indexers' fields it tells the replay endpoint, the newest sequence, and why a map is
partial or under suspicion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from indexer.holders import HolderTable, RankState
from indexer.identity import WorkerRank
from indexer.service.registry import Group, Registration
from indexer.stream import EventStream

STATUSES = ("failed", "pending", "active", "paused")
"""The first one found among its listeners is an instance's."""


class Streams(Protocol):
    """Running event streams (``indexer.subscriber.EventSubscriber``)."""

    def streams(self) -> Mapping[WorkerRank, EventStream]: ...


def worker_rows(groups: Iterable[Group], holders: HolderTable, streams: Streams) -> list[dict[str, object]]:
    """Rows of all groups, in order of registration."""
    running = streams.streams()
    return [row for group in groups for row in _group_rows(group, holders, running)]


def listener_status(one: Registration, state: RankState, running: Mapping[WorkerRank, EventStream]) -> str:
    """``active``, ``pending`` or ``failed``."""
    if WorkerRank(one.worker, one.dp_rank) not in running and state.partial is not None:
        return "failed"
    return "active" if state.connected else "pending"


def _group_rows(
    group: Group, holders: HolderTable, running: Mapping[WorkerRank, EventStream]
) -> Iterable[dict[str, object]]:
    instances: dict[int, dict[str, dict[str, object]]] = {}
    for one in group.registrations.values():
        state = holders.workers()[one.worker].ranks[one.dp_rank]
        listener = _listener(one, state, listener_status(one, state, running))
        instances.setdefault(one.instance_id, {})[str(one.dp_rank)] = listener
    for instance_id, listeners in instances.items():
        found = {listener["status"] for listener in listeners.values()}
        yield {
            "instance_id": instance_id,
            "source": "zmq",
            "status": next(status for status in STATUSES if status in found),
            "model_name": group.key.model,
            "tenant_id": group.key.tenant,
            "routing_group": group.key.tenant,
            "block_size": group.block_size,
            "endpoints": {rank: listener["endpoint"] for rank, listener in listeners.items()},
            "listeners": listeners,
        }


def _listener(one: Registration, state: RankState, status: str) -> dict[str, object]:
    optional = {
        "last_error": state.partial if status == "failed" else None,
        "replay_endpoint": one.replay_endpoint,
        "lora_name": one.lora or None,
        "seq": state.seq,
        "partial": state.partial,
        "suspect": state.suspect,
    }
    present = {name: value for name, value in optional.items() if value is not None}
    return {"endpoint": one.endpoint, "status": status, **present}
