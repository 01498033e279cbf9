# SPDX-License-Identifier: Apache-2.0
"""A short course of random operations; ``tests/fuzz/differential.py`` goes on for millions."""

from __future__ import annotations

import pytest
from index_differ import Differ


@pytest.mark.parametrize("seed", range(4))
def test_native_index_equals_the_reference_operation_by_operation(seed: int) -> None:
    Differ(seed).run(3_000)
