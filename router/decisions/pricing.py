# SPDX-License-Identifier: Apache-2.0
"""The price of blocks that are known, whichever action led to them. Pure.

The formulas of ``router.plan.planner`` for a request of one prompt, for what is no longer one of its actions: a plan
that was carried out, under constants that are not those it was made with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from router.costs.model import CostModel, Link, SourceShare
from router.plan.candidate import Terms


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


class Pulled(NamedTuple):
    """What comes from one source."""

    tokens: int
    link: Link
    other_pulls: float
    connected: bool


def pulled_s(model: CostModel, pulls: Sequence[Pulled], capacity_bytes_per_s: float) -> float:
    """Seconds of the pulls of a plan, promotion included; ``capacity_bytes_per_s`` counts where there are several."""
    if not pulls:
        return 0.0
    if len(pulls) == 1:
        (one,) = pulls
        return model.peer_s(one.tokens, one.other_pulls, connected=one.connected, link=one.link)
    return model.pulls_s(
        [
            SourceShare(
                one.tokens,
                one.link.start_s(connected=one.connected),
                one.link.share_bytes_per_s(one.other_pulls),
            )
            for one in pulls
        ],
        capacity_bytes_per_s,
    )


def price(
    model: CostModel,
    prompt_tokens: int,
    placed: PlacedTokens,
    expected_tokens: float,
    queue_s: float,
    decodes: int,
    peer_s: float,
) -> Terms:
    """Terms but for ``decode_s``, ``remote_s`` and ``displaced_s``; ``peer_s`` as ``pulled_s`` has it.

    ``expected_tokens`` of ``placed`` will really be there.
    """
    missing = max(prompt_tokens - expected_tokens, 1)
    return Terms(
        queue_s=queue_s,
        admit_s=model.admit_s(queue_s),
        ram_s=model.promotion_s(placed.ram),
        peer_s=peer_s,
        storage_s=model.storage_s(placed.storage),
        prefill_s=model.prefill_s(prompt_tokens - missing, missing, decodes),
    )
