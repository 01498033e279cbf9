# SPDX-License-Identifier: Apache-2.0
"""Any order of lookups, pulls, restarts, lost messages, frozen clocks and late transfers keeps the promises."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.transfer.control.peer import Asked, Found, LeaseEnded, NotFound
from engine_ext.transfer.control.reader import ReaderEvent
from engine_ext.transfer.events import FailReason, Pulled, PullFailed

from .world import Host, World

ADDRESSES = ("a:1", "b:1")
KEYS = (b"x", b"y", b"z")
FAILURES = [
    FailReason.PEER_GONE,
    FailReason.STALE_BOOT,
    FailReason.AGENT,
    FailReason.DEADLINE,
    FailReason.DESTINATION_BUSY,
    FailReason.PEER_SILENT,
]

TIMES_S = (0.05, 0.5, 1.0, 3.2, 8.4, 8.7, 9.2, 30.0)
FREEZES_S = (0.2, 5.0, 8.3, 8.6, 8.8, 9.2, 12.0, 30.0)
RATES = (0.97, 1.0, 1.03)
ANSWERS = (None, 0, 1, 3)

_WEIGHTS = {
    "read": 14,
    "find": 2,
    "pull": 4,
    "forget": 2,
    "abort": 1,
    "finish": 16,
    "fail": 3,
    "run": 6,
    "freeze": 12,
    "slow": 2,
    "swift": 4,
    "silence": 1,
    "speak": 3,
    "session lost": 1,
    "connection lost": 1,
    "restart": 2,
    "kill": 1,
    "answers": 2,
    "source closes": 1,
}
STEPS = st.tuples(
    st.sampled_from([kind for kind, weight in _WEIGHTS.items() for _ in range(weight)]),
    st.sampled_from(ADDRESSES),
    st.integers(0, 7),
)


class Story:
    def __init__(self) -> None:
        self.world = World(handshake_timeout_s=0.3, longest_lease_s=40)
        self.world.watch = self.check
        self.pulled = 0
        self.lives = 0
        self.dead: list[Host] = []
        self.finds: list[int] = []
        self.pulls: dict[int, int] = {}
        self.forgotten: set[int] = set()
        for address in ADDRESSES:
            self.start(address, 1.0)

    def start(self, address: str, rate: float) -> None:
        self.lives += 1
        self.kill(address)
        self.world.host(address, f"{self.lives:032x}").holds = {b"x": 1, b"y": 2}
        self.world.hosts[address].rate = rate

    def kill(self, address: str) -> None:
        host = self.world.hosts.pop(address, None)
        if host is not None:
            self.dead.append(host)

    def play(self, what: str, who: str, number: int) -> None:
        world = self.world
        seconds, reason = TIMES_S[number], FAILURES[number % len(FAILURES)]
        if what in ("read", "find"):
            self.finds.append(world.find(*KEYS, address=who, within_s=seconds))
        if what in ("read", "pull") and self.finds:
            find = self.finds[-1 - (number % len(self.finds) if what == "pull" else 0)]
            pull = world.pull(find, {b"x": 10 + len(self.pulls)}, within_s=seconds)
            self.pulls[pull] = find
        elif what == "forget" and self.finds:
            find = self.finds[-1 - number % len(self.finds)]
            self.forgotten.add(find)
            world.forget(find)
        elif what == "abort" and self.pulls:
            world.reader.abort(list(self.pulls)[-1 - number % len(self.pulls)])
        elif what in ("finish", "fail") and world.transfers.jobs:
            job = list(world.transfers.jobs)[number % len(world.transfers.jobs)]
            if what == "finish":
                world.transfers.finish(job)
            else:
                world.transfers.fail(reason, job)
        elif what == "session lost" and who in world.transfers.offers:
            world.lost(reason, who)
        elif what == "connection lost":
            world.reader.lost(who, "gone")
        elif what == "restart":
            self.start(who, RATES[number % len(RATES)])
        elif what == "kill":
            self.kill(who)
        elif what in ("silence", "speak"):
            (world.silent.add if what == "silence" else world.silent.discard)(who)
        elif what in ("slow", "swift"):
            (world.slow.add if what == "slow" else world.slow.discard)(who)
        elif what == "answers" and who in world.hosts:
            count = ANSWERS[number % len(ANSWERS)]
            holds = None if count is None else dict(zip(KEYS[:count], range(count), strict=True))
            world.hosts[who].holds = holds
        elif what == "run":
            world.run(seconds)
        elif what == "freeze":
            world.now_s += FREEZES_S[number]
            return  # nobody has seen the clock yet
        elif what == "source closes" and who in world.hosts:
            world.hosts[who].source.close()
        world.step()

    def check(self, event: ReaderEvent) -> None:
        """Whoever leased the blocks that were read keeps them still, by its own clock."""
        if not isinstance(event, Pulled):
            return
        find = self.pulls[int(event.job_id)]
        self.pulled += 1
        hosts = [*self.world.hosts.values(), *self.dead]
        kept = [
            lookup.leased and lookup.until_s > host.clock(self.world.now_s)
            for host in hosts
            for lookup in host.source._lookups.values()
            if lookup.ask_id == find
        ]
        assert any(kept)

    def end(self) -> None:
        world = self.world
        world.silent.clear()
        world.slow.clear()
        world.run(40)
        for find in self.finds:
            world.forget(find)
        for job in list(world.transfers.jobs):
            world.transfers.fail(FailReason.DEADLINE, job)
        world.run(60)
        ended = Counter(e.find_id for e in world.events if isinstance(e, Found | NotFound))
        assert all(count == 1 for count in ended.values())
        assert set(self.finds) - self.forgotten <= set(ended)
        pulls = Counter(int(e.job_id) for e in world.events if isinstance(e, Pulled | PullFailed))
        assert pulls == Counter(self.pulls.keys())
        assert (world.reader.finds, world.reader.pulls) == (0, 0)
        for host in world.hosts.values():
            asked = [event.lookup_id for event in host.events if isinstance(event, Asked)]
            over = [event.lookup_id for event in host.events if isinstance(event, LeaseEnded)]
            assert sorted(asked) == sorted(over)
            assert host.source.lookups == 0


@settings(max_examples=200)
@given(st.lists(STEPS, min_size=20, max_size=60))
def test_every_promise_holds_in_any_order_of_events(steps: list[tuple[str, str, int]]) -> None:
    story = Story()
    for step in steps:
        story.play(*step)
    story.end()
