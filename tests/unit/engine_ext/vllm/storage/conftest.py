# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .stores import Worker, open_worker


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def worker(root: Path) -> Iterator[Callable[..., Worker]]:
    """`worker(blocks=..., fingerprint=..., **configuration)`: one more worker on the same directory."""
    made: list[Worker] = []

    def make(**given: Any) -> Worker:
        made.append(open_worker(root, **given))
        return made[-1]

    yield make
    for one in made:
        one.store.close()
