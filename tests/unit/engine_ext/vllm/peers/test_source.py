# SPDX-License-Identifier: Apache-2.0
"""The source: what peers are answered, what is pinned for them, and when it is unpinned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine_ext.transfer.control.peer import Asked, LeaseEnded
from engine_ext.vllm.peers.metrics import SERVED, Tally
from engine_ext.vllm.peers.source import Presence, Source


class Tiers:
    """The engine's side: presence by key, chunks numbered from 50, and a check that every request is ended."""

    def __init__(self, **presence: Presence) -> None:
        self.presence = {key.encode(): value for key, value in presence.items()}
        self.open: set[str] = set()
        self.tenants: list[str] = []
        self.pinned: dict[int, list[bytes]] = {}

    def begin(self, name: str, tenant: str) -> str:
        assert name not in self.open
        self.open.add(name)
        self.tenants.append(tenant)
        return name

    def lookup(self, request: str, key: bytes) -> Presence:
        assert request in self.open
        return self.presence.get(key, Presence.ABSENT)

    def pin(self, request: str, keys: Sequence[bytes]) -> tuple[int, Sequence[int]]:
        assert request in self.open
        assert all(self.presence[key] is Presence.HERE for key in keys)
        job = len(self.pinned)
        self.pinned[job] = list(keys)
        return job, [50 + i for i in range(len(keys))]

    def end(self, request: str) -> None:
        self.open.remove(request)


HERE, COMING = Presence.HERE, Presence.COMING


@pytest.fixture
def source(world: Any) -> Source:
    found: Source = world.source
    return found


def test_what_is_here_is_pinned_and_named_and_the_rest_left_out(world: Any) -> None:
    tiers = Tiers(key_a=HERE, key_c=HERE)
    world.hear(Asked(3, (b"key_a", b"key_b", b"key_c"), "blue"))
    world.source.serve(tiers, world.link, world.now_s)
    assert world.link.replies == {3: {b"key_a": 50, b"key_c": 51}}
    assert tiers.pinned == {0: [b"key_a", b"key_c"]}
    assert tiers.tenants == ["blue"]
    assert not tiers.open
    assert (world.source.leases, world.source.pinned) == (1, 2)
    assert world.source.take_finished() == []


def test_the_end_of_the_lease_finishes_the_store_job_once(world: Any) -> None:
    world.hear(Asked(3, (b"key_a",), ""))
    world.source.serve(Tiers(key_a=HERE), world.link, world.now_s)
    world.hear(LeaseEnded(3, read=True), LeaseEnded(3, read=False), LeaseEnded(99, read=False))
    assert world.source.take_finished() == [0]
    assert world.source.take_finished() == []
    assert (world.source.leases, world.source.pinned) == (0, 0)


def test_chunks_on_their_way_are_waited_for_and_looked_up_afresh(world: Any) -> None:
    tiers = Tiers(key_a=HERE, key_b=COMING)
    world.hear(Asked(3, (b"key_a", b"key_b"), ""))
    world.source.serve(tiers, world.link, world.now_s)
    assert not world.link.replies
    tiers.presence = {b"key_b": HERE}  # the first one was evicted meanwhile: nothing had pinned it
    world.source.serve(tiers, world.link, world.now_s + 0.1)
    assert world.link.replies == {3: {b"key_b": 50}}
    assert not tiers.open


def test_patience_ends_and_the_answer_is_what_is_here(world: Any) -> None:
    tiers = Tiers(key_a=HERE, key_b=COMING)
    world.hear(Asked(3, (b"key_a", b"key_b"), ""))
    world.source.serve(tiers, world.link, world.now_s + 0.49)
    assert not world.link.replies
    world.source.serve(tiers, world.link, world.now_s + 0.5)
    assert world.link.replies == {3: {b"key_a": 50}}
    assert world.counted(SERVED) == {("coming",): 1, ("leased",): 1}


def test_a_reader_that_waits_no_more_gets_nothing_pinned(world: Any) -> None:
    tiers = Tiers(key_a=HERE, key_b=COMING)
    world.hear(Asked(3, (b"key_a", b"key_b"), ""))
    world.source.serve(tiers, world.link, world.now_s)
    world.hear(LeaseEnded(3, read=False))
    world.source.serve(tiers, world.link, world.now_s)
    assert not world.link.replies
    assert not tiers.pinned
    assert not tiers.open


def test_no_more_is_pinned_than_the_share_of_the_host_tier(world: Any) -> None:
    tiers = Tiers(**{f"key_{i}": HERE for i in range(20)})
    for lookup, first in ((1, 0), (2, 5), (3, 10)):
        world.hear(Asked(lookup, tuple(b"key_%d" % i for i in range(first, first + 5)), ""))
    world.source.serve(tiers, world.link, world.now_s)
    assert [len(found) for found in world.link.replies.values()] == [5, 3, 0]
    assert world.counted(SERVED)["no_room",] == 7
    world.hear(LeaseEnded(1, read=True), Asked(4, (b"key_0",), ""))
    world.source.serve(tiers, world.link, world.now_s)
    assert world.link.replies[4] == {b"key_0": 50}


def test_a_key_named_twice_is_pinned_once_and_what_cannot_be_a_key_is_not_looked_up(world: Any) -> None:
    tiers = Tiers(key_a=HERE, k=HERE)
    world.hear(Asked(3, (b"key_a", b"key_a", b"k", b"x" * 200), ""))
    world.source.serve(tiers, world.link, world.now_s)
    assert world.link.replies == {3: {b"key_a": 50}}
    assert tiers.pinned == {0: [b"key_a"]}


def test_a_region_of_one_tenant_answers_nobody_else(world: Any) -> None:
    source = Source("boot", Tally(), patience_s=0.5, pinned_limit=8, tenant="blue")
    tiers = Tiers(key_a=HERE)
    source.asked(Asked(1, (b"key_a",), "green"), world.now_s)
    source.asked(Asked(2, (b"key_a",), "blue"), world.now_s)
    source.serve(tiers, world.link, world.now_s)
    assert world.link.replies == {1: {}, 2: {b"key_a": 50}}
    assert tiers.tenants == ["blue"]


def test_coming_to_rest_answers_with_nothing_and_waits_for_leases(world: Any) -> None:
    tiers = Tiers(key_a=HERE)
    world.hear(Asked(1, (b"key_a",), ""))
    world.source.serve(tiers, world.link, world.now_s)
    world.link.events.append(Asked(2, (b"key_a",), ""))
    assert not world.exchange.quiesce(world.now_s)
    assert not world.exchange.quiesce(world.now_s)
    assert world.link.replies[2] == {}
    world.link.events.append(LeaseEnded(1, read=True))
    assert world.exchange.quiesce(world.now_s)
    assert world.source.take_finished() == [0]
