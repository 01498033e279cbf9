# SPDX-License-Identifier: Apache-2.0
"""The router in front of real vLLM: what it predicts is what the engine reports, and its pulls carry the right bytes."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import router.app
from indexer.identity import Tier, WorkerId
from indexer.index import PrefixIndex
from router.app import PointsmanApp
from router.config import WorkerEntry, load
from router.serve import running_gateway

from .engine import BLOCK_SIZE_TOKENS, MODEL_NAME, Offload, RealWorker, WorkerConfig
from .events import next_seq
from .prompts import token_ids

Pair = tuple[RealWorker, ...]
CONVERSATIONS, TURNS = 10, 5
SETTLE_TIMEOUT_S = 60
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


@dataclass(frozen=True, slots=True)
class Gateway:
    app: PointsmanApp
    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer and the decision record behind it."""
        async with self.session.post(
            self.url + path, json={"model": MODEL_NAME, "temperature": 0} | body
        ) as response:
            answer = await response.json()
            assert response.status == 200, answer
            request_id = response.headers["x-request-id"]
        return answer, await self.get(f"/admin/api/decisions/{request_id}")

    async def complete(self, prompt: Sequence[int], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return await self.post(
            "/v1/completions", {"prompt": list(prompt), "max_tokens": 8, "ignore_eos": True} | more
        )

    async def get(self, path: str) -> dict[str, Any]:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            found: dict[str, Any] = await response.json()
            return found

    async def drain(self, worker: RealWorker, wanted: bool) -> None:
        path = f"{self.url}/admin/api/workers/127.0.0.1:{worker.ports.http}/drain"
        async with self.session.put(path, json={"draining": wanted}) as response:
            assert response.status == 200, await response.text()


@asynccontextmanager
async def gateway(
    pair: Pair, tmp_path: Path, *, recompute_s_per_token: float | None = None
) -> AsyncIterator[Gateway]:
    overrides: dict[str, object] = {
        "server.port": 0,
        "index.hash_key_file": str(tmp_path / "hash.key"),
        "tokens.local": [{"model": MODEL_NAME, "path": str(pair[0].model_dir)}],
        "costs.profile": "cpu-tiny",
    }
    if recompute_s_per_token is not None:
        overrides["costs.overrides"] = {"prefill_s_per_token": recompute_s_per_token}
    workers = [
        WorkerEntry(
            url=w.url,
            events=w.events,
            replay=w.replay,
            p2p=w.p2p,
            chunk_blocks=w.config.offload.blocks_per_chunk if w.config.offload else 1,
        )
        for w in pair
    ]
    config = load(None, environ={}, overrides=overrides, workers=workers)
    async with running_gateway(config) as (app, url), aiohttp.ClientSession() as session:
        one = Gateway(app, url, session)
        for worker in pair:
            await settled(one, worker)
        await until(
            lambda: all(status.parity.value == "equal" for status in app.fleet.statuses()), "tokenizer parity"
        )
        yield one


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what}: not within {SETTLE_TIMEOUT_S} s"
        await asyncio.sleep(0.01)


async def settled(gateway: Gateway, worker: RealWorker, prompt: Sequence[int] = ()) -> None:
    """Wait until the index has everything the engine has to say, all of ``prompt`` on every tier among it.

    vLLM's publisher answers a replay before it takes the next event from its queue, so one replay may miss what
    is about to be published; two that agree, after the prompt's own events, miss nothing.
    """
    name = WorkerId(f"127.0.0.1:{worker.ports.http}")
    offload = worker.config.offload
    index = gateway.app.holders.index
    honest = index._index if isinstance(index, OneBitOff) else index
    hashes = honest.hash_blocks(array("I", prompt), BLOCK_SIZE_TOKENS, MODEL_NAME, "", [])
    # Without self-describing events a chunk is one event, and so one block, however many it holds.
    chunk = BLOCK_SIZE_TOKENS * (
        1 if offload is None or offload.self_describing else offload.blocks_per_chunk
    )
    wanted = {Tier.HBM: len(prompt) // BLOCK_SIZE_TOKENS, Tier.RAM: len(prompt) // chunk if offload else 0}

    def known(tier: Tier) -> int:
        runs = gateway.app.holders.runs(hashes)
        return sum(run.end - run.start for owner, run in runs if owner.worker == name and run.tier is tier)

    def applied() -> int:
        holders = gateway.app.holders.workers().get(name)
        return -1 if holders is None or holders.ranks[0].seq is None else holders.ranks[0].seq

    for tier, blocks in wanted.items():
        await until(lambda tier=tier, blocks=blocks: known(tier) >= blocks, f"{tier.label} of {name}")
    published: list[int] = []
    while len(published) < 2 or published[-1] != published[-2]:
        published.append(await asyncio.to_thread(next_seq, worker.replay, SETTLE_TIMEOUT_S))
    await until(lambda: applied() >= published[-1] - 1, f"events up to {published[-1] - 1} of {name}")


def by_name(pair: Pair, name: str) -> RealWorker:
    return next(worker for worker in pair if name == f"127.0.0.1:{worker.ports.http}")


async def message_of_length(
    gateway: Gateway, history: list[dict[str, str]], rng: random.Random, beside: int
) -> str:
    """A user message after which the whole prompt has ``beside`` tokens more than a multiple of the block size."""
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(30, 60)))
    for _ in range(400):
        body = {"model": MODEL_NAME, "messages": [*history, {"role": "user", "content": text}]}
        async with gateway.session.post(
            gateway.app.fleet.statuses()[0].spec.url + "/tokenize", json=body
        ) as response:
            count = (await response.json())["count"]
        if (count - beside) % BLOCK_SIZE_TOKENS == 0:
            return text
        text += f" {rng.choice(WORDS)}"
    raise AssertionError("no such length found")


async def prompt_of(gateway: Gateway, messages: list[dict[str, str]]) -> list[int]:
    body = {"model": MODEL_NAME, "messages": messages}
    async with gateway.session.post(
        gateway.app.fleet.statuses()[0].spec.url + "/tokenize", json=body
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


class OneBitOff:
    """An index whose hash of a request differs from that of the events in one bit."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def hash_blocks(self, *args: Any) -> bytes:
        hashes = bytearray(self._index.hash_blocks(*args))
        for i in range(0, len(hashes), 8):
            hashes[i] ^= 1
        return bytes(hashes)


@pytest.fixture
def broken_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    make = router.app.open_index
    monkeypatch.setattr(router.app, "open_index", lambda *args: OneBitOff(make(*args)))


@pytest.mark.usefixtures("broken_hashing")
async def test_one_wrong_bit_in_the_hash_breaks_the_prediction(real_pair: Pair, tmp_path: Path) -> None:
    async with gateway(real_pair, tmp_path) as one:
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
    async with gateway(real_p2p_pair, tmp_path, recompute_s_per_token=0.01) as one:
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
        holders = one.app.holders
        await until(lambda: holders.workers()[name].incarnation == 2, "a second incarnation")
        assert holders.index.counts(holders.workers()[name].ranks[0].slot).hbm == 0
        await until(lambda: len(one.app.fleet.candidates(MODEL_NAME, 0.0, dry_run=True)) == 2, "both workers")
        await one.drain(by_name(real_pair, failed_over["worker"]), True)
        _, again = await one.complete(prompt)
        assert again["worker"] == first["worker"]
        assert again["observed"]["cached_tokens"] == again["predicted_cached_tokens"] == 0
        await settled(one, victim, prompt)
        _, warm = await one.complete(prompt)
        assert warm["observed"]["cached_tokens"] == warm["predicted_cached_tokens"] == 5 * BLOCK_SIZE_TOKENS
        workers = {row["id"]: row for row in (await one.get("/admin/api/workers"))["workers"]}
        assert workers[first["worker"]]["incarnation"] == 2
