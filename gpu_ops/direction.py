# SPDX-License-Identifier: Apache-2.0
"""The two directions of a transfer, by the names of the tiers."""

from __future__ import annotations

from enum import Enum


class Direction(Enum):
    """Which way the bytes go."""

    PROMOTE = "promote"  # host memory to the GPU's KV cache
    DEMOTE = "demote"  # the GPU's KV cache to host memory
