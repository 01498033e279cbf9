# SPDX-License-Identifier: Apache-2.0
"""When a process that died is started again."""

from __future__ import annotations

from router.processes.restarts import FIRST_S, LONGEST_S, STEADY_S, Restarts


def test_the_pause_doubles_while_a_process_keeps_dying_and_has_an_end() -> None:
    restarts, pauses = Restarts(), []
    now_s = 0.0
    for _ in range(12):
        restarts.started(now_s)
        now_s = restarts.died(now_s + 1.0)
        pauses.append(restarts.pause_s)
    assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert pauses[-1] == LONGEST_S
    assert restarts.count == 12


def test_one_that_lived_long_is_started_again_soon() -> None:
    restarts = Restarts()
    restarts.started(0.0)
    restarts.died(1.0)
    restarts.died(2.0)
    restarts.started(10.0)
    assert restarts.died(10.0 + STEADY_S) == 10.0 + STEADY_S + FIRST_S
