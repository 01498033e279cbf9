# SPDX-License-Identifier: Apache-2.0
"""The HTTP service over real sockets: engines publish over ZMQ, a client asks over HTTP.

Expected answers are those that dynamo.indexer 1.6.1 gave to the same events and calls; what we add is checked apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import kv_batches as kv
import pytest
from eventually import eventually
from kv_publisher import ScriptedEngine

from indexer.hashing import HashKey
from indexer.service.app import IndexerApp
from indexer.service.server import running_indexer

BLOCK = kv.BLOCK
KEY = HashKey(kv.KEY_BYTES)
NOWHERE = "tcp://127.0.0.1:1"


@dataclass
class Client:
    """What a client of the indexer's API does."""

    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, status: int = 200, **body: Any) -> Any:
        async with self.session.post(self.url + path, json=body) as answer:
            found = await answer.json()
            assert answer.status == status, found
            return found

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as answer:
            assert answer.status == 200
            return await answer.json()

    async def register(self, instance_id: int, endpoint: str, status: int = 201, **more: Any) -> Any:
        body = {
            "instance_id": instance_id,
            "endpoint": endpoint,
            "model_name": "m",
            "block_size": BLOCK,
            **more,
        }
        return await self.post("/register", status, **body)

    async def follow(self, instance_id: int, engine: ScriptedEngine, **more: Any) -> None:
        """Register an engine and wait until what it publishes arrives."""
        await self.register(instance_id, engine.events, **more)
        await asyncio.to_thread(engine.wait_for_subscriber)

        async def active() -> bool:
            return all(row["status"] == "active" for row in await self.get("/workers"))

        await eventually(active, f"instance {instance_id} is active")

    async def query(self, names: list[int], status: int = 200, **more: Any) -> Any:
        return await self.post(
            "/query", status, token_ids=list(kv.prompt(names)), **{"model_name": "m", **more}
        )

    async def until_disk(self, names: list[int], instance: int, tokens: int, **more: Any) -> Any:
        """Wait until an instance's whole reach of a prompt is so many tokens; returns the answer."""

        async def reached() -> Any:
            found = await self.query(names, **more)
            entry = found["instances"].get(str(instance), {"disk": 0})
            return found if entry["disk"] == tokens else None

        return await eventually(reached, f"instance {instance} reaches {tokens} tokens")


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with running_indexer(IndexerApp(KEY)) as url, aiohttp.ClientSession() as session:
        yield Client(url, session)


async def test_an_empty_indexer_answers_as_the_other_one(client: Client) -> None:
    assert await client.get("/workers") == []
    assert await client.get("/peers") == []
    assert await client.get("/dump") == {}
    await client.get("/health")
    assert "model_name=m" in (await client.query([1], status=404))["error"]


async def test_answers_for_three_tiers_and_two_ranks_are_those_of_the_other_indexer(client: Client) -> None:
    with ScriptedEngine(replay=None) as one, ScriptedEngine(replay=None) as two:
        await client.follow(1, one)
        await client.follow(2, two, dp_rank=1)
        lower = [kv.removed([3, 4]), kv.placeholder([3]), kv.placeholder([4], "STORAGE")]
        one.batch(kv.batch(kv.stored([1, 2, 3, 4]), *lower, rank=0))
        two.batch(kv.batch(kv.stored([1, 2]), rank=3))  # the batch's own rank counts, not the registered one
        await client.until_disk([1, 2, 3, 4, 9], 2, 8)
        found = await client.until_disk([1, 2, 3, 4, 9], 1, 16)
    version = found.pop("index_version")
    tiers = {name: entry.pop("tiers") for name, entry in found["instances"].items()}
    assert found == {
        "scores": {"2": {"3": 8}, "1": {"0": 8}},
        "frequencies": [],
        "instances": {
            "1": {"longest_matched": 16, "gpu": 8, "dp": {"0": 8}, "cpu": 12, "disk": 16},
            "2": {"longest_matched": 8, "gpu": 8, "dp": {"3": 8}, "cpu": 8, "disk": 8},
        },
    }
    assert version > 0
    assert tiers["1"] == {"0": {"hbm": 2, "ram": 1, "storage": 1, "doubtful_ram": 0}}
    assert tiers["2"] == {"3": {"hbm": 2, "ram": 0, "storage": 0, "doubtful_ram": 0}}


async def test_rows_of_workers_have_the_other_indexers_shape(client: Client) -> None:
    with ScriptedEngine(replay=None) as engine:
        await client.follow(1, engine)
        [row] = await client.get("/workers")
        expected = {
            "instance_id": 1,
            "source": "zmq",
            "status": "active",
            "model_name": "m",
            "routing_group": "default",
            "block_size": BLOCK,
            "endpoints": {"0": engine.events},
        }
        assert row.items() >= expected.items()
        assert row["listeners"]["0"].items() >= {"endpoint": engine.events, "status": "active"}.items()


async def test_worker_that_is_not_up_yet_is_pending_until_it_connects(client: Client) -> None:
    with ScriptedEngine(replay=None) as engine:
        address = engine.events
    await client.register(1, address)
    await client.register(1, NOWHERE, dp_rank=1)
    [row] = await client.get("/workers")
    assert row["status"] == "pending"
    with ScriptedEngine(events=address, replay=None) as engine:

        async def up() -> bool:
            [row] = await client.get("/workers")
            return row["listeners"]["0"]["status"] == "active"

        await eventually(up, "the first rank is active")
        assert (await client.get("/workers"))[0]["status"] == "pending", "the other rank is not up"


async def test_worker_that_cannot_be_subscribed_to_has_failed(client: Client) -> None:
    await client.register(1, "ipc:///" + "a" * 200)

    async def failed() -> bool:
        [row] = await client.get("/workers")
        return row["status"] == "failed" and "aaa" in row["listeners"]["0"]["last_error"]

    await eventually(failed, "the listener has failed")


async def test_replay_endpoint_brings_what_was_published_before(client: Client) -> None:
    with ScriptedEngine() as engine:
        engine.batch(kv.batch(kv.stored([1, 2])), send=False)
        await client.follow(1, engine, replay_endpoint=engine.replay)
        await client.until_disk([1, 2], 1, 8)
        assert engine.asked == [0]


async def test_worker_that_may_be_another_process_is_left_out_and_says_so(client: Client) -> None:
    with ScriptedEngine(replay=None) as engine:
        await client.follow(1, engine)
        engine.batch(kv.batch(kv.stored([1, 2])))
        await client.until_disk([1, 2], 1, 8)
    with ScriptedEngine(events=engine.events, replay=None):

        async def suspect() -> bool:
            [row] = await client.get("/workers")
            return "suspect" in row["listeners"]["0"]

        await eventually(suspect, "the worker is suspect")
        assert (await client.query([1, 2]))["instances"] == {}


@pytest.mark.parametrize("encode", [kv.as_array, dict], ids=["array", "map"])
async def test_block_hashes_may_be_bytes_in_both_encodings(client: Client, encode: Any) -> None:
    with ScriptedEngine(replay=None) as engine:
        await client.follow(1, engine)
        event = kv.stored([b"\1" * 32, b"\2" * 32], kv.tokens_of([1, 2]))
        engine.batch(kv.batch(encode(event)))
        await client.until_disk([1, 2], 1, 8)


async def test_unregistering_forgets_a_rank_or_an_instance_and_at_last_the_index(client: Client) -> None:
    with ScriptedEngine(replay=None) as one, ScriptedEngine(replay=None) as two:
        await client.follow(1, one)
        await client.follow(1, two, dp_rank=1)
        for engine, rank in ((one, 0), (two, 1)):
            engine.batch(kv.batch(kv.stored([1]), rank=rank))

        async def both() -> bool:
            return (await client.query([1]))["scores"] == {"1": {"0": 4, "1": 4}}

        await eventually(both, "both ranks hold the block")
        await client.post("/unregister", instance_id=1, model_name="m", dp_rank=0)
        assert (await client.query([1]))["scores"] == {"1": {"1": 4}}
        await client.post("/unregister", 404, instance_id=1, model_name="m", dp_rank=0)
        await client.post("/unregister", 404, instance_id=1, model_name="m", tenant_id="another")
        await client.post("/unregister", instance_id=1, model_name="m")
    assert await client.get("/workers") == []
    await client.query([1], status=404)


async def test_instance_may_come_back_after_it_was_unregistered(client: Client) -> None:
    with ScriptedEngine(replay=None) as engine:
        await client.follow(1, engine)
        engine.batch(kv.batch(kv.stored([1])))
        await client.until_disk([1], 1, 4)
    await client.post("/unregister", instance_id=1, model_name="m")
    with ScriptedEngine(replay=None) as engine:
        await client.follow(1, engine)
        assert (await client.query([1]))["scores"] == {}, "nothing of the old one counts"
        engine.batch(kv.batch(kv.stored([2])))
        await client.until_disk([2], 1, 4)


async def test_tenants_see_only_their_own_workers(client: Client) -> None:
    with ScriptedEngine(replay=None) as one, ScriptedEngine(replay=None) as two:
        await client.follow(1, one, tenant_id="a")
        await client.follow(2, two, routing_group="b")
        one.batch(kv.batch(kv.stored([1])))
        two.batch(kv.batch(kv.stored([1])))
        assert set((await client.until_disk([1], 1, 4, routing_group="a"))["scores"]) == {"1"}
        assert set((await client.until_disk([1], 2, 4, tenant_id="b"))["scores"]) == {"2"}
        await client.query([1], status=404)
        await client.query([1], status=422, tenant_id="a", routing_group="b")


async def test_adapter_of_events_and_adapter_of_a_registration_are_found_under_its_name(
    client: Client,
) -> None:
    with ScriptedEngine(replay=None) as one, ScriptedEngine(replay=None) as two:
        await client.follow(1, one)
        await client.follow(2, two, lora_name="tune")
        one.batch(kv.batch(kv.stored([1], lora_name="tune", lora_id=1)))
        two.batch(kv.batch(kv.stored([1])))
        await client.until_disk([1], 1, 4, lora_name="tune")
        await client.until_disk([1], 2, 4, lora_name="tune")
        assert (await client.query([1]))["scores"] == {}
        assert (await client.query([1], lora_name="other"))["scores"] == {}


async def test_salted_prompt_is_found_with_its_salt_only(client: Client) -> None:
    with ScriptedEngine(replay=None) as engine:
        await client.follow(1, engine)
        engine.batch(kv.batch(kv.stored([1], extra_keys=[["pepper"]])))
        await client.until_disk([1], 1, 4, cache_salt="pepper")
        assert (await client.query([1]))["scores"] == {}


async def test_dump_names_its_key_and_its_hashes_can_be_asked_for(client: Client) -> None:
    with ScriptedEngine(replay=None) as engine:
        await client.follow(1, engine)
        engine.batch(kv.batch(kv.stored([1, 2]), kv.placeholder([2])))
        await client.until_disk([1, 2], 1, 8)
        dump = (await client.get("/dump"))["m:default"]
        assert (dump["block_size"], dump["hash_key_id"]) == (BLOCK, KEY.id)
        stored = {
            event["storage_tier"]: event["event"]["data"]["stored"]["block_hashes"]
            for event in dump["events"]
        }
        assert {event["worker_id"] for event in dump["events"]} == {1}
        assert set(stored) == {"device", "host_pinned"}
        assert len(stored["device"]) == 2
        [second] = stored["host_pinned"]
        first = next(value for value in stored["device"] if value != second)
        signed = [value - (1 << 64) if value >> 63 else value for value in (first, second)]
        for hashes in ([first, second], signed):
            found = await client.post("/query_by_hash", block_hashes=hashes, model_name="m")
            assert found["scores"] == {"1": {"0": 8}}
            assert found["hash_key_id"] == KEY.id
        body = {"block_hashes": [first], "model_name": "m"}
        assert KEY.id in (await client.post("/query_by_hash", 409, **body, hash_key_id="another"))["error"]


async def test_ram_in_doubt_is_told_apart_and_not_dumped(client: Client) -> None:
    with ScriptedEngine(replay=None) as engine:
        await client.follow(1, engine)
        engine.batch(kv.batch(kv.stored([1, 2]), kv.placeholder([1, 2]), kv.cleared(), kv.stored([1])))
        found = await client.until_disk([1, 2], 1, 4)
        counts = {"hbm": 1, "ram": 0, "storage": 0, "doubtful_ram": 2}
        assert found["instances"]["1"]["tiers"] == {"0": counts}
        dump = (await client.get("/dump"))["m:default"]
        assert [event["storage_tier"] for event in dump["events"]] == ["device"]


async def test_peers_are_listed_until_they_are_taken_off(client: Client) -> None:
    url = "http://127.0.0.1:9"
    await client.post("/register_peer", 201, url=url)
    assert await client.get("/peers") == [url]
    await client.post("/deregister_peer", url=url)
    await client.post("/deregister_peer", 404, url=url)
    assert await client.get("/peers") == []
    await client.post("/register_peer", 400, url="elsewhere")


async def test_new_indexer_follows_what_the_first_answering_peer_has_registered(client: Client) -> None:
    with ScriptedEngine() as engine:
        engine.batch(kv.batch(kv.stored([1, 2])), send=False)
        await client.follow(1, engine, replay_endpoint=engine.replay, tenant_id="a")
        app = IndexerApp(KEY, ["http://127.0.0.1:1", client.url])
        async with running_indexer(app) as url:
            other = Client(url, client.session)
            await other.until_disk([1, 2], 1, 8, tenant_id="a")
            assert await other.get("/peers") == ["http://127.0.0.1:1", client.url]


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/register", {"instance_id": "x"}, 422, "instance_id"),
        ("/register", {"instance_id": -1}, 422, "instance_id"),
        ("/register", {"instance_id": 1 << 64}, 422, "instance_id"),
        ("/register", {"block_size": 0}, 422, "block_size"),
        ("/register", {"block_size": 2 * BLOCK}, 409, "block_size"),
        ("/register", {"endpoint": "nonsense"}, 400, "endpoint"),
        ("/register", {"endpoint": "tcp://h:99999"}, 400, "endpoint"),
        ("/register", {"replay_endpoint": "http://h:1"}, 400, "replay_endpoint"),
        ("/register", {"model_name": None}, 422, "model_name"),
        ("/register", {"dp_rank": 1 << 20}, 422, "dp_rank"),
        ("/register", {"instance_id": 7}, 409, "dp_rank 0"),
        ("/query", {"token_ids": ["x"]}, 422, "token_ids[0]"),
        ("/query", {"token_ids": [1, -1]}, 422, "token_ids[1]"),
        ("/query", {"token_ids": [1 << 32]}, 422, "token_ids[0]"),
        ("/query", {}, 422, "token_ids"),
        ("/query", {"token_ids": [], "model_name": "other"}, 404, "other"),
        ("/query_by_hash", {"block_hashes": [1 << 64]}, 422, "block_hashes"),
        ("/query_by_hash", {"block_hashes": [-(1 << 63) - 1]}, 422, "block_hashes"),
    ],
)
async def test_bad_field_is_refused_by_name(
    client: Client, path: str, body: dict[str, Any], status: int, named: str
) -> None:
    await client.register(7, NOWHERE)
    complete = {"instance_id": 1, "endpoint": NOWHERE, "block_size": BLOCK} if path == "/register" else {}
    refused = await client.post(path, status, **{"model_name": "m", **complete, **body})
    assert named in refused["error"]
    assert [row["instance_id"] for row in await client.get("/workers")] == [7]


async def test_broken_body_unknown_path_and_wrong_method_are_told_apart(client: Client) -> None:
    for method, path, body, status in (
        ("POST", "/query", b"{", 400),
        ("POST", "/query", b"\xff\xfe", 400),
        ("POST", "/query", b"[]", 422),
        ("POST", "/nope", b"", 404),
        ("GET", "/query", b"", 405),
        ("POST", "/health", b"", 405),
    ):
        async with client.session.request(method, client.url + path, data=body) as answer:
            assert (answer.status, sorted(await answer.json())) == (status, ["error"])


async def test_metrics_count_requests_streams_and_blocks(client: Client) -> None:
    with ScriptedEngine(replay=None) as engine:
        await client.follow(1, engine)
        engine.batch(kv.batch(kv.stored([1, 2])))
        await client.until_disk([1, 2], 1, 8)
        async with client.session.get(client.url + "/metrics") as answer:
            assert answer.headers["content-type"].startswith("text/plain")
            text = await answer.text()
    labels = 'dp_rank="0",instance="1",model="m",tenant="default"'
    for line in (
        'pointsman_indexer_listeners{status="active"} 1.0',
        "pointsman_indexer_blocks 2.0",
        f'pointsman_indexer_events_total{{{labels},what="stored"}} 2.0',
        'pointsman_indexer_requests_total{endpoint="/register",status="201"} 1.0',
    ):
        assert line in text.splitlines()
