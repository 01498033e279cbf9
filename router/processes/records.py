# SPDX-License-Identifier: Apache-2.0
"""Questions about requests, and their answers, between the keeper and the processes that know. Values only."""

from __future__ import annotations

import msgspec

DECISIONS = "decisions"
DECISION = "decision"
QUEUE = "queue"
REPORTS = "reports"
TRIALS = "trials"
TROUBLES = "troubles"


class DecisionsWanted(msgspec.Struct, frozen=True):
    """The newest records that fit every given filter."""

    limit: int
    model: str | None
    worker: str | None
    path: str | None


class ShownRecord(msgspec.Struct, frozen=True):
    """A record as the admin API shows it."""

    time_unix_s: float
    shown: msgspec.Raw


class TenantQueue(msgspec.Struct, frozen=True):
    """As ``WaitingRoom.view`` has it."""

    tenant: str
    waiting: int
    waiting_prefill_s: float
    oldest_wait_s: float | None
    in_flight: int


class Queue(msgspec.Struct, frozen=True):
    waiting: int
    max_waiting: int
    tenants: list[TenantQueue]


def merged_queues(queues: list[Queue]) -> Queue:
    """The queues of several processes as one."""
    tenants: dict[str, TenantQueue] = {}
    for row in (row for queue in queues for row in queue.tenants):
        known = tenants.get(row.tenant)
        if known is None:
            tenants[row.tenant] = row
            continue
        waits = [one for one in (known.oldest_wait_s, row.oldest_wait_s) if one is not None]
        tenants[row.tenant] = TenantQueue(
            row.tenant,
            known.waiting + row.waiting,
            known.waiting_prefill_s + row.waiting_prefill_s,
            max(waits, default=None),
            known.in_flight + row.in_flight,
        )
    return Queue(
        sum(queue.waiting for queue in queues),
        sum(queue.max_waiting for queue in queues),
        [tenants[name] for name in sorted(tenants)],
    )
