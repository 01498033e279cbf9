# SPDX-License-Identifier: Apache-2.0
"""Sessions with sources: who is admitted, refused, silent."""

from __future__ import annotations

from typing import Any

import pytest

from engine_ext.transfer.control.peer import NotFound, NotFoundReason
from engine_ext.transfer.control.wire import Admit, Ask, Problem, ProblemKind, encode
from engine_ext.transfer.events import Pulled

from .sessions import A, found, knocks, reasons
from .world import BLOCK_BYTES, World, side


def test_lookups_queue_behind_one_handshake_and_need_no_other() -> None:
    world = World()
    world.host().holds = {b"x": 1, b"y": 2}
    first, second = world.find(b"x", step=False), world.find(b"y", step=False)
    world.step()
    third = world.find(b"x", b"y")
    assert [found(world, find) for find in (first, second, third)] == [{b"x"}, {b"y"}, {b"x", b"y"}]
    assert knocks(world) == 1
    assert world.transfers.connected == [A]


@pytest.mark.parametrize(
    ("differs", "name"),
    [
        ({"model": "other"}, "model"),
        ({"weights_revision": "other"}, "weights_revision"),
        ({"dtype": "other"}, "dtype"),
        ({"block_length_bytes": 2 * BLOCK_BYTES}, "block_length"),
        ({"layout": "other"}, "layout"),
        ({"tp_map": "other"}, "tp_map"),
        ({"hash_seed": "other"}, "hash_seed"),
        ({"tenant": "other"}, "tenant"),
    ],
)
def test_a_mismatch_is_refused_by_its_name_before_anything_is_asked(
    differs: dict[str, Any], name: str
) -> None:
    world = World()
    host = world.host(**differs)
    find = world.find(b"x")
    (event,) = world.told(find)
    assert isinstance(event, NotFound)
    assert event.reason is NotFoundReason.REFUSED
    assert event.detail.startswith(f"{name}:")
    assert host.source.readers == 0
    assert host.asked() == []
    assert world.transfers.connected == []
    (admit,) = world.received
    assert isinstance(admit, Admit)
    assert b"metadata" not in admit.answer, "a refusal gives nothing away that could be read from"
    assert not any(isinstance(message, Ask) for _, message in world.sent)


def test_a_reader_that_was_refused_cannot_ask_all_the_same() -> None:
    world = World()
    host = world.host(tenant="other")
    world.find(b"x")
    ask = Ask(boot_id="0" * 32, to=A, id=7, tenant="", keys=(b"x",), within_ms=1000)
    host.source.receive(b"a:1", ask, world.now_s)
    world.step()
    assert host.asked() == []
    assert world.received[-1] == Problem(boot_id=A, kind=ProblemKind.STRANGER, id=7)


def test_a_dead_address_costs_one_handshake_and_then_nothing_for_a_while() -> None:
    world = World(handshake_timeout_s=0.3, retry_s=2.0)
    first = world.find(b"x", within_s=10)
    world.run(0.29)
    assert world.told(first) == []
    world.run(0.02)
    assert reasons(world, first) == [NotFoundReason.UNREACHABLE]
    assert world.hung_up == ["a:1"]
    assert reasons(world, world.find(b"x", within_s=10)) == [NotFoundReason.UNREACHABLE]
    assert knocks(world) == 1
    world.run(2)
    world.host().holds = {b"x": 1}
    assert found(world, world.find(b"x")) == {b"x"}


def test_a_find_waits_for_no_handshake_beyond_its_own_deadline() -> None:
    world = World(handshake_timeout_s=5)
    find = world.find(b"x", within_s=0.05)
    world.run(0.06)
    assert reasons(world, find) == [NotFoundReason.DEADLINE]


def test_a_connection_that_is_refused_is_found_out_at_once_and_tried_again_by_the_next_find() -> None:
    world = World()
    find = world.find(b"x")
    world.reader.lost("a:1", "refused")
    world.step()
    assert reasons(world, find) == [NotFoundReason.UNREACHABLE]
    world.host().holds = {b"x": 1}
    assert found(world, world.find(b"x")) == {b"x"}


@pytest.mark.parametrize("damage", ["garbage", "metadata", "other_reader"])
def test_a_damaged_answer_to_the_handshake_is_never_loaded(damage: str) -> None:
    world = World()
    find = world.find(b"x")
    good, _ = side(A).answer(side("0" * 32).hello())
    answer = {
        "garbage": b"\xc1 garbage",
        "metadata": good.replace(b"metadata of", b"METADATA of"),
        "other_reader": side(A).answer(side("1" * 32).hello())[0],
    }[damage]
    world.reader.receive("a:1", encode(Admit(boot_id=A, answer=answer)), world.now_s)
    world.step()
    expected = NotFoundReason.REFUSED if damage == "metadata" else NotFoundReason.MALFORMED
    assert reasons(world, find) == [expected]
    assert world.transfers.connected == []
    world.host().holds = {b"x": 1}
    assert found(world, world.find(b"x")) == {b"x"}


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xc1" * 50, b"\x90", b"\x81\xa4type\xa3ask", b"x" * (3 << 20)]
)
def test_garbage_is_dropped_counted_and_changes_nothing(data: bytes) -> None:
    world = World()
    world.host().holds = {b"x": 1}
    find = world.find(b"x")
    world.reader.receive("a:1", data, world.now_s)
    world.reader.receive("nobody:1", data, world.now_s)
    assert world.reader.malformed == 1
    pull = world.pull(find, {b"x": 5})
    world.transfers.finish()
    world.step()
    assert isinstance(world.told(pull)[0], Pulled)


def test_an_answer_that_does_not_fit_the_question_leases_nothing() -> None:
    world = World()
    host = world.host()
    for holds in ({b"x": 100}, {b"x": 2**31 - 1}):  # beyond the region that it offered
        host.holds = holds
        assert reasons(world, world.find(b"x")) == [NotFoundReason.MALFORMED]
    assert host.source.lookups == 0, "given back"
