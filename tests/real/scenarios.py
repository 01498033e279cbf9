# SPDX-License-Identifier: Apache-2.0
"""A script that plays named scenarios in the engine's venv, in one process, because its imports take seconds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Scenario = Callable[[str], Result]


@contextlib.contextmanager
def playing(home: Path, script: str, log: Path) -> Iterator[Scenario]:
    """`play(name)`: what that scenario of `script`, a file beside this one, came to. Nothing of it outlives the block."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [home / "venv/bin/python", Path(__file__).with_name(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None

    def play(name: str) -> Result:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(name + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        result: Result = json.loads(line) if line else {"error": f"the process ended: {process.wait()}"}
        assert "error" not in result, f"{result['error']}\n{log.read_text(errors='replace')[-4000:]}"
        return result

    with process:
        try:
            yield play
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(20)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
