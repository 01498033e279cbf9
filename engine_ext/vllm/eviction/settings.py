# SPDX-License-Identifier: Apache-2.0
"""The constants of the eviction policy. One set for all traffic; tests/bench/eviction.py measures it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Counts of chunks are given as shares of the tier's capacity."""

    turns: int = 3
    """Conversations are told apart by their turn: first, second, ..., this many and later."""
    forks: int = 3
    """Chunks are told apart by how many prompts branched off behind them: none, one, more; as powers of two."""
    first_age_s: float = 0.5
    ages_per_doubling: int = 2
    doublings: int = 16
    """Ages are counted in buckets; the last begins at first_age_s * 2 ** doublings, nine hours."""
    prior_reuse: float = 0.03
    """Share of chunks that are read again within one bucket, before anything is known. Equal for all ages: rates
    then fall as 1 / age, and the oldest is worth least."""
    prior_weight: float = 0.03
    """How many observed chunks the prior counts for."""
    private_reuse: float = 0.0005
    """The prior of chunks that the router expects nobody to read again."""
    memory: float = 32.0
    """After as many reuses all counts are halved."""
    refresh: float = 0.125
    """After as many visited chunks the worths are computed anew."""
    ghosts: float = 4.0
    """Chunks that are remembered without being held."""
    continues_from: float = 0.8
    """A prompt continues an earlier one if it shares at least this part of it."""
    recency_until_lost: float = 0.05
    """Least recently used goes first until as many chunks were evicted and then wanted again ..."""
    recency_again_below: float = 0.0125
    """... and again once fewer were, of the last `watched` chunks read."""
    watched: float = 4.0
    pin_s: float = 600.0
    """A pin holds that long after the last request that asked for it."""
    pull_share: float = 0.4
    """Seconds of a pull from a peer over those of computing: published pairs from 8,192 tokens up."""
    copy_lost: float = 0.25
    """Chance that a peer's copy is gone by the time it is wanted."""
    reuse_trust: float = 0.1
    """How much the router's expected reuse weighs beside what is learnt here: the power of its ratio to the usual."""
    reuse_fades: float = 0.02
    """Share of one request in what reuse is usual."""
    attention_per_token: float = 3.2e-5
    """Seconds per token and token before it, over seconds per token: an 8B model with grouped-query attention on
    one H100. Fitted to the router's `rebuild_s` where that is given."""
