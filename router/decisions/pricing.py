# SPDX-License-Identifier: Apache-2.0
"""The price of blocks that are known, whichever action led to them. Pure.

The formulas of ``router.plan.planner`` for a request of one prompt, for what is no longer one of its actions: a plan
that was carried out, under constants that are not those it was made with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from router.costs.model import CostModel, Link
from router.plan.candidate import Circumstances, Terms


class PlacedTokens(NamedTuple):
    """Cached tokens by where they come from."""

    hbm: int = 0
    ram: int = 0
    peer: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.hbm + self.ram + self.peer + self.storage


def placed_tokens(path_blocks: Mapping[str, int], block_size_tokens: int) -> PlacedTokens:
    """Tokens of the blocks of a plan."""
    return PlacedTokens(*(path_blocks.get(place, 0) * block_size_tokens for place in PlacedTokens._fields))


def price(
    model: CostModel,
    link: Link | None,
    prompt_tokens: int,
    placed: PlacedTokens,
    expected_tokens: float,
    queue_s: float,
    around: Circumstances,
) -> Terms:
    """Terms but for ``decode_s`` and ``remote_s``. ``link`` is that of the pull, None where nothing is pulled.

    ``expected_tokens`` of ``placed`` will really be there.
    """
    missing = max(prompt_tokens - expected_tokens, 1)
    peer_s = 0.0
    if link is not None:
        peer_s = model.peer_s(placed.peer, around.other_pulls, connected=around.connected, link=link)
    return Terms(
        queue_s=queue_s,
        admit_s=model.admit_s(queue_s),
        ram_s=model.promotion_s(placed.ram),
        peer_s=peer_s,
        storage_s=model.storage_s(placed.storage),
        prefill_s=model.prefill_s(prompt_tokens - missing, missing, around.decodes),
    )
