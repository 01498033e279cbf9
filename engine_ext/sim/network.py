# SPDX-License-Identifier: Apache-2.0
"""The network between the engines of one virtual fleet, as fluid flows: rates are max-min fair at every instant.

Every pull crosses two links: what its source sends and what its destination receives. Rates follow from progressive
filling (Bertsekas and Gallager, "Data Networks", 2nd edition, section 6.5.2): all grow together until a link is
full; the flows on it stay at that rate, the others go on. They are computed again whenever a flow starts or ends;
that costs O(flows + links in use x distinct rates).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine_ext.sim.agenda import Action, Agenda
from engine_ext.sim.links import QueuedLink, SharedLink

L = TypeVar("L", bound=Hashable)

Cancel = Callable[[float], None]
"""Ends a pull at a time, without a word to anyone."""


def max_min_rates(paths: Sequence[Sequence[L]], bytes_per_s: Mapping[L, float]) -> list[float]:
    """The max-min fair rate of each flow; ``paths`` has the links it crosses, each once and at least one."""
    users: dict[L, set[int]] = {}
    for number, path in enumerate(paths):
        for link in path:
            users.setdefault(link, set()).add(number)
    left = {link: bytes_per_s[link] for link in users}
    rates = [0.0] * len(paths)
    while users:
        tightest = min(users, key=lambda link: left[link] / len(users[link]))
        share = left[tightest] / len(users[tightest])
        for number in list(users[tightest]):
            rates[number] = share
            for link in paths[number]:
                left[link] = max(left[link] - share, 0.0)
                users[link].discard(number)
                if not users[link]:
                    del users[link]
    return rates


Link = tuple[str, str]
"""One direction of one host's link: "out" or "in", and the host."""


@dataclass(slots=True, eq=False)
class Flow:
    """One transfer under way; ``rate`` and ``end_s`` hold until the next flow starts or ends."""

    path: tuple[Link, ...]
    left_bytes: float
    done: Action
    failed: Action
    rate: float = 0.0
    end_s: float = 0.0


class FluidNetwork:
    """Flows over links of fixed bandwidth. The caller keeps the clock, as an engine's caller does."""

    def __init__(self, bytes_per_s: Mapping[Link, float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._flows: dict[Flow, None] = {}
        self._since_s = 0.0
        """Up to when ``left_bytes`` are counted."""
        self._filled = True
        self._next_s: float | None = None

    @property
    def flows(self) -> Sequence[Flow]:
        """Those under way, their rates up to date."""
        self._fill()
        return list(self._flows)

    @property
    def next_s(self) -> float | None:
        """When the next flow ends; None without any."""
        self._fill()
        return self._next_s

    def start(
        self, path: tuple[Link, ...], size_bytes: float, now_s: float, done: Action, failed: Action
    ) -> Flow:
        """Begin a transfer over those links; exactly one of ``done`` and ``failed`` is called, unless it is stopped."""
        self._count_to(now_s)
        flow = Flow(path, size_bytes, done, failed)
        self._flows[flow] = None
        self._filled = False
        return flow

    def stop(self, flow: Flow, now_s: float) -> None:
        """End it early, telling nobody; does nothing if it is over."""
        if flow in self._flows:
            self._count_to(now_s)
            del self._flows[flow]
            self._filled = False

    def fail(self, link: Link, now_s: float) -> list[Flow]:
        """Break every flow over a link; returns them."""
        broken = [flow for flow in self._flows if link in flow.path]
        for flow in broken:
            self.stop(flow, now_s)
        for flow in broken:
            flow.failed(now_s)
        return broken

    def advance(self, now_s: float) -> list[Flow]:
        """End what is due by ``now_s``, in order of time; returns what has ended."""
        ended: list[Flow] = []
        while (due_s := self.next_s) is not None and due_s <= now_s:
            over = [flow for flow in self._flows if flow.end_s <= due_s]
            self._count_to(due_s)
            for flow in over:
                del self._flows[flow]
            self._filled = False
            for flow in over:
                flow.done(due_s)
            ended += over
        return ended

    def _count_to(self, now_s: float) -> None:
        if now_s > self._since_s:
            self._fill()
            for flow in self._flows:
                flow.left_bytes = max(flow.left_bytes - flow.rate * (now_s - self._since_s), 0.0)
            self._since_s = now_s

    def _fill(self) -> None:
        if self._filled:
            return
        self._filled = True
        rates = max_min_rates([flow.path for flow in self._flows], self._bytes_per_s)
        for flow, rate in zip(self._flows, rates, strict=True):
            flow.rate = rate
            flow.end_s = self._since_s + flow.left_bytes / rate
        self._next_s = min((flow.end_s for flow in self._flows), default=None)


class PeerNetwork(Protocol):
    """What carries an engine's pulls."""

    def pull(
        self, source: tuple[str, int], size_bytes: float, now_s: float, done: Action, failed: Action
    ) -> Cancel:
        """As the destination: begin a pull from the engine at that address."""
        ...

    def wait_s(self, size_bytes: float, now_s: float) -> float:
        """As the source: how long a pull that begins now has to wait for its turn, where that is all one can say."""
        ...


class OwnPeerLinks:
    """The links of an engine whose peers are other processes: it knows nobody's load but its own.

    Its pulls share what it receives. Others' pulls take turns in what it sends, and the puller is told to wait.
    """

    def __init__(self, bytes_per_s: float, agenda: Agenda) -> None:
        self._incoming = SharedLink(bytes_per_s, agenda)
        self._outgoing = QueuedLink(bytes_per_s)

    def pull(
        self, source: tuple[str, int], size_bytes: float, now_s: float, done: Action, failed: Action
    ) -> Cancel:
        """Begin a pull; once begun its bytes arrive, cancelled or not."""
        wanted = True

        def arrived(at_s: float) -> None:
            if wanted:
                done(at_s)

        def cancel(_now_s: float) -> None:
            nonlocal wanted
            wanted = False

        self._incoming.carry(size_bytes, arrived, now_s)
        return cancel

    def wait_s(self, size_bytes: float, now_s: float) -> float:
        """Reserve the turn of a pull."""
        return self._outgoing.reserve(size_bytes, now_s) - now_s


class FleetNetwork:
    """The links of all engines of one fleet, by the host name in their address."""

    def __init__(self, hosts: Sequence[str], bytes_per_s: float) -> None:
        links = [(way, host) for host in hosts for way in ("out", "in")]
        self._fluid = FluidNetwork(dict.fromkeys(links, bytes_per_s))

    @property
    def next_s(self) -> float | None:
        """When the next pull ends; None without any."""
        return self._fluid.next_s

    def port(self, host: str) -> FleetPort:
        """What the engine at ``host`` is given."""
        return FleetPort(self._fluid, host)

    def advance(self, now_s: float) -> set[str]:
        """End the pulls due by ``now_s``; returns the hosts that have to look at what came."""
        return _destinations(self._fluid.advance(now_s))

    def cut(self, host: str, now_s: float) -> set[str]:
        """Break the pulls to and from a host; returns the hosts that wait for them."""
        broken = [*self._fluid.fail(("out", host), now_s), *self._fluid.fail(("in", host), now_s)]
        return _destinations(broken)


def _destinations(flows: Sequence[Flow]) -> set[str]:
    return {flow.path[-1][1] for flow in flows}


class FleetPort:
    """One engine's place in a ``FleetNetwork``."""

    def __init__(self, fluid: FluidNetwork, host: str) -> None:
        self._fluid = fluid
        self._host = host

    def pull(
        self, source: tuple[str, int], size_bytes: float, now_s: float, done: Action, failed: Action
    ) -> Cancel:
        """Begin a pull."""
        path = (("out", source[0]), ("in", self._host))
        flow = self._fluid.start(path, size_bytes, now_s, done, failed)
        return lambda at_s: self._fluid.stop(flow, at_s)

    def wait_s(self, size_bytes: float, now_s: float) -> float:
        """Nobody waits: flows share."""
        return 0.0
