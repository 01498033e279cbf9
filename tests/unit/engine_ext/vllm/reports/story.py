# SPDX-License-Identifier: Apache-2.0
"""The requests of the golden batch, as tiers tell them."""

from __future__ import annotations

from engine_ext.vllm.reports.aggregate import Aggregator

ENGINE = "boot-b"
BLOCK_TOKENS = 16
BLOCK_BYTES = 1000
NEAR, FAR, GONE = "10.0.0.7:5720", "10.0.0.9:5710", "10.0.0.8:5720"


def tell(told: Aggregator) -> None:
    """Two requests; of the first, blocks are evicted once its report is out."""
    told.began("cmpl-1", "pm-1")
    told.asked("cmpl-1", "pm-1", "ram", 8)
    told.answered("cmpl-1", "ram", 2, 6, 0.0)
    told.asked("cmpl-1", "pm-1", NEAR, 4)
    told.asked("cmpl-1", "pm-1", FAR, 2, "p2p")
    told.answered("cmpl-1", NEAR, 3, 1, 0.25)
    told.answered("cmpl-1", FAR, 2, 0, 0.125)
    told.moved("cmpl-1", NEAR, 3, 3 * BLOCK_BYTES, 0.5)
    told.moved("cmpl-1", FAR, 1, BLOCK_BYTES, 0.5, "deadline")
    told.promoted("cmpl-1", 6, 6 * BLOCK_BYTES, 0.0625)
    told.finished("cmpl-1", 1_700_000_000.5)
    told.asked("cmpl-2", "pm-2", GONE, 4)
    told.failed("cmpl-2", GONE, "refused:model", 0.25)
    told.asked("cmpl-2", "pm-2", "storage", 4)
    told.answered("cmpl-2", "storage", 4, 0, 0.0)
    told.moved("cmpl-2", "storage", 4, 4 * BLOCK_BYTES, 1.0)
    told.evicted("cmpl-2", 1)
    told.finished("cmpl-2", 1_700_000_001.5)
