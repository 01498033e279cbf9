# SPDX-License-Identifier: Apache-2.0
"""Two ends of a link over real sockets: what an owner is told, whatever happens on the other side."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq

from engine_ext.transfer.control.config import ControlConfig
from engine_ext.transfer.control.peer import (
    Asked,
    BlocksNotPulled,
    BlocksPulled,
    BlocksReleased,
    Found,
    LeaseEnded,
    NotFound,
    NotFoundReason,
)
from engine_ext.transfer.control.sockets import Sockets
from engine_ext.transfer.control.wire import MAX_MESSAGE_BYTES
from engine_ext.transfer.errors import AgentError, TransferConfigError
from engine_ext.transfer.events import FailReason

from .linked import PATIENCE_S, Process, answer, bare, closing, until
from .world import BLOCK_BYTES


def reason(event: Found | NotFound) -> NotFoundReason:
    assert isinstance(event, NotFound), event
    return event.reason


def test_a_reader_finds_pulls_and_gives_back_over_sockets() -> None:
    source, reader = Process(), Process()
    with closing(source, reader):
        source.holds = {b"x": 3, b"y": 4}
        find = reader.find(source.address, b"x", b"y", b"z")
        found = answer(reader, find, source)
        assert isinstance(found, Found)
        assert found.keys == {b"x", b"y"}
        assert 0 < found.seconds < PATIENCE_S
        assert not reader.link.idle()
        pull = reader.pull(find, {b"x": 10, b"y": 11})
        until(lambda: reader.of(BlocksPulled), reader, source)
        (pulled,) = reader.of(BlocksPulled)
        assert (pulled.pull_id, pulled.size_bytes) == (pull, 2 * BLOCK_BYTES)
        assert reader.agent.posted == [(source.boot_id, [3, 4], [10, 11])]
        assert source.of(LeaseEnded) == []
        assert not source.link.idle()
        reader.link.forget(find)
        until(lambda: source.of(LeaseEnded), reader, source)
        (asked,) = source.of(Asked)
        assert source.of(LeaseEnded) == [LeaseEnded(asked.lookup_id, read=True)]
        assert (reader.link.idle(), source.link.idle()) == (True, True)


def test_an_owner_may_wait_for_ever() -> None:
    source, reader = Process(), Process()
    with closing(source, reader):
        source.holds = {b"x": 3}
        find = reader.find(source.address, b"x", within_s=float("inf"))
        assert isinstance(answer(reader, find, source), Found)
        reader.pull(find, {b"x": 10}, within_s=float("inf"))
        until(lambda: reader.of(BlocksPulled), reader, source)


def test_two_processes_read_from_each_other() -> None:
    a, b = Process(), Process()
    with closing(a, b):
        a.holds, b.holds = {b"x": 1}, {b"x": 2}
        there, back = a.find(b.address, b"x"), b.find(a.address, b"x")
        assert isinstance(answer(a, there, b), Found)
        assert isinstance(answer(b, back, a), Found)


def test_a_process_does_not_read_from_itself() -> None:
    only = Process()
    with closing(only):
        event = answer(only, only.find(only.address, b"x"))
        assert reason(event) is NotFoundReason.REFUSED
        assert isinstance(event, NotFound)
        assert event.detail.startswith("self:")


def test_a_port_where_nobody_listens_costs_no_deadline() -> None:
    reader = Process(handshake_timeout_s=PATIENCE_S)
    with closing(reader), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for _ in range(3):
            began = time.monotonic()
            assert reason(answer(reader, reader.find(address, b"x"))) is NotFoundReason.UNREACHABLE
            assert time.monotonic() - began < PATIENCE_S / 2
        assert reader.link.counts()[0].connections == 0


def test_a_peer_that_accepts_and_says_nothing_is_given_up_after_the_handshake_s_time() -> None:
    reader = Process(handshake_timeout_s=0.2)
    with closing(reader), socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        assert reason(answer(reader, reader.find(address, b"x"))) is NotFoundReason.UNREACHABLE
        began = time.monotonic()
        assert reason(answer(reader, reader.find(address, b"x"))) is NotFoundReason.UNREACHABLE
        assert time.monotonic() - began < PATIENCE_S / 2
        assert reader.link.counts()[0].connections == 0


def test_a_peer_that_speaks_another_protocol_is_unreachable() -> None:
    reader = Process()
    with closing(reader), socket.create_server(("127.0.0.1", 0)) as web:
        find = reader.find(f"127.0.0.1:{web.getsockname()[1]}", b"x")
        connection, _ = web.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            assert reason(answer(reader, find)) is NotFoundReason.UNREACHABLE


@pytest.mark.parametrize(
    "address", ["", "nowhere", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:99999", "a b:1"]
)
def test_an_address_that_is_none_is_unreachable(address: str) -> None:
    reader = Process(handshake_timeout_s=0.2)
    with closing(reader):
        assert reason(answer(reader, reader.find(address, b"x"))) is NotFoundReason.UNREACHABLE


def test_a_source_drops_garbage_and_goes_on() -> None:
    source, reader = Process(), Process()
    with closing(source, reader), bare(zmq.DEALER) as rude:
        source.holds = {b"x": 1}
        rude.connect(f"tcp://{source.address}")
        rude.send(b"\xc1 not msgpack")
        rude.send_multipart([b"a", b"b", b"c"])
        rude.send(b"")
        until(lambda: source.link.counts()[0].malformed == 3, source)
        rude.send(bytes(MAX_MESSAGE_BYTES + 1))
        assert isinstance(answer(reader, reader.find(source.address, b"x"), source), Found)


def test_a_reader_drops_garbage_and_is_not_admitted_by_it() -> None:
    reader = Process(handshake_timeout_s=0.3)
    with closing(reader), bare(zmq.ROUTER) as rude:
        port = rude.bind_to_random_port("tcp://127.0.0.1")
        find = reader.find(f"127.0.0.1:{port}", b"x")
        route, _ = rude.recv_multipart()
        for data in (b"", b"\xc1", b"\x81\xa4type\xa5admit"):
            rude.send_multipart([route, data])
        rude.send_multipart([route, b"two", b"frames"])
        assert reason(answer(reader, find)) is NotFoundReason.UNREACHABLE
        assert reader.link.counts()[0].malformed == 4


def test_refused_handshakes_are_counted_by_name() -> None:
    source, reader = Process(fingerprint={"dtype": "fp8_e4m3"}), Process()
    with closing(source, reader):
        assert reason(answer(reader, reader.find(source.address, b"x"), source)) is NotFoundReason.REFUSED
        assert source.link.counts()[0].refused == {"dtype": 1}
        assert source.of(Asked) == []


def test_a_source_that_restarts_at_its_address_is_asked_anew() -> None:
    reader, port, boots = Process(), 0, set()
    with closing(reader):
        for _ in range(5):
            source = Process(port=port)
            port = int(source.address.rsplit(":", 1)[1])
            source.holds = {b"x": 1}
            with closing(source):
                found = None
                while not isinstance(found, Found):
                    found = answer(reader, reader.find(f"127.0.0.1:{port}", b"x"), source)
                    if isinstance(found, NotFound):
                        assert found.reason in (NotFoundReason.UNREACHABLE, NotFoundReason.PEER_RESTARTED)
                reader.pull(found.find_id, {b"x": 5})
                pulled = len(reader.of(BlocksPulled))
                until(lambda: len(reader.of(BlocksPulled)) > pulled, reader, source)  # noqa: B023
                boots.add(reader.agent.posted[-1][0])
                assert reader.agent.posted[-1][0] == source.boot_id
                reader.link.forget(found.find_id)
    assert len(boots) == 5


# The owner is served whatever the threads do


def test_an_abort_is_answered_at_once_and_its_blocks_stay_in_quarantine_until_they_are_over() -> None:
    source, reader = Process(), Process()
    with closing(source, reader):
        source.holds, reader.agent.held = {b"x": 3}, True
        find = reader.find(source.address, b"x")
        answer(reader, find, source)
        pull = reader.pull(find, {b"x": 10})
        until(lambda: reader.agent.posted, reader, source)
        reader.link.abort(pull)
        assert reader.link.take() == [BlocksNotPulled(pull, FailReason.ABORTED, quarantined=(10,))]
        reader.link.forget(find)
        until(lambda: not len(reader.link._mailbox), reader, source)  # the thread's own verdict
        assert not reader.link.idle()
        busy = reader.find(source.address, b"x")
        answer(reader, busy, source)
        again = reader.pull(busy, {b"x": 10})
        until(lambda: reader.of(BlocksNotPulled), reader, source)
        assert reader.of(BlocksNotPulled) == [BlocksNotPulled(again, FailReason.DESTINATION_BUSY)]
        assert reader.of(BlocksReleased) == []
        reader.agent.held = False
        until(lambda: reader.of(BlocksReleased), reader, source)
        assert [event.blocks for event in reader.of(BlocksReleased)] == [(10,)]
        last = reader.pull(busy, {b"x": 10})
        until(lambda: reader.of(BlocksPulled), reader, source)
        assert reader.of(BlocksPulled)[0].pull_id == last


def test_a_pull_fails_at_its_deadline_even_while_the_channel_s_thread_is_held_up() -> None:
    source, reader = Process(), Process()
    go_on = threading.Event()
    with closing(source, reader):
        source.holds = {b"x": 3}
        find = reader.find(source.address, b"x")
        answer(reader, find, source)
        reader.link._control.tell(lambda *_: go_on.wait(PATIENCE_S))
        pull = reader.pull(find, {b"x": 10}, within_s=0.05)
        until(lambda: reader.of(BlocksNotPulled), reader)
        assert reader.of(BlocksNotPulled) == [BlocksNotPulled(pull, FailReason.DEADLINE, quarantined=(10,))]
        go_on.set()
        until(lambda: reader.of(BlocksReleased), reader)
        assert [event.blocks for event in reader.of(BlocksReleased)] == [(10,)]


def test_a_find_that_was_forgotten_is_not_spoken_of_even_if_its_answer_is_there() -> None:
    source, reader = Process(), Process()
    with closing(source, reader):
        source.holds = {b"x": 3}
        find = reader.find(source.address, b"x")
        until(lambda: source.of(Asked), source)
        until(lambda: reader.link._control._outbox, source)
        reader.link.forget(find)
        until(lambda: source.of(LeaseEnded), reader, source)
        assert reader.events == []
        assert reader.link.idle()


def test_an_error_of_the_thread_ends_what_was_under_way_and_the_owner_lives_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, reader = (Process(lease_s=0.5, lease_margin_s=0.1) for _ in range(2))
    source.holds = {b"x": 3}
    with closing(reader):
        find = reader.find(source.address, b"x")
        answer(reader, find, source)
        source.agent.held = True
        reader.holds = {b"w": 1}
        own = source.find(reader.address, b"w")
        assert isinstance(answer(source, own, reader), Found)
        pull = source.pull(own, {b"w": 20})
        until(lambda: source.agent.posted, source, reader)
        waiting = source.find(reader.address, b"y")

        def bug(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        source.link._control.tell(bug)
        until(lambda: source.of(NotFound) and source.of(LeaseEnded), source)
        assert {event.find_id: event.reason for event in source.of(NotFound)} == {
            waiting: NotFoundReason.CLOSED
        }
        assert source.of(BlocksNotPulled) == [BlocksNotPulled(pull, FailReason.CLOSED, quarantined=(20,))]
        assert len(source.of(LeaseEnded)) == len(source.of(Asked)) == 1
        assert reason(answer(source, source.find(reader.address, b"x"))) is NotFoundReason.CLOSED
        assert not source.link.idle(), "a transfer may still write"
        assert source.link.close(PATIENCE_S)
    assert "the control channel has ended" in caplog.text


def test_close_waits_for_leases_and_gives_everything_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    source, reader = Process(), Process()
    source.holds = {b"x": 3}
    find = reader.find(source.address, b"x")
    answer(reader, find, source)
    go_on = threading.Event()
    reader.link._control.tell(lambda *_: go_on.wait(PATIENCE_S))
    assert not source.link.close(0.05), "a reader that does not answer may still read"
    assert not source.serving.closed
    assert source.link.take() == []
    go_on.set()
    source.serving.error = AgentError("deregister", "not yet")
    assert not source.link.close(PATIENCE_S)
    source.serving.error = None
    assert source.link.close(PATIENCE_S)
    assert [type(event) for event in source.link.take()] == [LeaseEnded]
    assert source.link.idle()
    assert source.agent.closed
    assert source.serving.closed
    assert reader.link.close(PATIENCE_S)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (before, threads)


def test_a_link_that_is_closed_answers_everything_at_once() -> None:
    reader = Process()
    assert reader.link.close(PATIENCE_S)
    find = reader.find("127.0.0.1:1", b"x")
    pull = reader.pull(find, {b"x": 1})
    assert reader.link.take() == [
        NotFound(find, NotFoundReason.CLOSED),
        BlocksNotPulled(pull, FailReason.CLOSED),
    ]
    reader.link.abort(pull)
    reader.link.forget(find)
    reader.link.reply(1, {})
    assert reader.link.take() == []
    assert reader.link.close(PATIENCE_S)


def test_an_idle_link_sleeps_while_its_sessions_are_open() -> None:
    source, reader = Process(), Process()
    with closing(source, reader):
        source.holds = {b"x": 3}
        find = reader.find(source.address, b"x")
        answer(reader, find, source)
        reader.link.forget(find)
        until(lambda: source.of(LeaseEnded), reader, source)
        waits = source.sockets.waits, reader.sockets.waits
        threading.Event().wait(0.3)
        assert source.sockets.waits - waits[0] <= 2
        assert reader.sockets.waits - waits[1] <= 2


def test_nothing_piles_up_for_peers_that_are_not_there() -> None:
    reader = Process(handshake_timeout_s=0.05, retry_s=0, max_peers=5)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(8)]
    with closing(reader):
        finds = [
            reader.find(f"127.0.0.1:{one.getsockname()[1]}", b"x" * 64, within_s=PATIENCE_S)
            for _ in range(20)
            for one in listeners
        ]
        until(lambda: len(reader.of(NotFound)) == len(finds), reader)
        reasons = {event.reason for event in reader.of(NotFound)}
        assert reasons == {NotFoundReason.UNREACHABLE, NotFoundReason.TOO_MANY}
        counts = reader.link.counts()[0]
        assert (counts.connections, counts.finds) == (0, 0)
        assert counts.peers <= 5
        for one in listeners:
            one.close()


def test_a_port_that_is_taken_is_named_and_leaves_nothing_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransferConfigError, match=f"127.0.0.1:{port}"):
            Sockets(ControlConfig.load({"port": port}), None)
    assert len(os.listdir("/proc/self/fd")) == before


# CURVE


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, tuple[str, str]]:
    """Name -> (file with the secret key, public key)."""
    made = {}
    for name in ("source", "reader", "stranger"):
        public, secret = zmq.curve_keypair()
        file = tmp_path / name
        file.write_bytes(secret)
        made[name] = (str(file), public.decode())
    return made


def test_an_encrypted_channel_serves_known_clients_only(keys: dict[str, tuple[str, str]]) -> None:
    source = Process(curve_secret_key_file=keys["source"][0], curve_clients=[keys["reader"][1]])
    server = {"curve_server_keys": {source.address: keys["source"][1]}}
    reader = Process(curve_secret_key_file=keys["reader"][0], **server)
    stranger = Process(curve_secret_key_file=keys["stranger"][0], handshake_timeout_s=0.5, **server)
    plain = Process(handshake_timeout_s=0.5)
    with closing(source, reader, stranger, plain):
        source.holds = {b"x": 1}
        assert isinstance(answer(reader, reader.find(source.address, b"x"), source), Found)
        for other in (stranger, plain):
            find = other.find(source.address, b"x")
            assert reason(answer(other, find, source)) is NotFoundReason.UNREACHABLE
        assert len(source.of(Asked)) == 1


def test_a_fleet_may_share_one_pair_of_keys(keys: dict[str, tuple[str, str]]) -> None:
    a, b = (Process(curve_secret_key_file=keys["source"][0]) for _ in range(2))
    with closing(a, b):
        a.holds = {b"x": 1}
        assert isinstance(answer(b, b.find(a.address, b"x"), a), Found)


def test_a_reader_that_expects_another_server_key_reaches_nobody(keys: dict[str, tuple[str, str]]) -> None:
    source = Process(curve_secret_key_file=keys["source"][0])
    reader = Process(
        curve_secret_key_file=keys["reader"][0],
        curve_server_key=keys["stranger"][1],
        handshake_timeout_s=0.5,
    )
    with closing(source, reader):
        event = answer(reader, reader.find(source.address, b"x"), source)
        assert reason(event) is NotFoundReason.UNREACHABLE
        assert source.link.counts()[0].readers == 0
