# SPDX-License-Identifier: Apache-2.0
"""Our gateway before real workers that run our extension: from the plan to the bytes, and back to the record.

The model's greedy text depends on every byte of its KV cache, so equal text and the engine's own count of cached
tokens together say that the right pages came to the right places.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .asking import B, Workers, text
from .engine import RealWorker, WorkerConfig
from .extension_gateway import (
    HBM_BLOCKS,
    LONGEST_TOKENS,
    PULL_BYTES_PER_S,
    TOKEN,
    ask_while_frozen,
    assert_in_order,
    assert_kept,
    assert_told,
    before,
    block_bytes,
    from_peer,
    keep_in_ram,
    metric,
    name_of,
    only,
    peers_of,
    plans,
    ranges,
    reported,
    slow_down,
    trust_in,
)
from .launch import PEER_PORT, Extension
from .prompts import token_ids
from .routed import until

TIER = {"type": "PointsmanTier", "module_path": "engine_ext.vllm.tier", "control": {"port": PEER_PORT}}
SLACK_S = 20.0
"""For a loaded machine."""
Trio = tuple[RealWorker, RealWorker, RealWorker]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where gateways listen: the engines are told before there is one. Bound here, so that nobody else gets it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def trio(real_workers: Workers, port: int) -> Trio:
    """Three workers with our peer tier and our policy, which report to the gateway."""
    reports = {"report_urls": [f"http://127.0.0.1:{port}"], "report_token": TOKEN, "report_interval_s": 0.1}
    extension = Extension(tiers=(TIER,), policy="PointsmanPolicy", extra=reports)
    config = WorkerConfig(extension=extension, gpu_blocks=HBM_BLOCKS, max_model_len_tokens=LONGEST_TOKENS)
    one, two, three = real_workers(config, config, config)
    return one, two, three


async def test_a_prefix_in_one_workers_ram_is_planned_pulled_and_reported(
    trio: Trio, port: int, tmp_path: Path
) -> None:
    source, puller = pair = trio[:2]
    prompt = token_ids(20 * B + 5)
    async with before(pair, port, tmp_path) as one:
        cold = await keep_in_ram(one, source, prompt)
        await only(one, pair, puller)
        read = plans(puller, "accepted")
        answer, record = await one.complete(prompt)
        assert text(answer) == cold
        record = await reported(one, record)
        assert_told(record, source)
        assert (record["worker"], record["source"]) == (name_of(puller), name_of(source))
        assert ranges(record) == [(name_of(source), "pointsman", 0, 20 * B)]
        assert_kept(record, 20)
        assert peers_of(record) == [from_peer(source, 20)]
        await asyncio.to_thread(assert_in_order, source, puller, prompt)
        assert record["observed"]["report"]["promotion_bytes"] == 20 * block_bytes(puller)
        assert await metric(one, "pointsman_report_pulls_total", source=name_of(source), outcome="ok") == 1
        assert await metric(one, "pointsman_report_bytes_total", path="peer") == 20 * block_bytes(puller)
        assert await metric(one, "pointsman_report_stale_blocks_total") == 0
        assert await metric(one, "pointsman_reports_total", outcome="joined") == 1
        await until(lambda: plans(puller, "accepted") == read + 1, "the engine's count of plans")
        assert plans(puller, "malformed") == 0


async def test_a_prefix_that_two_workers_hold_in_part_is_pulled_from_both(
    trio: Trio, port: int, tmp_path: Path
) -> None:
    head, whole, puller = trio
    prompt = token_ids(20 * B + 5)
    async with before(trio, port, tmp_path, peer_bytes_per_s=PULL_BYTES_PER_S) as one:
        cold = await keep_in_ram(one, whole, prompt)
        await keep_in_ram(one, head, prompt[: 12 * B])
        slow_down(one, whole, puller)
        await only(one, trio, puller)
        answer, record = await one.complete(prompt)
        assert text(answer) == cold
        record = await reported(one, record)
        assert ranges(record) == [
            (name_of(head), "pointsman", 0, 12 * B),
            (name_of(whole), "pointsman", 12 * B, 20 * B),
        ]
        assert_kept(record, 20)
        assert peers_of(record) == [from_peer(head, 12), from_peer(whole, 8)]
        await asyncio.to_thread(assert_in_order, whole, puller, prompt)


async def test_blocks_that_one_of_two_sources_lost_after_the_decision_are_computed_and_counted(
    trio: Trio, port: int, tmp_path: Path
) -> None:
    head, whole, puller = trio
    prompt = token_ids(20 * B + 5)

    def lose() -> None:
        whole.post("/reset_prefix_cache?reset_external=true")

    async with before(trio, port, tmp_path, peer_bytes_per_s=PULL_BYTES_PER_S) as one:
        cold = await keep_in_ram(one, whole, prompt)
        await keep_in_ram(one, head, prompt[: 12 * B])
        slow_down(one, whole, puller)
        await only(one, trio, puller)
        answer, record, _ = await ask_while_frozen(one, puller, prompt, lose)
        assert text(answer) == cold
        assert [one["source"] for one in record["pulls"]] == [name_of(head), name_of(whole)]
        observed = record["observed"]
        assert (record["predicted_cached_tokens"], observed["cached_tokens"]) == (20 * B, 12 * B)
        assert (observed["stale"], observed["report"]["stale"]) == (True, True)
        assert observed["tiers"] == {"peer": 12 * B}
        none = {"missed_blocks": 8, "stale_blocks": 8, "hit_blocks": 0, "moved_blocks": 0, "bytes": 0}
        assert peers_of(record) == [from_peer(head, 12), from_peer(whole, 8) | none]
        assert await metric(one, "pointsman_report_stale_blocks_total", source=name_of(whole)) == 8
        assert await metric(one, "pointsman_report_stale_blocks_total") == 8
        assert await metric(one, "pointsman_stale_tokens_total", worker=name_of(puller)) == 8 * B
        assert trust_in(one, whole) < trust_in(one, head) == 1


@pytest.mark.parametrize("fate", ["pause", "kill"])
async def test_a_source_that_fails_after_the_decision_costs_its_deadline_and_is_counted(
    trio: Trio, port: int, tmp_path: Path, fate: str
) -> None:
    source, puller = pair = trio[:2]
    prompt = token_ids(20 * B + 5)
    async with before(pair, port, tmp_path) as one:
        cold = await keep_in_ram(one, source, prompt)
        await only(one, pair, puller)
        try:
            answer, record, took_s = await ask_while_frozen(one, puller, prompt, getattr(source, fate))
        finally:
            source.resume()
        assert text(answer) == cold
        (pull,) = record["transfer_params"]["pointsman"]["pulls"]
        assert took_s < pull["deadline_ms"] / 1000 + SLACK_S
        observed = record["observed"]
        assert (record["predicted_cached_tokens"], observed["cached_tokens"]) == (20 * B, 0)
        assert (observed["outcome"], observed["stale"], observed["tiers"]) == ("ok", True, {})
        (failed,) = peers_of(record)
        outcome = failed["outcome"]
        word = outcome.partition(":")[0]
        assert word in {"deadline", "unreachable", "peer_silent", "peer_gone"}
        nothing = {"missed_blocks": 20, "hit_blocks": 0, "moved_blocks": 0, "bytes": 0, "outcome": outcome}
        assert failed == from_peer(source, 20) | nothing
        counted = await metric(one, "pointsman_report_pulls_total", source=name_of(source), outcome=word)
        stale = await metric(one, "pointsman_stale_tokens_total", worker=name_of(puller))
        assert (counted, stale) == (1, 20 * B)
        assert trust_in(one, source) < 1


async def test_another_salt_hits_neither_ram_nor_peer(trio: Trio, port: int, tmp_path: Path) -> None:
    holder, _ = pair = trio[:2]
    prompt = token_ids(8 * B + 5)
    async with before(pair, port, tmp_path) as one:
        cold = await keep_in_ram(one, holder, prompt, cache_salt="blue")
        for worker in pair:
            await only(one, pair, worker)
            answer, record = await one.complete(prompt, cache_salt=f"green at {worker.name}")
            assert (record["pulls"], record["observed"]["cached_tokens"]) == ([], 0)
            assert text(answer) == cold
        answer, record = await one.complete(prompt, cache_salt="blue")
        record = await reported(one, record)
        assert ranges(record) == [(name_of(holder), "pointsman", 0, 8 * B)]
        assert_kept(record, 8)
        assert text(answer) == cold
