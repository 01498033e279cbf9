# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from router.errors import ConfigError
from router.replay.options import parse_faults


def test_faults_name_a_worker_by_number_and_a_time() -> None:
    assert parse_faults(["events@60:3", "events@0.5:w0"], 4) == {"w3": 60.0, "w0": 0.5}


@pytest.mark.parametrize(
    "text",
    ["events@60:4", "events@60:-1", "events@-1:0", "events@nan:0", "events@x:0", "link@60:0", "events", ""],
)
def test_what_is_no_fault_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(ConfigError, match="events@SECONDS:WORKER"):
        parse_faults([text], 4)
