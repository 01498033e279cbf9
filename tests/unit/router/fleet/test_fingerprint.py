# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from router.fleet.fingerprint import fingerprint
from router.fleet.worker import ModelInfo, WorkerSpec, WorkerStatus


def status(root: str = "/m", block: int = 16, dtype: str | None = "auto", **spec: Any) -> WorkerStatus:
    models = {"m": ModelInfo("m", "m", root=root), "a": ModelInfo("a", "m", lora="a", root="/a")}
    return WorkerStatus(
        WorkerSpec("w", "http://w", **spec), models=models, block_size_tokens=block, cache_dtype=dtype
    )


def test_alike_workers_are_equal() -> None:
    assert fingerprint(status(), "m") == fingerprint(status(), "m")


@pytest.mark.parametrize(
    "other",
    [
        status(root="/n"),
        status(block=32),
        status(dtype="fp8"),
        status(dtype=None),
        status(chunk_blocks=2),
        status(fingerprint="rev-2"),
    ],
)
def test_any_difference_counts(other: WorkerStatus) -> None:
    assert fingerprint(status(), "m") != fingerprint(other, "m")
