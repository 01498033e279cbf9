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
    assert set(desk.calibration.skipped) <= {"short_answer"}


async def test_a_plan_that_the_client_replaced_teaches_nothing() -> None:
    desk = Desk(trust_transfer_params=True)
    desk.add("a")
    await answer(desk, 5.0, kv_transfer_params={"do_remote_decode": True})
    assert desk.calibration.observations == 0
    assert set(desk.calibration.skipped) <= {"short_answer"}


async def decode(
    desk: Desk, step_s: float, tokens: int = 101, outcome: Outcome = Outcome.OK, **body: Any
) -> None:
    """One request to the only worker, alone there, that gives a token every ``step_s``."""
    attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT, "stream": True} | body)
    desk.now_s += 0.7
    attempt.first_byte()
    desk.now_s += step_s * (tokens - 1)
    attempt.usage(Usage(prompt_tokens=len(PROMPT), completion_tokens=tokens, cached_tokens=0))
    attempt.finish(outcome, 200)


async def test_the_time_per_output_token_follows_what_answers_took(desk: Desk) -> None:
    desk.add("a")
    for _ in range(30):
        await decode(desk, 0.05)
    assert desk.calibration.decode_observations == 30
    assert desk.calibration.model_for("a").decode_step_s(1) == pytest.approx(0.05, rel=0.1)


async def test_prefills_beside_an_answer_are_not_taken_for_slow_decoding(desk: Desk) -> None:
    desk.add("a")
    for _ in range(30):
        attempt = await desk.dispatch({"model": MODEL, "prompt": PROMPT, "stream": True})
        desk.now_s += 0.7
        attempt.first_byte()
        other = {"model": MODEL, "prompt": [1, *PROMPT[1:]], "stream": True, "max_tokens": 1}
        beside = await desk.dispatch(other)
        prefill_s = desk.calibration.model_for("a").prefill_s(0, len(PROMPT), 1)
        desk.now_s += prefill_s
        beside.first_byte()
        beside.finish(Outcome.OK, 200)
        desk.now_s += 0.01 * 200
        attempt.usage(Usage(prompt_tokens=len(PROMPT), completion_tokens=201, cached_tokens=0))
        attempt.finish(Outcome.OK, 200)
    assert desk.calibration.decode_observations == 30
    assert desk.calibration.model_for("a").decode_step_s(1) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    ("outcome", "body"),
    [
        (Outcome.CLIENT_GONE, {}),
        (Outcome.WORKER_ERROR, {}),
        (Outcome.OK, {"stream": False}),
        (Outcome.OK, {"n": 2}),
    ],
    ids=["client gone", "worker error", "not streamed", "two sequences"],
)
async def test_answers_whose_steps_cannot_be_counted_teach_nothing_of_decoding(
    desk: Desk, outcome: Outcome, body: dict[str, Any]
) -> None:
    desk.add("a")
    await decode(desk, 0.05, outcome=outcome, **body)
    assert desk.calibration.decode_observations == 0
