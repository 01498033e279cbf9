# SPDX-License-Identifier: Apache-2.0
"""Which blocks stock vLLM will load from where, given an action. Pure.

The engine walks a fixed order; a request only narrows it. Read in vLLM 0.32
(``v1/core/kv_cache_manager.py``, ``kv_connector/v1/offloading/scheduler.py`` and ``kv_offload/tiering/manager.py``)
and checked against the running engine:

* HBM first: whole blocks from the start, at most n - 1 tokens, since the last token must be computed.
* Then whole chunks (``chunk_blocks`` blocks), starting with the chunk in which the HBM hit ends; each chunk is
  looked up in RAM, then in the peer, then in storage; the first that is nowhere ends the walk.
* An external hit may reach n, but one that adds less than a chunk is dropped.
* A chunk is named by its last block: without self-describing events the others have no RAM event of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.plan.candidate import Residence, Span


@dataclass(frozen=True, slots=True)
class Loads:
    """Blocks of one prompt by where they come from; the rest is recomputed."""

    hbm: int = 0
    ram: int = 0
    peer: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        """Blocks that are not recomputed."""
        return self.hbm + self.ram + self.peer + self.storage


def leading_blocks(spans: Sequence[Span]) -> int:
    """Length of the run that starts at block 0."""
    return spans[0][1] if spans and spans[0][0] == 0 else 0


def derive_loads(
    prompt_tokens: int,
    block_size_tokens: int,
    chunk_blocks: int,
    residence: Residence,
    peer_ram: Sequence[Span] = (),
    *,
    external: bool = True,
) -> Loads:
    """What the engine will load for a prompt. O(spans + chunks of the prompt).

    ``external`` False: the request forbids loading beyond HBM.
    """
    hbm = min(leading_blocks(residence.hbm), max(prompt_tokens - 1, 0) // block_size_tokens)
    if not external:
        return Loads(hbm=hbm)
    chunks = prompt_tokens // (block_size_tokens * chunk_blocks)
    found = {"ram": 0, "peer": 0, "storage": 0}
    lookups = (("ram", residence.ram), ("peer", peer_ram), ("storage", residence.storage))
    position = hbm
    for chunk in range(hbm // chunk_blocks, chunks):
        end = (chunk + 1) * chunk_blocks
        path = next((path for path, spans in lookups if _covers(spans, end - 1)), None)
        if path is None:
            break
        found[path] += end - position
        position = end
    if position - hbm < chunk_blocks:
        return Loads(hbm=hbm)
    return Loads(hbm=hbm, **found)


def _covers(spans: Sequence[Span], block: int) -> bool:
    return any(start <= block < end for start, end in spans)
