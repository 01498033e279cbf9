# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting requests are let through. Pure: time is an argument, nothing here sleeps.

Strict priority first. Within one priority, start-time fair queueing by tenant (Goyal, Vin and Cheng, "Start-time
Fair Queuing", SIGCOMM 1996): the first ticket of a tenant has a start tag, the lowest start tag goes next, and a
tenant's tag grows by cost / weight with each of its tickets that goes. So, over any time in which two tenants f and m
both have tickets waiting, what they got differs by

    |W_f / w_f  -  W_m / w_m|  <=  c_f / w_f + c_m / w_m          W: cost let through, w: weight, c: largest cost

whatever arrives. Within a tenant the order is that of arrival. Only what goes is charged, so a ticket that leaves has
cost its tenant nothing.

Tickets of one ``pool`` compete for the same workers, give or take a few: those of one ``lane`` can go to just the same
ones. Pools do not hold each other up, and within a pool a ticket for which nothing is open lets those of other lanes
and other tenants pass.

Costs, with n tickets waiting, f tenants and l lanes with tickets: enter O(f), or O(n) when full; take
O(f (log f + l log l)); leave O(f); expire O(n).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PayloadT = TypeVar("PayloadT")


@dataclass(slots=True, eq=False)
class Ticket(Generic[PayloadT]):
    """One waiting request. It ends exactly once: taken, expired, pushed out or left."""

    tenant: str
    weight: float
    priority: int
    """Higher goes first."""
    pool: str
    """Tickets of one pool compete with each other."""
    cost_s: float
    """Seconds that it will take of a worker."""
    since_s: float
    deadline_s: float
    payload: PayloadT
    lane: str = ""
    """Tickets of one lane (and pool) can go to the same workers."""
    number: int = -1
    """Order of arrival; the queue sets it."""


@dataclass(slots=True)
class _Flow(Generic[PayloadT]):
    """The tickets of one tenant in one line."""

    start_s: float
    """Start tag of the ticket that goes next; in seconds per weight."""
    lanes: dict[str, dict[int, Ticket[PayloadT]]] = field(default_factory=dict)
    """In order of arrival; none is empty."""

    def add(self, ticket: Ticket[PayloadT]) -> None:
        self.lanes.setdefault(ticket.lane, {})[ticket.number] = ticket

    def remove(self, ticket: Ticket[PayloadT]) -> None:
        lane = self.lanes[ticket.lane]
        del lane[ticket.number]
        if not lane:
            del self.lanes[ticket.lane]

    def heads(self) -> list[Ticket[PayloadT]]:
        """The first of each lane, the one that waits longest first."""
        heads = [next(iter(lane.values())) for lane in self.lanes.values()]
        return sorted(heads, key=lambda ticket: ticket.number)


@dataclass(slots=True)
class _Line(Generic[PayloadT]):
    """Tickets of one priority and one pool."""

    virtual_s: float = 0.0
    """Start tag of the ticket that went last; whoever comes anew begins here, so nobody saves up."""
    flows: dict[str, _Flow[PayloadT]] = field(default_factory=dict)

    def add(self, ticket: Ticket[PayloadT]) -> None:
        flow = self.flows.setdefault(ticket.tenant, _Flow(self.virtual_s))
        if not flow.lanes:
            flow.start_s = max(flow.start_s, self.virtual_s)
        flow.add(ticket)

    @property
    def is_waiting(self) -> bool:
        return any(flow.lanes for flow in self.flows.values())

    def in_order(self) -> Iterator[Ticket[PayloadT]]:
        """Tickets that may be next, in the order in which they are due."""
        waiting = ((flow.start_s, flow.heads()) for flow in self.flows.values() if flow.lanes)
        for _, heads in sorted(waiting, key=lambda entry: (entry[0], entry[1][0].number)):
            yield from heads

    def charge(self, tenant: str, weight: float, cost_s: float) -> None:
        flow = self.flows[tenant]
        self.virtual_s = max(self.virtual_s, flow.start_s)
        flow.start_s += cost_s / weight


class FairQueue(Generic[PayloadT]):
    """At most ``max_waiting`` tickets, in the order in which they are due."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._numbers = 0
        self._tickets: dict[int, Ticket[PayloadT]] = {}
        self._by_tenant: dict[str, dict[int, Ticket[PayloadT]]] = {}
        # By (-priority, pool). A line without tickets is forgotten, and with it what its tenants got: fairness is
        # among those who wait at the same time.
        self._lines: dict[tuple[int, str], _Line[PayloadT]] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def cost_s(self) -> float:
        """Seconds of work that wait. O(n)."""
        return sum(ticket.cost_s for ticket in self._tickets.values())

    def waiting(self, tenant: str) -> list[Ticket[PayloadT]]:
        """The tickets of one tenant, in order of arrival."""
        return list(self._by_tenant.get(tenant, {}).values())

    def tenants(self) -> list[str]:
        """Tenants with tickets."""
        return list(self._by_tenant)

    def enter(self, ticket: Ticket[PayloadT]) -> Ticket[PayloadT] | None:
        """Let a ticket wait. When that is one too many, returns the one that had to go, maybe itself.

        It is the newest of the least urgent of the tenant with the most waiting per weight, so no tenant can fill
        the queue against the others.
        """
        ticket.number, self._numbers = self._numbers, self._numbers + 1
        self._tickets[ticket.number] = ticket
        self._by_tenant.setdefault(ticket.tenant, {})[ticket.number] = ticket
        self._lines.setdefault((-ticket.priority, ticket.pool), _Line()).add(ticket)
        if len(self._tickets) <= self._max_waiting:
            return None
        victim = self._most_expendable()
        self._remove(victim)
        return victim

    def take(self, is_open: Callable[[Ticket[PayloadT]], bool]) -> Ticket[PayloadT] | None:
        """The next ticket for which ``is_open`` holds; its tenant has paid for it. None: all of them wait on."""
        for key in sorted(self._lines):
            line = self._lines[key]
            for ticket in line.in_order():
                if is_open(ticket):
                    line.charge(ticket.tenant, ticket.weight, ticket.cost_s)
                    self._remove(ticket)
                    return ticket
        return None

    def correct(self, ticket: Ticket[PayloadT], cost_s: float) -> None:
        """The ticket taken last costs this much after all (what it needs may have become cached since)."""
        line = self._lines.get((-ticket.priority, ticket.pool))
        if line is not None:
            line.flows[ticket.tenant].start_s += (cost_s - ticket.cost_s) / ticket.weight
        ticket.cost_s = cost_s

    def leave(self, ticket: Ticket[PayloadT]) -> bool:
        """Whoever waits has gone; False when the ticket had ended already."""
        if self._tickets.get(ticket.number) is not ticket:
            return False
        self._remove(ticket)
        return True

    def expire(self, now_s: float) -> list[Ticket[PayloadT]]:
        """Remove and return the tickets whose deadline has passed."""
        expired = [ticket for ticket in self._tickets.values() if ticket.deadline_s <= now_s]
        for ticket in expired:
            self._remove(ticket)
        return expired

    def _most_expendable(self) -> Ticket[PayloadT]:
        def burden(tickets: dict[int, Ticket[PayloadT]]) -> tuple[float, int]:
            newest = next(reversed(tickets.values()))
            return len(tickets) / newest.weight, newest.number

        longest = max(self._by_tenant.values(), key=burden)
        return min(longest.values(), key=lambda ticket: (ticket.priority, -ticket.number))

    def _remove(self, ticket: Ticket[PayloadT]) -> None:
        del self._tickets[ticket.number]
        own = self._by_tenant[ticket.tenant]
        del own[ticket.number]
        if not own:
            del self._by_tenant[ticket.tenant]
        key = (-ticket.priority, ticket.pool)
        line = self._lines[key]
        line.flows[ticket.tenant].remove(ticket)
        if not line.is_waiting:
            del self._lines[key]
