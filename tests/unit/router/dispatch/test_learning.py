# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from router.request import Outcome, Usage

from .conftest import MODEL, Desk

PROMPT = list(range(100, 8100))


async def answer(desk: Desk, ttft_s: float, cached: int | None = 0, **body: Any) -> None:
    """One request to the only worker, which takes ``ttft_s`` to its first byte and a second more."""
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT, "stream": True} | body)
    desk.now_s += ttft_s
    attempt.first_byte()
    desk.now_s += 1.0
    attempt.usage(Usage(prompt_tokens=len(PROMPT), completion_tokens=3, cached_tokens=cached))
    attempt.finish(Outcome.OK, 200)


async def test_predictions_follow_what_streamed_answers_took(desk: Desk) -> None:
    desk.add("a")
    before_s = (await desk.dispatcher.explain(desk.request({"prompt": PROMPT}))).predicted_ttft_s
    for _ in range(20):
        await answer(desk, 4 * before_s)
    after_s = (await desk.dispatcher.explain(desk.request({"prompt": PROMPT}))).predicted_ttft_s
    assert after_s == pytest.approx(4 * before_s, rel=0.1)
    assert desk.calibration.observations == 20


@pytest.mark.parametrize(
    ("cached", "body"),
    [
        (0, {"stream": False}),
        (None, {}),
        (0, {"prompt": [PROMPT, PROMPT]}),
        (0, {"prompt": "text that nobody can tokenise"}),
    ],
    ids=["not streamed", "no cached tokens", "two prompts", "no tokens"],
)
async def test_answers_whose_terms_are_not_known_teach_nothing(
    desk: Desk, cached: int | None, body: dict[str, Any]
) -> None:
    desk.add("a")
    await answer(desk, 5.0, cached, **body)
    assert desk.calibration.observations == 0
    assert not desk.calibration.skipped


async def test_a_plan_that_the_client_replaced_teaches_nothing() -> None:
    desk = Desk(trust_transfer_params=True)
    desk.add("a")
    await answer(desk, 5.0, kv_transfer_params={"do_remote_decode": True})
    assert desk.calibration.observations == 0
    assert not desk.calibration.skipped
