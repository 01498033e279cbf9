# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from router.plan.candidate import Residence, Span
from router.plan.speculation import expected, hbm_blocks


@pytest.mark.parametrize(
    ("hbm", "blocks", "result"),
    [
        ((), 0, ()),
        ((), 4, ((0, 4),)),
        (((0, 6),), 4, ((0, 6),)),
        (((0, 3),), 4, ((0, 4),)),
        (((0, 2), (3, 9)), 4, ((0, 9),)),
        (((0, 2), (6, 9)), 4, ((0, 4), (6, 9))),
        (((4, 9),), 4, ((0, 9),)),
        (((5, 9),), 4, ((0, 4), (5, 9))),
    ],
)
def test_the_beginning_is_in_hbm_beside_what_is_known(
    hbm: tuple[Span, ...], blocks: int, result: tuple[Span, ...]
) -> None:
    known = Residence(hbm, ((1, 2),), ((7, 8),))
    assert expected(known, blocks) == Residence(result, ((1, 2),), ((7, 8),))


def test_blocks_of_all_prompts_are_counted() -> None:
    assert hbm_blocks([Residence(((0, 2), (5, 6))), Residence(ram=((0, 9),)), Residence(((3, 4),))]) == 4
