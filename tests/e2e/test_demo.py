# SPDX-License-Identifier: Apache-2.0
"""The command a newcomer runs first: it ends by itself, and its table shows what routing is for."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys

PATIENCE_S = 180.0


def demo(*arguments: str) -> tuple[int, str, str]:
    # -P: the checkout's own folders, which lack the native module, must not shadow what is installed.
    command = [sys.executable, "-P", "-m", "router", "demo", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def number(text: str) -> int:
    found = re.match(r"[\d,]+", text)
    assert found, text
    return int(found[0].replace(",", ""))


def test_the_demo_ends_with_a_table_that_shows_what_routing_saved() -> None:
    code, out, err = demo("--once")
    assert code == 0, out + err
    rows = {row[0]: row[1:] for row in (re.split(r"\s{2,}", line.strip()) for line in out.splitlines())}

    plain, routed = (number(cell) for cell in rows["requests"])
    assert plain == routed > 50
    plain, routed = (number(cell) for cell in rows["prompt tokens"])
    assert plain == routed, "both policies were asked the same questions"
    plain, routed = (number(cell) for cell in rows["cached tokens (engines' count)"])
    assert routed > plain
    plain, routed = (number(cell) for cell in rows["TTFT p50"])
    assert routed < plain
    assert number(rows["requests served by a peer pull"][1]) > 0
    assert number(rows["blocks planned by peer"][1]) > 0
    assert "kv_aware against round_robin" in out.splitlines()[-1]
    assert not err
