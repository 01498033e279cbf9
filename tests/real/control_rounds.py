# SPDX-License-Identifier: Apache-2.0
"""Scenarios of real links. Reads their names from standard input, one a line; answers each with a line of JSON.

One process for all of them: importing nixl takes seconds. test_control.py says what must come out.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import control_lives
import control_meetings
import control_readers
from control_pair import End, closing, key, preload
from transfer_pair import PATIENCE_S, content

from engine_ext.transfer.control.peer import BlocksPulled, Found


def idle() -> dict[str, Any]:
    """CPU of a process with a link that has sessions in both directions and nothing to do."""
    a, b = End(16), End(16)
    with closing(a, b):
        b.fill(1, range(16))
        b.holds = {key(3): 3}
        find_id = a.link.find(b.link.address, [key(3)], "t", time.monotonic() + PATIENCE_S)
        a.until(lambda: b.play() or a.events)
        (found,) = a.events
        assert isinstance(found, Found)
        job = a.pull(found, {3: 5})
        right = isinstance(a.end_of(job), BlocksPulled) and a.block(5) == content(1, 3)
        a.link.forget(find_id)
        time.sleep(0.5)
        began, cpu = time.monotonic(), time.process_time()
        time.sleep(4)
        return {"right": right, "cores": (time.process_time() - cpu) / (time.monotonic() - began) / 2}


SCENARIOS = {
    f.__name__: f
    for f in (
        control_meetings.pulls,
        control_meetings.refusals,
        control_meetings.dead_addresses,
        control_lives.restarts,
        control_lives.quick_restart,
        control_lives.frozen_source,
        control_readers.frozen_reader,
        control_readers.dead_reader,
        control_readers.abort_and_reuse,
        idle,
    )
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX writes its warnings to standard output
    preload()
    import nixl  # noqa: F401 - paid for once

    for line in sys.stdin:
        began = time.monotonic()
        try:
            result = SCENARIOS[line.strip()]()
            result["scenario_s"] = time.monotonic() - began
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
