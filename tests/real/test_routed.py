# SPDX-License-Identifier: Apache-2.0
"""The router in front of real vLLM: what it predicts is what the engine reports, and its pulls carry the right bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import router.brain
from indexer.identity import WorkerId

from .engine import RealWorker
from .launch import BLOCK_SIZE_TOKENS, MODEL_NAME, Offload, WorkerConfig
from .prompts import token_ids
from .routed import Gateway, OneBitOff, Pair, by_name, gateway, settled, until

CONVERSATIONS, TURNS = 10, 5
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
    "this",
    "have",
    "from",
]


async def message_of_length(
    gateway: Gateway, history: list[dict[str, str]], rng: random.Random, beside: int
) -> str:
    """A user message after which the whole prompt has ``beside`` tokens more than a multiple of the block size."""
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(30, 60)))
    for _ in range(400):
        body = {"model": MODEL_NAME, "messages": [*history, {"role": "user", "content": text}]}
        async with gateway.session.post(
            gateway.app.brain.fleet.statuses()[0].spec.url + "/tokenize", json=body
        ) as response:
            count = (await response.json())["count"]
        if (count - beside) % BLOCK_SIZE_TOKENS == 0:
            return text
        text += f" {rng.choice(WORDS)}"
    raise AssertionError("no such length found")


async def prompt_of(gateway: Gateway, messages: list[dict[str, str]]) -> list[int]:
    body = {"model": MODEL_NAME, "messages": messages}
    async with gateway.session.post(
        gateway.app.brain.fleet.statuses()[0].spec.url + "/tokenize", json=body
    ) as response:
        ids: list[int] = (await response.json())["tokens"]
        return ids


async def converse(gateway: Gateway, pair: Pair, conversations: int, turns: int) -> list[dict[str, Any]]:
    """Interleaved conversations whose prompt lengths stand at and beside block multiples; their decision records."""
    rng = random.Random(random.SystemRandom().random())
    histories: list[list[dict[str, str]]] = [[] for _ in range(conversations)]
    records: list[dict[str, Any]] = []
    for turn in range(turns):
        for number, history in enumerate(histories):
            beside = (-1, 0, 1, 0, 7)[(turn + number) % 5]
            history.append(
                {"role": "user", "content": await message_of_length(gateway, history, rng, beside)}
            )
            answer, record = await gateway.post(
                "/v1/chat/completions", {"messages": history, "max_tokens": 12, "seed": 1}
            )
            await settled(gateway, by_name(pair, record["worker"]), await prompt_of(gateway, history))
            records.append(record | {"conversation": number, "turn": turn})
            history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
    return records


def assert_predictions_hold(records: list[dict[str, Any]]) -> None:
    lengths = {record["prompt_tokens"] % BLOCK_SIZE_TOKENS for record in records}
    assert {0, 1, BLOCK_SIZE_TOKENS - 1} <= lengths
    for record in records:
        observed = record["observed"]
        assert record["tokens_from"] == "local"
        assert observed["prompt_tokens"] == record["prompt_tokens"]
        assert observed["cached_tokens"] == record["predicted_cached_tokens"], record
        assert observed["stale"] is False
        if record["turn"] > 0:
            assert record["predicted_cached_tokens"] > 0, record
            first = next(r for r in records if r["conversation"] == record["conversation"])
            assert record["worker"] == first["worker"], record


async def test_predicted_cached_tokens_are_what_the_engine_reports(real_pair: Pair, tmp_path: Path) -> None:
    async with gateway(real_pair, tmp_path) as one:
        records = await converse(one, real_pair, CONVERSATIONS, TURNS)
    assert len(records) == 50
    assert len({record["worker"] for record in records}) == 2
    assert_predictions_hold(records)


async def test_most_of_a_burst_with_one_prompt_find_at_the_engine_what_was_promised_before_it_was_there(
    real_pair: Pair, tmp_path: Path
) -> None:
    blocks = 60
    prompt = token_ids(blocks * BLOCK_SIZE_TOKENS + 3)
    async with gateway(real_pair, tmp_path) as one:
        done = await asyncio.gather(*(one.complete(prompt, max_tokens=1) for _ in range(6)))
    records = [record for _, record in done]
    promised = sorted(record["predicted_cached_tokens"] for record in records)
    computing = promised.count(0)
    assert 1 <= computing <= 2, "one, and one that would have waited too long behind the others"
    assert promised[computing:] == [blocks * BLOCK_SIZE_TOKENS] * (6 - computing)
    assert any(record["speculative_tokens"] for record in records)
    # Together: requests may overtake each other on their way to the engine.
    assert sorted(record["observed"]["cached_tokens"] for record in records) == promised


async def test_predictions_hold_with_a_ram_tier_too(real_p2p_pair: Pair, tmp_path: Path) -> None:
    async with gateway(real_p2p_pair, tmp_path) as one:
        records = await converse(one, real_p2p_pair, CONVERSATIONS, TURNS)
    assert_predictions_hold(records)


async def test_repeat_of_whole_blocks_takes_its_last_block_from_ram(
    real_p2p_pair: Pair, tmp_path: Path
) -> None:
    prompt = token_ids(6 * BLOCK_SIZE_TOKENS)
    async with gateway(real_p2p_pair, tmp_path) as one:
        _, first = await one.complete(prompt)
        await settled(one, by_name(real_p2p_pair, first["worker"]), prompt)
        _, second = await one.complete(prompt)
    assert second["worker"] == first["worker"]
    # HBM alone may not give the whole prompt; a lower tier may.
    assert second["path_blocks"] == {"hbm": 5, "ram": 1}
    assert second["observed"]["cached_tokens"] == second["predicted_cached_tokens"] == len(prompt)


async def test_predictions_hold_with_chunks_that_are_named_by_their_last_block(
    real_workers: Callable[..., Pair], tmp_path: Path
) -> None:
    chunked = WorkerConfig(offload=Offload(blocks_per_chunk=2, self_describing=False))
    holder, puller = pair = real_workers(chunked, chunked)
    for blocks, beside in ((4, 0), (4, 1), (5, 0), (5, 13), (6, 0)):
        prompt = token_ids(blocks * BLOCK_SIZE_TOKENS + beside)
        async with gateway(pair, tmp_path, recompute_s_per_token=0.01) as one:
            await one.drain(puller, True)
            _, cold = await one.complete(prompt)
            await settled(one, holder, prompt[: blocks // 2 * 2 * BLOCK_SIZE_TOKENS])
            _, repeated = await one.complete(prompt)
            await one.drain(puller, False)
            await one.drain(holder, True)
            _, pulled = await one.complete(prompt)
        for record in (cold, repeated, pulled):
            assert record["observed"]["cached_tokens"] == record["predicted_cached_tokens"], record
        assert pulled["path_blocks"]["peer"] == blocks // 2 * 2


IN_PYTHON = {"plan.backend": "reference"}
"""The native planner hashes by itself, so it cannot be given a broken hash."""


@pytest.fixture
def broken_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    make = router.brain.open_index
    monkeypatch.setattr(router.brain, "open_index", lambda *args: OneBitOff(make(*args)))


@pytest.mark.usefixtures("broken_hashing")
async def test_one_wrong_bit_in_the_hash_breaks_the_prediction(real_pair: Pair, tmp_path: Path) -> None:
    async with gateway(real_pair, tmp_path, more=IN_PYTHON) as one:
        records = await converse(one, real_pair, 2, 3)
    with pytest.raises(AssertionError):
        assert_predictions_hold(records)
    assert {record["predicted_cached_tokens"] for record in records} == {0}


async def p2p_tokens(gateway: Gateway, worker: RealWorker) -> float:
    """Tokens the engine says it got from peers so far."""
    async with gateway.session.get(worker.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    values = [
        line.rsplit(" ", 1)[1]
        for line in lines
        if line.startswith("vllm:prompt_tokens_cached_by_source_total") and 'source="p2p"' in line
    ]
    return sum(map(float, values))


async def hold_only_at(gateway: Gateway, holder: RealWorker, other: RealWorker, prompt: list[int]) -> str:
    """Let ``holder`` compute the prompt, cold; then only ``other`` takes requests. Returns the cold text."""
    await gateway.drain(other, True)
    answer, record = await gateway.complete(prompt)
    assert record["observed"]["cached_tokens"] == 0
    await settled(gateway, holder, prompt)
    await gateway.drain(other, False)
    await gateway.drain(holder, True)
    text: str = answer["choices"][0]["text"]
    return text


@pytest.mark.parametrize("beside", [-1, 0, 1, 13])
async def test_a_prompt_that_only_a_peer_holds_is_pulled_from_it(
    real_p2p_pair: Pair, tmp_path: Path, beside: int
) -> None:
    holder, puller = real_p2p_pair
    prompt = token_ids(9 * BLOCK_SIZE_TOKENS + beside)
    async with gateway(real_p2p_pair, tmp_path, recompute_s_per_token=0.01) as one:
        cold_text = await hold_only_at(one, holder, puller, prompt)
        before = await p2p_tokens(one, puller)
        answer, record = await one.complete(prompt)
        pulled = await p2p_tokens(one, puller) - before
    blocks = len(prompt) // BLOCK_SIZE_TOKENS
    assert record["worker"] == f"127.0.0.1:{puller.ports.http}"
    assert record["source"] == f"127.0.0.1:{holder.ports.http}"
    assert record["path_blocks"]["peer"] == blocks
    remote = record["transfer_params"]["remote_kv_source"]
    assert f"{remote['remote_host']}:{remote['remote_port']}" == holder.p2p
    assert pulled == blocks * BLOCK_SIZE_TOKENS
    assert record["observed"]["cached_tokens"] == record["predicted_cached_tokens"] == pulled
    assert answer["choices"][0]["text"] == cold_text


@pytest.mark.usefixtures("broken_hashing")
async def test_with_one_wrong_bit_no_pull_is_planned(real_p2p_pair: Pair, tmp_path: Path) -> None:
    holder, puller = real_p2p_pair
    prompt = token_ids(9 * BLOCK_SIZE_TOKENS)
    async with gateway(real_p2p_pair, tmp_path, recompute_s_per_token=0.01, more=IN_PYTHON) as one:
        await one.drain(puller, True)
        await one.complete(prompt)
        await one.drain(puller, False)
        await one.drain(holder, True)
        _, record = await one.complete(prompt)
    assert record["source"] is None
    assert record["observed"]["cached_tokens"] == 0


async def test_killed_worker_is_routed_around_and_comes_back_holding_nothing(
    real_pair: Pair, tmp_path: Path
) -> None:
    prompt = token_ids(5 * BLOCK_SIZE_TOKENS + 3)
    async with gateway(real_pair, tmp_path) as one:
        _, first = await one.complete(prompt)
        victim = by_name(real_pair, first["worker"])
        await settled(one, victim, prompt)
        name = WorkerId(first["worker"])
        await asyncio.to_thread(victim.kill)
        try:
            _, failed_over = await one.complete(prompt)
            assert failed_over["worker"] != first["worker"]
            assert failed_over["observed"]["cached_tokens"] == failed_over["predicted_cached_tokens"] == 0
        finally:
            victim.launch()  # on this thread: the process ends with the thread that made it
            await asyncio.to_thread(victim.wait_ready)
        holders = one.app.brain.holders
        await until(lambda: holders.workers()[name].incarnation == 2, "a second incarnation")
        assert holders.index.counts(holders.workers()[name].ranks[0].slot).hbm == 0
        await until(
            lambda: len(one.app.brain.fleet.candidates(MODEL_NAME, 0.0, dry_run=True)) == 2, "both workers"
        )
        await one.drain(by_name(real_pair, failed_over["worker"]), True)
        _, again = await one.complete(prompt)
        assert again["worker"] == first["worker"]
        assert again["observed"]["cached_tokens"] == again["predicted_cached_tokens"] == 0
        await settled(one, victim, prompt)
        _, warm = await one.complete(prompt)
        assert warm["observed"]["cached_tokens"] == warm["predicted_cached_tokens"] == 5 * BLOCK_SIZE_TOKENS
        workers = {row["id"]: row for row in (await one.get("/admin/api/workers"))["workers"]}
        assert workers[first["worker"]]["incarnation"] == 2
