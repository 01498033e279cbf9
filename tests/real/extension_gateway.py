# SPDX-License-Identifier: Apache-2.0
"""A gateway before workers that run our extension: where their blocks are, what was planned, told and reported."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from indexer.identity import Tier
from router.costs.kv_bytes import kv_bytes_per_token
from router.costs.observation import PullObservation

from .asking import B, assert_heads, complete, heads, text
from .engine import RealWorker
from .launch import MODEL_NAME
from .prompts import token_ids
from .routed import Gateway, Pair, gateway, settled, until

TOKEN = "for-reports-only"  # noqa: S105 - of a gateway that lives as long as a test
OUTPUT_TOKENS = 8
PULL_BYTES_PER_S = 200_000
"""What a gateway may believe of all links, so that it matters how fast they are."""
HBM_BLOCKS, LONGEST_TOKENS = 64, 1024
"""Little, so that two long prompts push out all that was there. A reset would make the router doubt the RAM too."""


@asynccontextmanager
async def before(workers: Pair, port: int, tmp_path: Path, **constants: float) -> AsyncIterator[Gateway]:
    """A gateway that would rather pull than compute; ``constants`` replace more of the profile's."""
    more = {
        "server.port": port,
        "admin.report_token": TOKEN,
        "costs.overrides": {"prefill_s_per_token": 0.01} | constants,
    }
    async with gateway(workers, tmp_path, more=more) as one:
        yield one


def name_of(worker: RealWorker) -> str:
    return f"127.0.0.1:{worker.ports.http}"


def block_bytes(worker: RealWorker) -> int:
    return int(B * kv_bytes_per_token(json.loads((worker.model_dir / "config.json").read_text())))


async def only(one: Gateway, workers: Pair, wanted: RealWorker) -> None:
    """No other takes requests; all may still be sources."""
    for worker in workers:
        await one.drain(worker, worker is not wanted)


def held(one: Gateway, worker: RealWorker, prompt: list[int], tier: Tier, salt: str = "") -> int:
    """Blocks of the prompt that the router believes to be there."""
    holders = one.app.brain.holders
    salts = [salt] if salt else []
    hashes = holders.index.hash_blocks(array("I", prompt), B, MODEL_NAME, "", salts)
    runs = [
        run for owner, run in holders.runs(hashes) if owner.worker == name_of(worker) and run.tier is tier
    ]
    return sum(run.end - run.start for run in runs)


async def keep_in_ram(one: Gateway, holder: RealWorker, prompt: list[int], **more: str) -> str:
    """Has the holder compute the prompt, cold, and leaves its blocks in its RAM alone. Returns the text."""
    salt, blocks = more.get("cache_salt", ""), len(prompt) // B
    answer = await asyncio.to_thread(complete, holder, prompt, OUTPUT_TOKENS, **more)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await until(lambda: held(one, holder, prompt, Tier.RAM, salt) == blocks, f"RAM of {holder.name}")
    await settled(one, holder)
    while held(one, holder, prompt, Tier.HBM, salt):
        await asyncio.to_thread(complete, holder, token_ids(LONGEST_TOKENS - B), 1)
        await settled(one, holder)
    assert held(one, holder, prompt, Tier.RAM, salt) == blocks
    return text(answer)


async def reported(one: Gateway, record: dict[str, Any]) -> dict[str, Any]:
    """The record once the engine's report of it has come."""
    path = f"/admin/api/decisions/{record['id']}"
    deadline = time.monotonic() + 60
    while (record := await one.get(path))["observed"]["report"] is None:
        assert time.monotonic() < deadline, f"no report: {record}"
        await asyncio.sleep(0.05)
    return record


async def metric(one: Gateway, name: str, **labels: str) -> float:
    """The sum of the gateway's samples of that name with these labels."""
    async with one.session.get(one.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(f"{name}{{") and all(label in line for label in wanted)
    )


def peers_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Of its report, what came from peers; the measured seconds are looked at here."""
    peers = [one for one in record["observed"]["report"]["sources"] if one["kind"] == "pointsman"]
    for one in peers:
        assert one.pop("lookup_s") >= 0
        assert (one.pop("transfer_s") or 0) >= 0
    return peers


def from_peer(source: RealWorker, blocks: int) -> dict[str, Any]:
    """What a report says of a pull that went well."""
    return {
        "source": name_of(source),
        "kind": "pointsman",
        "asked_blocks": blocks,
        "hit_blocks": blocks,
        "missed_blocks": 0,
        "stale_blocks": 0,
        "moved_blocks": blocks,
        "bytes": blocks * block_bytes(source),
        "outcome": "ok",
    }


def ranges(record: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    return [(one["source"], one["kind"], one["start_token"], one["end_token"]) for one in record["pulls"]]


def assert_kept(record: dict[str, Any], blocks: int) -> None:
    """All that was promised came from peers, and nothing was stale."""
    observed, report = record["observed"], record["observed"]["report"]
    assert record["predicted_tiers"] == observed["tiers"] == {"peer": blocks * B}
    assert record["predicted_cached_tokens"] == observed["cached_tokens"] == blocks * B
    assert (observed["outcome"], observed["stale"], report["stale"]) == ("ok", False, False)
    assert report["promoted_blocks"] == blocks
    assert report["block_tokens"] == B


def assert_in_order(source: RealWorker, puller: RealWorker, prompt: list[int]) -> None:
    """Every head of the prompt goes on alike at both, so that each block is in its place."""
    assert_heads(puller, prompt, heads(source, prompt))


def assert_told(record: dict[str, Any], source: RealWorker) -> None:
    """What went to the engine: the pull, and what the prompt is worth to whoever evicts."""
    told = record["transfer_params"]["pointsman"]
    assert record["transfer_params"].keys() == {"pointsman"}
    assert told["plan_id"] == record["plan_id"]
    (pull,) = told["pulls"]
    assert pull.pop("deadline_ms") >= 250
    assert pull == {"source": source.peer, "kind": "pointsman", "start_token": 0, "end_token": 20 * B}
    assert told["evict"]["rebuild_s"] > 1
    assert told["evict"]["peer_copies"] == 1


def plans(worker: RealWorker, outcome: str) -> float:
    """The engine's count of plans that it took or could not read."""
    counted = (
        value
        for name, value in worker.metrics().items()
        if name.startswith("vllm:pointsman_plans_total{") and f'outcome="{outcome}"' in name
    )
    return sum(counted, 0.0)


def slow_down(one: Gateway, source: RealWorker, puller: RealWorker) -> None:
    """Lets the router find that nothing came over this link in time, until it believes it four times slower."""
    calibration, pair = one.app.brain.calibration, (name_of(source), name_of(puller))
    assert calibration is not None
    while calibration.link(*pair).share_bytes_per_s(0) > PULL_BYTES_PER_S / 4:
        failed = PullObservation(
            source=pair[0],
            worker=pair[1],
            tokens=0,
            lookup_s=None,
            transfer_s=None,
            failed=True,
            other_pulls=0,
            connected=True,
        )
        calibration.observe_pull(failed, time.monotonic())


async def ask_while_frozen(
    one: Gateway, puller: RealWorker, prompt: list[int], meanwhile: Callable[[], object]
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Asks for what is pulled; between the decision and the pull something happens. The answer, its record once it is
    reported, and the seconds from when the engine could begin."""
    puller.pause()
    try:
        asking = asyncio.create_task(one.complete(prompt))
        await decided(one, len(prompt))
        await asyncio.to_thread(meanwhile)
    finally:
        puller.resume()
    began_s = time.monotonic()
    answer, record = await asking
    took_s = time.monotonic() - began_s
    return answer, await reported(one, record), took_s


async def decided(one: Gateway, prompt_tokens: int) -> None:
    """Waits for a decision to pull whose answer is still to come."""
    deadline = time.monotonic() + 60
    while True:
        newest = (await one.get("/admin/api/decisions?limit=1"))["decisions"]
        if newest and newest[0]["prompt_tokens"] == prompt_tokens and newest[0]["pulls"]:
            assert newest[0]["observed"]["outcome"] is None
            return
        assert time.monotonic() < deadline, newest
        await asyncio.sleep(0.01)


def trust_in(one: Gateway, worker: RealWorker) -> float:
    return one.app.brain.trust.of(name_of(worker), time.monotonic())
