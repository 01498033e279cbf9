# SPDX-License-Identifier: Apache-2.0
"""Runs the tests under `kernels/`, which need torch and Triton, where those are installed.

They run in processes of their own: Triton decides between interpreter and compiler when it is first imported. Python
is the one that tests/real/setup.sh installed, to which pytest, Hypothesis and this package are lent from here, or
this one if it has torch and Triton itself.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ..real.launch import enabling_command, real_home  # noqa: TID252 - tests are not an installed package

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 240
# sys.path of the other interpreter stays first: its torch, its numpy. addsitedir also runs .pth files, so that an
# editable install of this package is found. -P keeps the working directory out: the installed package is tested.
LENT = "import site, sys; site.addsitedir(sys.argv.pop(1)); "
PYTEST = LENT + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
BENCH = LENT + "from gpu_ops import bench; sys.exit(bench.main(sys.argv[1:]))"


def has_torch() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "triton"))


@pytest.fixture(scope="module")
def python() -> Path:
    """A Python of this version with torch and Triton."""
    home = real_home()
    if home is None and has_torch():
        return Path(sys.executable)
    if home is None:
        reason = f"no torch and no Triton; enable it with: {enabling_command()}"
        if os.environ.get("POINTSMAN_CI") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    found = home / "venv/bin/python"
    version = subprocess.check_output([found, "-c", "import sys; print(*sys.version_info[:2])"], text=True)
    assert version.split() == [str(part) for part in sys.version_info[:2]], (
        "pytest is lent to the same Python only"
    )
    return found


def run(python: Path, suite: str, cache: Path, *options: str, **environment: str) -> None:
    """Runs one folder of tests, none of which may fail or be skipped."""
    result = subprocess.run(
        [
            *(python, "-P", "-c", PYTEST, sysconfig.get_path("purelib")),
            *("-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", *options),
            *(f"--confcutdir={HERE / 'kernels'}", HERE / "kernels" / suite),
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "VLLM_NO_USAGE_STATS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    closing = result.stdout.strip().rsplit("\n", 1)[-1]
    assert result.returncode == 0, result.stdout
    assert "passed" in closing, result.stdout
    assert "skipped" not in closing, result.stdout


def test_kernels_in_triton_s_interpreter_equal_their_references(python: Path, tmp_path: Path) -> None:
    run(python, "interpreted", tmp_path, TRITON_INTERPRET="1")


def test_kernels_compile_ahead_of_time_into_wide_accesses(python: Path, tmp_path: Path) -> None:
    run(python, "compiled", tmp_path, TRITON_INTERPRET="0")


def test_plans_copy_what_vllm_s_workers_copy(python: Path, tmp_path: Path) -> None:
    here = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([python, "-c", here], check=False).returncode:
        pytest.skip(f"torch without vLLM; enable it with: {enabling_command()}, in a venv without torch")
    run(python, "vllm", tmp_path, "-W", "default")  # what vLLM imports warns at import


def test_kernels_on_a_gpu_equal_their_references(python: Path, tmp_path: Path) -> None:
    one = Path(sys.executable) if has_torch() else python
    if subprocess.run(
        [one, "-c", "import torch; assert torch.cuda.is_available()"], stderr=subprocess.DEVNULL, check=False
    ).returncode:
        pytest.skip("no GPU")
    result = subprocess.run(
        [one, "-P", "-c", BENCH, sysconfig.get_path("purelib"), "--check-only"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "correct: 42 checks" in result.stdout
