# SPDX-License-Identifier: Apache-2.0
"""Settings and timers of the control channel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from engine_ext.transfer.control.alarms import Alarms
from engine_ext.transfer.control.config import ControlConfig
from engine_ext.transfer.control.curve import load_keys
from engine_ext.transfer.errors import TransferConfigError


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"bind_host": ""}, "bind_host"),
        ({"bind_host": "*"}, "advertise_host"),
        ({"bind_host": "0.0.0.0"}, "advertise_host"),
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"lease_s": 0.1}, "lease_s"),
        ({"longest_lease_s": 5}, "longest_lease_s"),
        ({"lease_margin_s": 0}, "lease_margin_s"),
        ({"lease_margin_s": 6}, "lease_margin_s"),
        ({"handshake_timeout_s": 0}, "handshake_timeout_s"),
        ({"retry_s": -1}, "retry_s"),
        ({"idle_s": 0}, "idle_s"),
        ({"max_peers": 0}, "max_peers"),
        ({"max_finds": 0}, "max_finds"),
        ({"max_lookups": 0}, "max_lookups"),
        ({"max_lookups_per_reader": 0}, "max_lookups_per_reader"),
        ({"max_keys": 0}, "max_keys"),
        ({"max_keys": 16385}, "max_keys"),
        ({"curve_clients": ["k" * 40]}, "curve_clients"),
        ({"curve_server_key": "k" * 40}, "curve_server_key"),
        ({"curve_secret_key_file": "f", "curve_clients": ["short"]}, "curve_clients"),
        ({"curve_secret_key_file": "f", "curve_server_keys": {"a:1": "short"}}, "curve_server_keys"),
        ({"unknown": 1}, "control"),
        ({"port": "80"}, "control"),
    ],
)
def test_a_setting_that_is_not_usable_is_named_with_what_is_accepted(
    options: dict[str, Any], field: str
) -> None:
    with pytest.raises(TransferConfigError) as error:
        ControlConfig.load(options)
    assert error.value.field == field
    assert error.value.accepted


def test_without_any_setting_the_channel_listens_to_this_machine_only() -> None:
    config = ControlConfig.load({})
    assert (config.bind_host, config.port, load_keys(config)) == ("127.0.0.1", 5720, None)


def test_keys_come_from_a_file_and_a_fleet_may_share_one_pair(tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    file = tmp_path / "key"
    file.write_bytes(secret + b"\n")
    keys = load_keys(ControlConfig.load({"curve_secret_key_file": str(file)}))
    assert keys is not None
    assert (keys.secret, keys.public, keys.server) == (secret, public, public)


@pytest.mark.parametrize("content", [None, b"", b"x" * 39, b"\xff" * 40])
def test_a_file_without_a_key_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TransferConfigError) as error:
        load_keys(ControlConfig.load({"curve_secret_key_file": str(file)}))
    assert error.value.field == "curve_secret_key_file"
    assert (content or b"?").decode(errors="replace") not in str(error.value) or not content


def test_only_known_client_keys_are_admitted(tmp_path: Path) -> None:
    known, other = zmq.curve_keypair()[0], zmq.curve_keypair()[0]
    file = tmp_path / "key"
    file.write_bytes(zmq.curve_keypair()[1])
    options = {"curve_secret_key_file": str(file), "curve_clients": [known.decode()]}
    keys = load_keys(ControlConfig.load(options))
    assert keys is not None
    request = [b"1.0", b"7", b"", b"127.0.0.1", b"", b"CURVE"]
    assert keys.admit([*request, z85.decode(known)])[:3] == [b"1.0", b"7", b"200"]
    assert keys.admit([*request, z85.decode(other)])[:3] == [b"1.0", b"7", b"400"]
    assert keys.admit([*request[:5], b"NULL"])[2] == b"400"
    assert keys.admit([*request[:5], b"PLAIN", b"user", b"password"])[2] == b"400"


def test_the_earliest_alarm_of_a_name_is_the_one_that_rings() -> None:
    alarms: Alarms[str] = Alarms()
    alarms.at(5, "a")
    alarms.at(3, "a")
    alarms.at(4, "a")
    assert alarms.next_s() == 3
    assert list(alarms.ring(3)) == ["a"]
    assert list(alarms.ring(100)) == []
    assert alarms.next_s() is None


def test_an_alarm_that_was_dropped_does_not_ring() -> None:
    alarms: Alarms[str] = Alarms()
    alarms.at(1, "a")
    alarms.at(2, "b")
    alarms.drop("a")
    assert alarms.next_s() == 2
    assert list(alarms.ring(2)) == ["b"]


@given(st.lists(st.tuples(st.sampled_from("ads"), st.integers(0, 20), st.integers(0, 5))))
def test_alarms_ring_as_a_plain_table_of_times_says(steps: list[tuple[str, int, int]]) -> None:
    alarms: Alarms[int] = Alarms()
    table: dict[int, int] = {}
    for what, time_s, name in steps:
        if what == "a":
            alarms.at(time_s, name)
            table[name] = min(time_s, table.get(name, 1000))
        elif what == "d":
            alarms.drop(name)
            table.pop(name, None)
        else:
            due = {name for name, at in table.items() if at <= time_s}
            rung = list(alarms.ring(time_s))
            assert sorted(rung) == sorted(due)
            table = {name: at for name, at in table.items() if at > time_s}
        assert alarms.next_s() == min(table.values(), default=None)


def test_alarms_that_are_moved_for_ever_do_not_pile_up() -> None:
    alarms: Alarms[str] = Alarms()
    for time_s in range(100_000, 0, -1):
        alarms.at(time_s, "a")
        alarms.next_s()
    assert len(alarms._heap) < 100
