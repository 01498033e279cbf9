# SPDX-License-Identifier: Apache-2.0
"""What the engine loads from where: the table was read off a running vLLM 0.32 (block of 32 tokens)."""

from __future__ import annotations

import pytest

from router.plan.candidate import Residence, Span
from router.plan.paths import Loads, derive_loads

B = 32


def cached(loads: Loads) -> int:
    return loads.total * B


@pytest.mark.parametrize(
    ("tokens", "expected"), [(31, 0), (32, 0), (33, 32), (64, 32), (65, 64), (96, 64), (97, 96)]
)
def test_hbm_alone_stops_one_token_before_the_end(tokens: int, expected: int) -> None:
    assert cached(derive_loads(tokens, B, 1, Residence(hbm=((0, 99),)))) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"), [(31, 0), (32, 32), (33, 32), (63, 32), (64, 64), (65, 64), (96, 96)]
)
def test_with_a_copy_in_ram_a_whole_number_of_blocks_is_cached_to_the_end(tokens: int, expected: int) -> None:
    loads = derive_loads(tokens, B, 1, Residence(hbm=((0, 99),), ram=((0, 99),)))
    assert cached(loads) == expected
    assert loads.ram == (tokens % B == 0 and tokens >= B)


# (tokens, HBM and RAM, RAM only, peer only) with two blocks to a chunk.
CHUNKS_OF_TWO = [
    (63, 32, 0, 0),
    (64, 32, 64, 64),
    (65, 64, 64, 64),
    (96, 64, 64, 64),
    (97, 96, 64, 64),
    (128, 96, 128, 128),
    (129, 128, 128, 128),
    (160, 128, 128, 128),
    (192, 160, 192, 192),
]


@pytest.mark.parametrize(("tokens", "both", "ram", "peer"), CHUNKS_OF_TWO)
def test_lower_tiers_load_whole_chunks(tokens: int, both: int, ram: int, peer: int) -> None:
    everything: tuple[Span, ...] = ((0, 99),)
    assert cached(derive_loads(tokens, B, 2, Residence(hbm=everything, ram=everything))) == both
    assert cached(derive_loads(tokens, B, 2, Residence(ram=everything))) == ram
    assert cached(derive_loads(tokens, B, 2, Residence(), everything)) == peer


@pytest.mark.parametrize(
    ("hbm_blocks", "tokens", "expected"),
    [
        (1, 128, (1, 3)),
        (1, 129, (1, 3)),
        (2, 129, (2, 2)),
        (3, 129, (3, 0)),
        (3, 192, (3, 3)),
        (3, 256, (3, 5)),
        (1, 96, (1, 0)),
        (1, 64, (1, 0)),
    ],
)
def test_walk_begins_with_the_chunk_in_which_hbm_ends(
    hbm_blocks: int, tokens: int, expected: tuple[int, int]
) -> None:
    loads = derive_loads(tokens, B, 2, Residence(hbm=((0, hbm_blocks),), ram=((0, 99),)))
    assert (loads.hbm, loads.ram) == expected


def test_chunk_is_known_by_its_last_block() -> None:
    # Without self-describing events only the last block of each chunk has a RAM event.
    named: tuple[Span, ...] = ((1, 2), (3, 4))
    assert derive_loads(129, B, 2, Residence(ram=named)) == Loads(ram=4)
    assert derive_loads(129, B, 2, Residence(ram=((0, 1), (2, 3)))) == Loads()


def test_first_block_that_is_nowhere_ends_the_walk() -> None:
    residence = Residence(hbm=((0, 2),), ram=((2, 3), (4, 9)), storage=((3, 4),))
    assert derive_loads(9 * B + 1, B, 1, residence) == Loads(hbm=2, ram=6, storage=1)
    assert derive_loads(9 * B + 1, B, 1, Residence(hbm=((0, 2),), ram=((3, 9),))) == Loads(hbm=2)


def test_block_in_the_middle_alone_is_worth_nothing() -> None:
    assert derive_loads(9 * B, B, 1, Residence(hbm=((1, 9),))) == Loads()


def test_nearer_tier_serves_a_block_that_several_hold() -> None:
    residence = Residence(ram=((0, 2),), storage=((0, 4),))
    assert derive_loads(5 * B, B, 1, residence, peer_ram=((1, 3),)) == Loads(ram=2, peer=1, storage=1)


def test_forbidden_external_load_leaves_hbm() -> None:
    residence = Residence(hbm=((0, 2),), ram=((0, 9),))
    assert derive_loads(9 * B, B, 1, residence, external=False) == Loads(hbm=2)
