# SPDX-License-Identifier: Apache-2.0
"""A conversation stays with the worker that holds it, and the router knows what the engine will say."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from service import BLOCK, CALM, MODEL, Service, entry, service, sim_workers

from engine_ext.sim.config import SimConfig
from engine_ext.sim.events import EventEncoding, HashKind
from engine_ext.sim.running import RunningSimWorker
from indexer.hashing import HashKey, load_or_make_key
from indexer.index import IndexLimits, PrefixIndex, open_index

TURNS = 5
CONVERSATIONS = 8


def token_ids(random: Random, count: int) -> list[int]:
    return [random.randrange(97, 123) for _ in range(count)]


async def settled(one: Service, workers: Sequence[RunningSimWorker]) -> None:
    for worker in workers:
        await one.index_equals_truth(worker.url)


async def converse(
    one: Service, workers: Sequence[RunningSimWorker], lengths: Sequence[int], random: Random
) -> list[Any]:
    """Turns of one conversation, each prompt the last one and some tokens more; returns the records."""
    prompt: list[int] = []
    records = []
    for length in lengths:
        prompt = prompt[:length] + token_ids(random, max(length - len(prompt), 0))
        reply = await one.complete(prompt)
        assert reply.status == 200
        record = await one.decision(reply)
        assert record["observed"]["cached_tokens"] == reply.cached
        assert record["prompt_tokens"] == reply.json["usage"]["prompt_tokens"] == length
        records.append(record)
        await settled(one, workers)
    return records


def mispredicted(records: Sequence[Any]) -> list[tuple[int, int]]:
    """(predicted, reported) cached tokens of the decisions where they differ."""
    pairs = [(r["predicted_cached_tokens"], r["observed"]["cached_tokens"]) for r in records]
    return [pair for pair in pairs if pair[0] != pair[1]]


def moved(records: Sequence[Any]) -> list[str]:
    """Workers that later turns went to although the first turn was elsewhere."""
    return [r["worker"] for r in records if r["worker"] != records[0]["worker"]]


@pytest.mark.parametrize(
    ("encoding", "hash_kind", "ram_blocks"),
    [
        (EventEncoding.MAP, HashKind.INT, 4096),
        (EventEncoding.ARRAY, HashKind.BYTES, 0),
    ],
)
async def test_each_turn_goes_where_the_last_was_and_the_engine_reports_what_was_predicted(
    tmp_path: Path, encoding: EventEncoding, hash_kind: HashKind, ram_blocks: int
) -> None:
    random = Random(5)
    options = {"event_encoding": encoding, "hash_kind": hash_kind, "engine": SimConfig(ram_blocks=ram_blocks)}
    async with (
        sim_workers(4, **options) as workers,
        service([entry(worker) for worker in workers], tmp_path, CALM) as one,
    ):
        seen: Counter[str] = Counter()
        for number in range(CONVERSATIONS):
            # At a multiple of the block size, one beside it on either side, and anywhere.
            steps = [BLOCK * random.randrange(6, 12) + offset for offset in (0, -1, 1)]
            steps += [random.randrange(40, 200) for _ in range(TURNS - len(steps))]
            random.shuffle(steps)
            lengths = [sum(steps[: turn + 1]) for turn in range(TURNS)]
            if number % 2:
                lengths = [length // BLOCK * BLOCK + number // 2 % 3 - 1 for length in lengths]
            records = await converse(one, workers, lengths, random)
            assert mispredicted(records) == []
            assert moved(records) == []
            assert all(r["predicted_cached_tokens"] > 0 for r in records[1:])
            assert all(r["tokens_from"] == "given" and r["fallback"] is None for r in records)
            seen[records[0]["worker"]] += 1
        assert await one.metric("pointsman_stale_decisions_total") == 0
        assert await one.metric("pointsman_observed_cached_tokens_total") == await one.metric(
            "pointsman_predicted_cached_tokens_total"
        )


@pytest.mark.parametrize("offset", [-1, 0, 1])
async def test_the_very_same_prompt_again_is_predicted_as_the_engine_rounds_it(
    tmp_path: Path, offset: int
) -> None:
    prompt = token_ids(Random(offset), 8 * BLOCK + offset)
    for ram_blocks in (0, 4096):
        async with (
            sim_workers(4, engine=SimConfig(ram_blocks=ram_blocks)) as workers,
            service([entry(worker) for worker in workers], tmp_path, CALM) as one,
        ):
            await one.complete(prompt)
            await settled(one, workers)
            reply = await one.complete(prompt)
            record = await one.decision(reply)
            assert record["predicted_cached_tokens"] == reply.cached >= 7 * BLOCK


async def test_chat_turns_are_tokenised_as_the_worker_does_and_stay_with_it(tmp_path: Path) -> None:
    async with (
        sim_workers(4) as workers,
        service([entry(worker) for worker in workers], tmp_path, CALM) as one,
    ):
        for topic in ("points", "signals", "sleepers"):
            messages = [{"role": "user", "content": f"Tell me of {topic}. " * 20}]
            records = []
            for turn in range(4):
                body = {"model": MODEL, "messages": messages, "max_tokens": 24}
                reply = await one.post("/v1/chat/completions", body)
                records.append(await one.decision(reply))
                messages += [
                    {"role": "assistant", "content": reply.text},
                    {"role": "user", "content": f"More, part {turn}."},
                ]
                await settled(one, workers)
            assert mispredicted(records) == []
            assert moved(records) == []
            assert all(r["predicted_cached_tokens"] > 0 and r["path_blocks"]["hbm"] > 0 for r in records[1:])


async def test_other_salt_or_model_gets_no_credit_and_the_engine_agrees(tmp_path: Path) -> None:
    prompt = token_ids(Random(1), 10 * BLOCK)
    async with (
        sim_workers(4, loras=("adapter",)) as workers,
        service([entry(worker) for worker in workers], tmp_path, CALM) as one,
    ):
        asked: list[tuple[dict[str, Any], int]] = [
            ({}, 0),
            ({"cache_salt": "s1"}, 0),
            ({"model": "adapter"}, 0),
            ({"cache_salt": "s2"}, 0),
            ({"cache_salt": "s1"}, 9 * BLOCK),
            ({"model": "adapter"}, 9 * BLOCK),
            ({}, 9 * BLOCK),
        ]
        for changes, cached in asked:
            reply = await one.complete(prompt, **changes)
            record = await one.decision(reply)
            predicted = record["predicted_cached_tokens"]
            assert predicted == reply.cached, changes
            assert (predicted >= cached) if cached else (predicted == 0), changes
            await settled(one, workers)


class BrokenHashing:
    """An index whose request hashes have one bit turned; what events say is kept as it is."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def hash_blocks(
        self, tokens: array[int], block_size: int, model: str, lora: str, first_block_keys: Sequence[str]
    ) -> bytes:
        good = bytearray(self._index.hash_blocks(tokens, block_size, model, lora, first_block_keys))
        if good:
            good[0] ^= 1
        return bytes(good)


class OtherKeyForRequests(BrokenHashing):
    """An index that hashes requests under another key than events."""

    def __init__(self, index: PrefixIndex) -> None:
        super().__init__(index)
        self._other = open_index(HashKey(b"another key 0123"), IndexLimits())

    def hash_blocks(
        self, tokens: array[int], block_size: int, model: str, lora: str, first_block_keys: Sequence[str]
    ) -> bytes:
        return self._other.hash_blocks(tokens, block_size, model, lora, first_block_keys)


@pytest.mark.parametrize("broken", [BrokenHashing, OtherKeyForRequests])
async def test_these_comparisons_fail_when_hashing_is_broken(
    tmp_path: Path, broken: type[BrokenHashing]
) -> None:
    """The check of the checks: the same comparisons as above, on a router that cannot recognise a block.

    Planned in Python, since the native planner hashes inside the core.
    """
    random = Random(7)
    settings = {**CALM, "plan.backend": "reference"}
    async with (
        sim_workers(4) as workers,
        service([entry(worker) for worker in workers], tmp_path, settings) as one,
    ):
        one.app.brain.holders.index = broken(one.app.brain.holders.index)
        # Chance alone would keep a conversation where it was now and then; a prediction is never right by chance.
        wrong, elsewhere = [], []
        for _ in range(4):
            records = await converse(one, workers, [5 * BLOCK * turn for turn in range(1, 6)], random)
            wrong += mispredicted(records)
            elsewhere += moved(records)
            assert all(r["predicted_cached_tokens"] == 0 for r in records)
        assert wrong, "no engine ever reported a hit"
        assert elsewhere


async def test_one_turned_bit_in_the_key_of_events_makes_the_truth_differ(tmp_path: Path) -> None:
    async with sim_workers(1) as workers, service([entry(workers[0])], tmp_path) as one:
        await one.complete(token_ids(Random(3), 4 * BLOCK))
        assert await one.index_equals_truth(workers[0].url) == 4
        path = tmp_path / "hash.key"
        secret = bytearray(load_or_make_key(path).secret)
        secret[5] ^= 1
        path.write_text(bytes(secret).hex())
        with pytest.raises(AssertionError, match="differs"):
            async with asyncio.timeout(60):
                await one.index_equals_truth(workers[0].url, patience_s=0.2)
