# SPDX-License-Identifier: Apache-2.0
"""Rows of another indexer's ``/workers`` as registrations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from indexer.service.recovery import registrations
from indexer.service.requests import Register

# As dynamo.indexer 1.6.1 answers.
ROW: dict[str, Any] = {
    "instance_id": 2,
    "source": "zmq",
    "status": "active",
    "model_name": "m",
    "routing_group": "g",
    "block_size": 4,
    "endpoints": {"1": "tcp://127.0.0.1:44343"},
    "listeners": {"1": {"endpoint": "tcp://127.0.0.1:44343", "status": "active"}},
}


def test_another_products_rows_are_understood() -> None:
    expected = Register(
        instance_id=2,
        endpoint="tcp://127.0.0.1:44343",
        model_name="m",
        tenant_id="g",
        block_size=4,
        dp_rank=1,
    )
    assert registrations(msgspec.json.encode([ROW])) == [expected]


def test_our_own_extra_fields_are_kept() -> None:
    listener = {
        "endpoint": "tcp://h:1",
        "status": "pending",
        "replay_endpoint": "tcp://h:2",
        "lora_name": "tune",
    }
    [found] = registrations(msgspec.json.encode([{**ROW, "listeners": {"0": listener}}]))
    assert (found.replay_endpoint, found.lora_name) == ("tcp://h:2", "tune")


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"instance_id": -1},
        {"listeners": {"1000000": {"endpoint": "tcp://h:1"}}},
        {"listeners": 3},
    ],
)
def test_values_that_could_not_be_registered_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(msgspec.DecodeError):
        registrations(msgspec.json.encode([{**ROW, **change}]))
