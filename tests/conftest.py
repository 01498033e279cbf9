# SPDX-License-Identifier: Apache-2.0
"""Fixtures every test may ask for: real engines, and the settings that decide whether they are there.

* POINTSMAN_REAL: the directory that tests/real/setup.sh filled. Without it tests marked `real` are skipped.
* POINTSMAN_VLLM: the vLLM version of engines for which a test names none (0.32, the default, or 0.33).
* POINTSMAN_TRACES: the directory of recorded traces. Without it tests marked `trace` are skipped.
* POINTSMAN_CI=1: a missing part is a failure, not a skip.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from .real.engine import RealWorker
from .real.imports import VERSIONS, Version, has_version
from .real.launch import P2P, PLAIN, WorkerConfig, enabling_command, real_home
from .real.stage import Stage, remove_logs, stage

# Fixtures that decide which engines are up, in the order in which their tests run.
_ENGINES = ("real_pair", "real_p2p_pair", "real_workers")


def _missing(reason: str, *, skippable: bool) -> NoReturn:
    if os.environ.get("POINTSMAN_CI") == "1" and not skippable:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests that use the same engines side by side (starting a pair takes half a minute), shuffled within."""

    def engines(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        return max((1 + i for i, name in enumerate(_ENGINES) if name in names), default=0)

    def version(item: pytest.Item) -> str:
        callspec = getattr(item, "callspec", None)
        return str(callspec.params.get("vllm_version", "")) if callspec else ""

    items.sort(key=lambda item: (engines(item), version(item)))
    for item in items:
        if engines(item):
            item.add_marker("real")


@pytest.fixture(scope="session")
def real_stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    home = real_home()
    if home is None:
        _missing(f"no real engine; enable it with: {enabling_command()}", skippable=False)
    failed_before = request.session.testsfailed
    with stage(home) as one:
        yield one
    if request.session.testsfailed == failed_before:
        remove_logs(home)


@pytest.fixture
def real_workers(real_stage: Stage) -> Callable[..., tuple[RealWorker, ...]]:
    """`real_workers(config, ...)`: running workers of just these configurations; others are stopped first."""

    def workers(*configs: WorkerConfig) -> tuple[RealWorker, ...]:
        for config in configs:
            _need_version(real_stage.home, config.vllm)
        return real_stage.get(*configs)

    return workers


@pytest.fixture(params=VERSIONS)
def vllm_version(request: pytest.FixtureRequest, real_stage: Stage) -> Version:
    """Each supported vLLM version in turn."""
    version: Version = request.param
    _need_version(real_stage.home, version)
    return version


def _need_version(home: Path, version: Version) -> None:
    if not has_version(home, version):
        _missing(f"vLLM {version} is not installed; enable it with: {enabling_command()}", skippable=False)


@pytest.fixture
def real_pair(real_stage: Stage) -> tuple[RealWorker, ...]:
    """Two plain workers. Caches are as the last test left them: use prompts of your own."""
    return real_stage.get(PLAIN, PLAIN)


@pytest.fixture
def real_p2p_pair(real_stage: Stage) -> tuple[RealWorker, ...]:
    """Two workers with a host tier that pull from one another through vLLM's P2P tier."""
    return real_stage.get(P2P, P2P)


@pytest.fixture(scope="session")
def traces() -> Path:
    """The directory of recorded traces."""
    named = os.environ.get("POINTSMAN_TRACES")
    if not named:
        _missing("no recorded traces; name their directory in POINTSMAN_TRACES", skippable=True)
    path = Path(named).expanduser().resolve()
    if not path.is_dir():
        pytest.fail(f"POINTSMAN_TRACES names {path}, which is not a directory", pytrace=False)
    return path
