# SPDX-License-Identifier: Apache-2.0
"""An indexer that starts again, or beside another one: what it recalls, and what it must not believe."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import kv_batches as kv
import pytest
from eventually import eventually
from kv_publisher import ScriptedEngine

from indexer.hashing import HashKey
from indexer.service.app import IndexerApp
from indexer.service.server import running_indexer

KEY = HashKey(kv.KEY_BYTES)
OTHER_KEY = HashKey(bytes(16))
TOKENS = kv.BLOCK


class Indexer:
    """A running service and its client."""

    def __init__(self, app: IndexerApp, url: str, session: aiohttp.ClientSession) -> None:
        self.app, self.url, self._session = app, url, session

    async def register(self, engine: ScriptedEngine, *, replay: bool = True) -> None:
        body = {
            "instance_id": 1,
            "endpoint": engine.events,
            "model_name": "m",
            "block_size": kv.BLOCK,
            "replay_endpoint": engine.replay if replay else None,
        }
        async with self._session.post(self.url + "/register", json=body) as answer:
            assert answer.status == 201, await answer.text()
        await asyncio.to_thread(engine.wait_for_subscriber)

    async def held(self, names: Sequence[int]) -> dict[str, Any]:
        body = {"token_ids": list(kv.prompt(names)), "model_name": "m"}
        async with self._session.post(self.url + "/query", json=body) as answer:
            found: dict[str, Any] = (await answer.json())["instances"].get(
                "1", {"gpu": 0, "cpu": 0, "disk": 0}
            )
            return found

    async def until_held(self, names: Sequence[int], blocks: int, tier: str = "gpu") -> None:
        async def reached() -> bool:
            return bool((await self.held(names))[tier] == blocks * TOKENS)

        await eventually(reached, f"{blocks} blocks on {tier}", 60)

    async def listener(self) -> dict[str, Any]:
        async with self._session.get(self.url + "/workers") as answer:
            (row,) = await answer.json()
            found: dict[str, Any] = row["listeners"]["0"]
            return found

    async def until_seq(self, seq: int) -> None:
        async def there() -> bool:
            return (await self.listener()).get("seq") == seq

        await eventually(there, f"batch {seq}", 60)

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self._session.get(self.url + path) as answer:
            return answer.status, await answer.read()


@contextlib.asynccontextmanager
async def indexer(
    *, key: HashKey = KEY, peers: Sequence[str] = (), snapshot: Path | None = None, limit: int = 2**30
) -> AsyncIterator[Indexer]:
    app = IndexerApp(key, peers, snapshot=snapshot, snapshot_max_bytes=limit)
    async with running_indexer(app) as url, aiohttp.ClientSession() as session:
        yield Indexer(app, url, session)


def publish(engine: ScriptedEngine, first: int, last: int, *, send: bool = True) -> None:
    """A batch per block, each the child of the one before."""
    for name in range(first, last + 1):
        parent = name - 1 if name > 1 else None
        engine.batch(kv.batch(kv.stored([name], parent=parent)), send=send)


def forget_before(engine: ScriptedEngine, seq: int) -> None:
    """As when the engine's buffer has gone over these."""
    engine.kept = {number: payload for number, payload in engine.kept.items() if number >= seq}


async def test_a_restarted_indexer_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "index.snapshot"
    with ScriptedEngine() as engine:
        async with indexer(snapshot=path) as first:
            await first.register(engine)
            publish(engine, 1, 5)
            engine.batch(kv.batch(kv.placeholder([1, 2, 3, 4, 5, 6], "CPU"), kv.placeholder([1], "STORAGE")))
            await first.until_seq(5)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        # While it is away the engine goes on, and its buffer forgets what the snapshot has.
        engine.batch(kv.batch(kv.stored([6], parent=5)), send=False)
        forget_before(engine, 5)
        async with indexer(snapshot=path) as second:
            await second.register(engine)
            await second.until_held([1, 2, 3, 4, 5, 6, 7], 6)
            assert engine.asked[-1] == 5
            listener = await second.listener()
            assert ("partial" in listener, "suspect" in listener) == (False, False)
            # The engine's own names are known: later events mean what they say.
            engine.batch(kv.batch(kv.removed([2, 3, 4, 5, 6])))
            await second.until_held([1, 2, 3, 4, 5, 6], 1)
            await second.until_held([1, 2, 3, 4, 5, 6], 6, "cpu")
            engine.batch(kv.batch(kv.cleared(), kv.removed([1], "STORAGE")))
            await second.until_held([1], 0, "disk")


async def test_a_new_replica_holds_what_its_peer_holds_though_engines_have_forgotten_it() -> None:
    with ScriptedEngine() as engine:
        async with indexer() as peer:
            await peer.register(engine)
            publish(engine, 1, 20)
            await peer.until_held(range(1, 21), 20)
            forget_before(engine, 19)
            async with indexer(peers=["http://127.0.0.1:1", peer.url]) as replica:
                await replica.until_held(range(1, 21), 20)
                publish(engine, 21, 22)
                engine.batch(kv.batch(kv.stored([1])))
                await replica.until_held(range(1, 23), 22)
                engine.batch(kv.batch(kv.removed([1]), kv.removed([10])))
                await replica.until_held(range(1, 23), 9)
                assert "partial" not in await replica.listener()
                assert replica.app.recovery.view()["restored_workers"] == {"peer": 1}


@pytest.mark.parametrize("replay", [True, False])
async def test_nothing_recalled_counts_for_another_process_at_the_address(
    tmp_path: Path, replay: bool
) -> None:
    path = tmp_path / "index.snapshot"
    with ScriptedEngine() as engine:
        async with indexer(snapshot=path) as first:
            await first.register(engine, replay=replay)
            publish(engine, 1, 5)
            await first.until_held(range(1, 6), 5)
        events, answers = engine.events, engine.replay
    with ScriptedEngine(events=events, replay=answers) as restarted:
        for _ in range(9):  # its numbers have gone beyond those of the one before
            restarted.batch(kv.batch(kv.stored([50])), send=False)
        async with indexer(snapshot=path) as second:
            await second.register(restarted, replay=replay)
            restarted.batch(kv.batch(kv.stored([60])))
            await second.until_seq(9)
            assert (await second.held(range(1, 6)))["gpu"] == 0
            if not replay:
                assert "reconnected" in (await second.listener())["suspect"]


async def test_a_holder_whose_history_is_incomplete_stays_partial_in_a_replica() -> None:
    with ScriptedEngine() as engine:
        publish(engine, 1, 5, send=False)
        forget_before(engine, 3)
        async with indexer() as peer:
            await peer.register(engine)
            publish(engine, 6, 6)
            await peer.until_seq(5)
            reason = (await peer.listener())["partial"]
            async with indexer(peers=[peer.url]) as replica:
                await replica.until_seq(5)
                assert (await replica.listener())["partial"] == reason == "sequences 0 to 2 are lost"


async def test_the_snapshot_of_another_key_is_refused_and_the_engines_are_asked(tmp_path: Path) -> None:
    path = tmp_path / "index.snapshot"
    with ScriptedEngine() as engine:
        async with indexer(snapshot=path) as first:
            await first.register(engine)
            publish(engine, 1, 3)
            await first.until_held([1, 2, 3], 3)
            async with indexer(key=OTHER_KEY, peers=[first.url]) as other:
                await other.until_held([1, 2, 3], 3)
                assert (other.app.recovery.view()["peer"], engine.asked[-1]) == (None, 0)
        async with indexer(key=OTHER_KEY, snapshot=path) as other:
            await other.register(engine)
            await other.until_held([1, 2, 3], 3)
            assert other.app.recovery.view()["file"]["refused"].startswith("other_key")


async def test_a_damaged_snapshot_is_refused_and_replaced_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "index.snapshot"
    with ScriptedEngine() as engine:
        async with indexer(snapshot=path) as first:
            await first.register(engine)
            publish(engine, 1, 3)
            await first.until_held([1, 2, 3], 3)
        whole = path.read_bytes()
        path.write_bytes(whole[:-5] + b"\0" + whole[-4:])
        async with indexer(snapshot=path) as second:
            await second.register(engine)
            await second.until_held([1, 2, 3], 3)
            assert second.app.recovery.view()["file"]["refused"].startswith("damaged")
        async with indexer(snapshot=path) as third:
            assert third.app.recovery.view()["file"]["loaded_workers"] == 1
        assert path.read_bytes()[:8] == whole[:8]  # nothing was registered, so it was left as it is


async def test_a_peer_s_snapshot_beyond_the_limit_is_not_taken() -> None:
    with ScriptedEngine() as engine:
        async with indexer() as peer:
            await peer.register(engine)
            publish(engine, 1, 50)
            await peer.until_held(range(1, 51), 50)
            async with indexer(peers=[peer.url], limit=500) as replica:
                assert replica.app.recovery.view()["peer"] is None
                await replica.until_held(range(1, 51), 50)  # by replay


async def test_the_snapshot_says_what_it_is_and_no_content() -> None:
    with ScriptedEngine() as engine:
        async with indexer() as one:
            await one.register(engine)
            publish(engine, 1, 3)
            await one.until_held([1, 2, 3], 3)
            status, body = await one.get("/snapshot")
            assert (status, body[:8]) == (200, b"PMINDEX1")
            assert KEY.id.encode() in body
            assert KEY.secret not in body
