# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from engine_ext.sim.profile import load_profile as load_engine_profile
from router.costs.profile import load_profile
from router.errors import ConfigError
from router.replay.faults import with_faults
from router.replay.tiers import Capacities, engine_config
from router.replay.virtual import VirtualFleetSetup


def four_workers() -> VirtualFleetSetup:
    capacities = Capacities(block_size_tokens=64, hbm_blocks=10, ram_blocks=10, storage_blocks=0)
    return VirtualFleetSetup(
        workers=4,
        engine=engine_config("gpu", capacities),
        engine_profile=load_engine_profile("default"),
        cost_profile=load_profile("default"),
        policy="kv_aware",
    )


def test_faults_name_a_worker_by_number_and_a_time() -> None:
    setup = with_faults(
        four_workers(), ["events@60:3", "events@0.5:w0", "transport@7:1", "kill@8:2", "kill@9:3"]
    )
    assert setup.events_cut_at_s == {"w3": 60.0, "w0": 0.5}
    assert setup.transport_cut_at_s == {"w1": 7.0}
    assert setup.killed_at_s == {"w2": 8.0, "w3": 9.0}


def test_a_source_is_killed_by_the_number_of_its_pull() -> None:
    assert with_faults(four_workers(), ["kill-source@3"]).kill_source_of == 3
    assert with_faults(four_workers(), []) == four_workers()


@pytest.mark.parametrize(
    "text",
    [
        "events@60:4",
        "events@60:-1",
        "events@-1:0",
        "events@nan:0",
        "events@inf:0",
        "events@x:0",
        "link@60:0",
        "kill@60",
        "kill-source@0",
        "kill-source@x",
        "events",
        "",
    ],
)
def test_what_is_no_fault_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"events@SECONDS:WORKER.*from 0 to 3"):
        with_faults(four_workers(), [text])
