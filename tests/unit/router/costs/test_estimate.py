# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.costs.estimate import estimate
from router.costs.model import CostModel
from router.costs.observation import LINK_TERMS, WORKER_TERMS, prior_seconds
from router.costs.profile import load_profile
from router.plan.candidate import Candidate, Question, Residence, Source
from router.plan.observed import observation
from router.plan.planner import Planner

PROFILE = load_profile("default")
B, TOKENS = 16, 32_000


@given(
    hbm=st.integers(0, 500),
    ram=st.integers(0, 1000),
    peer=st.integers(0, 2000),
    queue_s=st.floats(0, 5),
    decodes=st.integers(0, 50),
    pulls=st.integers(0, 4),
)
def test_what_is_learnt_from_is_what_was_predicted(
    hbm: int, ram: int, peer: int, queue_s: float, decodes: int, pulls: int
) -> None:
    residence = Residence(hbm=((0, hbm),) if hbm else (), ram=((0, ram),) if ram else ())
    candidate = Candidate("a", 0, B, 1, [residence], queue_s, decodes, can_pull=True)
    source = Source("b", 0, "b", 1, Residence(ram=((0, peer),) if peer else ()), pulls)
    plan = (
        Planner(CostModel(PROFILE), 0.1, 5.0)
        .plan(Question([TOKENS], [candidate], [source]), Random(0))
        .chosen
    )
    seen = observation(plan, TOKENS, plan.cached_tokens, ttft_s=1.0)
    expected = estimate(
        prior_seconds(PROFILE, seen), queue_s, [1.0] * len(WORKER_TERMS), [1.0] * len(LINK_TERMS)
    )
    assert expected.ttft_s == pytest.approx(plan.terms.total_s)
