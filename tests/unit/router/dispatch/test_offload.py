# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter

from router.plan.tails import LEAST_REQUESTS, TailReuse
from router.request import Outcome, Usage

from .conftest import BLOCK, MODEL, Desk

SHARED = list(range(100, 100 + 10 * BLOCK))


async def serve(desk: Desk, number: int, **fields: object) -> object:
    """One request with the shared beginning and a tail of its own; what it told the engine of offloading."""
    tail = [10_000 + number * BLOCK + i for i in range(2 * BLOCK)]
    attempt = await desk.dispatch({"model": MODEL, "prompt": SHARED + tail, **fields})
    params = attempt.route.insert.get("kv_transfer_params") or {}
    attempt.usage(Usage(prompt_tokens=12 * BLOCK, completion_tokens=4, cached_tokens=10 * BLOCK))
    attempt.finish(Outcome.OK, 200)
    assert isinstance(params, dict)
    return params.get("max_offload_tokens")


async def test_tails_that_nobody_reads_again_are_not_offloaded() -> None:
    desk = Desk(tails=TailReuse())
    desk.add("a")
    desk.store("a", SHARED)
    caps = [await serve(desk, number) for number in range(LEAST_REQUESTS + 100)]
    assert set(caps[:LEAST_REQUESTS]) == {None}
    later = Counter(caps[LEAST_REQUESTS:])
    assert set(later) == {None, len(SHARED)}
    assert later[None] < 20


async def test_everything_is_offloaded_unless_configured(desk: Desk) -> None:
    desk.add("a")
    desk.store("a", SHARED)
    assert {await serve(desk, number) for number in range(LEAST_REQUESTS + 50)} == {None}


async def test_expected_answer_follows_what_was_answered_and_what_is_allowed(desk: Desk) -> None:
    desk.add("a")
    for number in range(400):
        await serve(desk, number)
    read = await desk.dispatcher._reader.read(desk.request({"model": MODEL, "prompt": SHARED}))
    assert read.prompts is not None
    assert read.prompts.output_tokens < 10
    capped = desk.request({"model": MODEL, "prompt": SHARED, "max_tokens": 2})
    read = await desk.dispatcher._reader.read(capped)
    assert read.prompts is not None
    assert read.prompts.output_tokens == 2
