# SPDX-License-Identifier: Apache-2.0
"""Runs a script in the engine's venv, under a chosen vLLM version, without an engine.

Adapters to vLLM are tested there against vLLM's own managers: importing it takes some seconds, a server half a
minute. The script finds `vllm`, `engine_ext` and `gpu_ops`; its own directory is the first entry of its sys.path.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .imports import Version, python_path

_DROPPED = ("VLLM_", "PYTHON", "VIRTUAL_ENV")


class ScriptFailedError(AssertionError):
    """The script ended with another status than zero; the message ends with what it said last."""


def command(home: Path, script: Path, arguments: Sequence[str] = ()) -> list[str]:
    """The words to start it with, for callers that keep the process themselves."""
    return [str(home / "venv/bin/python"), "-X", "faulthandler", str(script), *arguments]


def environment(
    home: Path, version: Version = "0.32", extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Everything such a process sees; `extra` is added last."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_DROPPED)}
    return kept | {
        "PYTHONPATH": python_path(home, version, extension=True),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        **(extra or {}),
    }


def run(
    home: Path,
    script: Path,
    *arguments: str,
    version: Version = "0.32",
    timeout_s: float = 120,
    extra: Mapping[str, str] | None = None,
) -> str:
    """What the script printed on stdout.

    Raises:
        ScriptFailedError: it ended with another status than zero.
        subprocess.TimeoutExpired: it took longer than `timeout_s`; it has been killed.
    """
    done = subprocess.run(
        command(home, script, arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=environment(home, version, extra),
    )
    if done.returncode:
        said = f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        raise ScriptFailedError(f"{script.name} under vLLM {version} ended with {done.returncode}\n{said}")
    return done.stdout


Scenario = Callable[[str], dict[str, Any]]


def scenarios(home: Path, script: Path, version: Version) -> Scenario:
    """`scenarios(...)(name)`: what that scenario of the script came to under this version.

    The script gets a directory of its own and says all results in its last line, as JSON by name. It runs once per
    version for all tests, because importing vLLM takes longer than its scenarios together.
    """

    def play(name: str) -> dict[str, Any]:
        results = _played(home, script, version)
        assert "error" not in results, results["error"]
        result: dict[str, Any] = results[name]
        return result

    return play


@functools.cache
def _played(home: Path, script: Path, version: Version) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        try:
            results: dict[str, Any] = json.loads(run(home, script, root, version=version).splitlines()[-1])
        except ScriptFailedError as error:
            return {"error": str(error)}
    return results
