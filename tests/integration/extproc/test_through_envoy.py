# SPDX-License-Identifier: Apache-2.0
"""Requests through a real Envoy: who answers, what reaches the worker, what reaches the client."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from envoy_proxy import EnvoySettings, running_envoy
from eventually import eventually
from service import BLOCK, MODEL, Service, entry, sim_workers

from engine_ext.sim.running import RunningSimWorker
from router.config_fleet import WorkerEntry

from .conftest import Front, address, front

PROMPT = (
    "a long shared prefix that fills several blocks of sixteen tokens each, so that it is worth keeping " * 8
)
LONG = list(range(1000, 1000 + 200 * BLOCK + 5))
MODES = pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])


async def idle(one: Front) -> None:
    async def nothing() -> bool:
        return one.in_flight() == 0 and one.app.processor.open_streams == 0

    await eventually(nothing, "load or streams that are never released")


def assert_length(headers: dict[str, str], body: bytes) -> None:
    """Told right, or not at all: Envoy sends what it streams in chunks, whatever the picker says."""
    assert headers.get("transfer-encoding") == "chunked" or headers.get("content-length") == str(len(body))


@contextlib.asynccontextmanager
async def envoy_and_workers(
    count: int, home: Path, settings: EnvoySettings | None = None, **overrides: object
) -> AsyncIterator[tuple[Front, list[RunningSimWorker]]]:
    more = {key.replace("__", "."): value for key, value in overrides.items()}
    async with (
        sim_workers(count) as workers,
        front([entry(worker) for worker in workers], home, settings, more) as one,
    ):
        yield one, workers


# Affinity and plans


@MODES
async def test_a_prefix_goes_back_to_whoever_holds_it(tmp_path: Path, mode: str) -> None:
    settings = EnvoySettings(request_mode=mode, response_mode=mode)
    async with envoy_and_workers(3, tmp_path, settings) as (one, _):
        first = await one.proxy.complete(PROMPT)
        assert (first.status, first.cached) == (200, 0)
        await one.desk.index_equals_truth(f"http://{first.worker}")
        for _ in range(6):
            again = await one.proxy.complete(PROMPT)
            assert again.worker == first.worker
            assert again.cached > 0
            assert again.headers["x-pointsman-path"].startswith("hbm:")
        await idle(one)
        record = await one.desk.decision(again)
        assert record["observed"]["outcome"] == "ok"
        assert record["observed"]["cached_tokens"] == again.cached
        assert record["worker"] == first.worker == record["candidates"][0]["worker"]


@MODES
async def test_a_pull_from_a_peer_reaches_the_worker_in_the_body(tmp_path: Path, mode: str) -> None:
    settings = EnvoySettings(request_mode=mode, response_mode=mode)
    async with envoy_and_workers(2, tmp_path, settings) as (one, workers):
        first = await one.proxy.complete(LONG)
        [holder] = [w for w in workers if address(w.url) == first.worker]
        [other] = [w for w in workers if w is not holder]
        await one.desk.index_equals_truth(holder.url)
        await one.desk.drain(first.worker)
        body = json.dumps({"model": MODEL, "prompt": LONG, "max_tokens": 1, "odd": [1e400, "\ud800"]})
        reply = await one.proxy.post("/v1/completions", body.encode())
        assert reply.status == 200, reply.body
        assert reply.worker == address(other.url)
        assert "peer:" in reply.headers["x-pointsman-path"]
        headers, sent = await one.last_request(other.url)
        assert sent.startswith(body.encode()[:-1]), "every byte of the client's is where it was"
        assert_length(headers, sent)
        source = json.loads(sent)["kv_transfer_params"]["remote_kv_source"]
        assert f"{source['remote_host']}:{source['remote_port']}" == holder.p2p
        assert reply.cached > 0
        # The source of the pull is no fallback.
        assert headers["x-gateway-destination-endpoint"] == address(other.url)
        await idle(one)


async def test_every_request_id_is_the_client_s_or_a_new_one(tmp_path: Path) -> None:
    async with envoy_and_workers(1, tmp_path) as (one, [worker]):
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
        reply = await one.proxy.post("/v1/completions", body, {"x-request-id": "mine"})
        assert reply.headers["x-request-id"] == "mine"
        assert (await one.last_request(worker.url))[0]["x-request-id"] == "mine"
        reply = await one.proxy.post("/v1/completions", body)
        assert len(reply.headers["x-request-id"]) == 32


async def test_what_would_steer_a_sidecar_is_not_taken_from_a_client(tmp_path: Path) -> None:
    async with envoy_and_workers(1, tmp_path) as (one, [worker]):
        steering = {
            "x-gateway-destination-endpoint": "192.0.2.1:80",
            "x-prefiller-host-port": "192.0.2.1:80",
            "x-kv-cache-source-host-port": "192.0.2.1:80",
            "x-data-parallel-host-port": "192.0.2.1:80",
            "x-pointsman-priority": "0",
        }
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
        reply = await one.proxy.post("/v1/completions", body, steering)
        assert reply.status == 200
        headers, _ = await one.last_request(worker.url)
        assert headers["x-gateway-destination-endpoint"] == address(worker.url)
        assert not set(headers) & (set(steering) - {"x-gateway-destination-endpoint"})
        refused = await one.proxy.complete("x", kv_transfer_params={"remote_kv_source": {"remote_host": "a"}})
        assert refused.status == 400
        assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-invalid"


# Bodies and answers


async def test_a_get_without_a_body_goes_anywhere(tmp_path: Path) -> None:
    async with envoy_and_workers(2, tmp_path) as (one, workers):
        async with one.session.get(one.envoy.url + "/v1/models") as answer:
            assert answer.status == 200
            assert (await answer.json())["data"][0]["id"] == MODEL
            assert answer.headers["x-pointsman-worker"] in {address(w.url) for w in workers}
        await idle(one)


@MODES
@pytest.mark.parametrize("size", [0, 1, 62_000, 65_537, 131_073, 5_000_000])
async def test_bodies_of_any_size_arrive_whole_however_they_were_cut(
    tmp_path: Path, mode: str, size: int
) -> None:
    settings = EnvoySettings(request_mode=mode, response_mode=mode)
    async with envoy_and_workers(1, tmp_path, settings) as (one, [worker]):
        random = Random(size)
        head = b'{"model":"sim-model","max_tokens":1,"prompt":[1,2,3],"filler":"'
        body = head + b"f" * (size - len(head) - 2) + b'"}' if size > 100 else b"{}"[:size]

        async def chunks() -> AsyncIterator[bytes]:
            at = 0
            while at < len(body):
                step = random.choice([1, 100, 16_384, 70_000, 1_000_000])
                yield body[at : at + step]
                at += step
                await asyncio.sleep(0)

        for data in (chunks(), io.BytesIO(body)):
            async with one.session.post(
                one.envoy.url + "/v1/completions", data=data, headers={"content-type": "application/json"}
            ) as answer:
                assert answer.status == (200 if size > 100 else 400), await answer.text()
            headers, got = await one.last_request(worker.url)
            assert got == body
            assert_length(headers, got)
        await idle(one)


async def test_a_body_above_the_limit_is_answered_413(tmp_path: Path) -> None:
    async with envoy_and_workers(1, tmp_path, gateway__max_body_bytes=100_000) as (one, _):
        reply = await one.proxy.complete("x" * 200_000)
        assert reply.status == 413
        assert reply.json["error"]["code"] == "body_too_large"
        await idle(one)


@MODES
async def test_a_stream_of_events_arrives_as_the_worker_wrote_it(tmp_path: Path, mode: str) -> None:
    response_mode = "STREAMED" if mode == "BUFFERED" else mode
    settings = EnvoySettings(request_mode=mode, response_mode=response_mode)
    async with envoy_and_workers(1, tmp_path, settings) as (one, [worker]):
        body = {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": 20,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        through = await one.proxy.post("/v1/completions", body)
        assert through.status == 200
        events = through.body.decode().split("\n\n")
        assert events[-1] == ""
        assert events[-2] == "data: [DONE]"
        usage = json.loads(events[-3].removeprefix("data: "))["usage"]
        assert usage["completion_tokens"] == 20
        await idle(one)
        observed = (await one.desk.decision(through))["observed"]
        assert observed["outcome"] == "ok"
        assert observed["completion_tokens"] == 20
        assert observed["ttft_s"] > 0
        assert worker.engine is not None


async def test_the_first_event_is_not_held_back_until_the_last(tmp_path: Path) -> None:
    async with sim_workers(1, time_scale=1.0) as workers, front([entry(workers[0])], tmp_path) as one:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 40, "stream": True}
        async with one.session.post(one.envoy.url + "/v1/completions", json=body) as answer:
            first = await answer.content.readuntil(b"\n\n")
            assert first.startswith(b"data: {")
            assert one.in_flight() == 1, "the rest is still to come"
            assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
        await idle(one)


async def test_a_client_that_leaves_frees_its_load(tmp_path: Path) -> None:
    async with sim_workers(1, time_scale=0.2) as workers, front([entry(workers[0])], tmp_path) as one:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1000, "stream": True}
        async with one.session.post(one.envoy.url + "/v1/completions", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            assert one.in_flight() == 1
            request_id = answer.headers["x-request-id"]
        await idle(one)
        [record] = one.app.brain.log.get(request_id)
        assert record.observed.outcome == "client_gone"


# Endpoints


def refusing_port() -> tuple[socket.socket, str]:
    """An address at which connections are refused as long as the socket is kept."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    return taken, f"127.0.0.1:{taken.getsockname()[1]}"


@contextlib.asynccontextmanager
async def refused_at(one: Front, worker: str, others: list[str], home: Path) -> AsyncIterator[Front]:
    """An Envoy for which one worker is at an address that refuses; no poll has told the picker yet."""
    taken, dead = refusing_port()
    with taken:
        fleet = one.app.brain.fleet
        object.__setattr__(fleet._members[worker].status.spec, "url", f"http://{dead}")
        fleet._forget_lists()
        async with envoy_with(one, [dead, *others], home) as again:
            yield again


async def test_the_next_in_the_list_serves_when_the_first_refuses(tmp_path: Path) -> None:
    async with envoy_and_workers(2, tmp_path) as (one, workers):
        first = await one.proxy.complete(PROMPT)
        await one.desk.index_equals_truth(f"http://{first.worker}")
        [other] = [address(w.url) for w in workers if address(w.url) != first.worker]
        async with refused_at(one, first.worker, [other], tmp_path) as again:
            reply = await again.proxy.complete(PROMPT)
        assert (reply.status, reply.worker) == (200, other)
        await idle(one)
        record = await one.desk.decision(reply)
        assert (record["attempt"], record["worker"]) == (2, other)
        assert record["observed"]["outcome"] == "ok"
        [earlier] = record["earlier_attempts"]
        assert (earlier["worker"], earlier["observed"]["outcome"]) == (first.worker, "worker_error")
        assert await one.desk.metric("pointsman_in_flight_requests") == 0


async def test_a_fallback_carries_out_the_pull_that_was_planned_for_the_first(tmp_path: Path) -> None:
    async with envoy_and_workers(3, tmp_path) as (one, workers):
        holder = (await one.proxy.complete(LONG)).worker
        await one.desk.index_equals_truth(f"http://{holder}")
        await one.desk.drain(holder)
        others = [address(w.url) for w in workers if address(w.url) != holder]
        # Others have work, so that it is known who is chosen.
        busy = one.app.brain.board.promise(others[1], 0, 0.2, 0.2, asyncio.get_running_loop().time() + 1e6)
        async with refused_at(one, others[0], [holder, others[1]], tmp_path) as again:
            reply = await again.proxy.complete(LONG)
        one.app.brain.board.release(busy, asyncio.get_running_loop().time())
        assert (reply.status, reply.worker) == (200, others[1])
        assert reply.cached == 200 * BLOCK, "pulled from the holder"
        headers, sent = await one.last_request(f"http://{others[1]}")
        assert headers["x-gateway-destination-endpoint"].endswith(f",{others[1]}")
        assert holder not in headers["x-gateway-destination-endpoint"].split(",")
        source = json.loads(sent)["kv_transfer_params"]["remote_kv_source"]
        [told] = [w.p2p for w in workers if address(w.url) == holder]
        assert f"{source['remote_host']}:{source['remote_port']}" == told
        record = await one.desk.decision(reply)
        assert [record["attempt"], record["earlier_attempts"][0]["worker"]] == [2, others[0]]


@contextlib.asynccontextmanager
async def envoy_with(
    one: Front, endpoints: list[str], home: Path, settings: EnvoySettings | None = None
) -> AsyncIterator[Front]:
    """Another Envoy for the same picker."""
    grpc = f"127.0.0.1:{one.app.servers.grpc_port}"
    async with running_envoy(grpc, endpoints, home / "envoy2", settings) as proxy:
        yield Front(one.app, proxy, Service(one.app, proxy.url, one.session), one.desk)  # type: ignore[arg-type]


async def test_an_original_destination_cluster_takes_a_single_endpoint(tmp_path: Path) -> None:
    settings = EnvoySettings(original_dst=True)
    async with envoy_and_workers(3, tmp_path, settings, epp__fallbacks=0) as (one, _):
        reply = await one.proxy.complete(PROMPT)
        assert reply.status == 200
        assert (await one.last_request(f"http://{reply.worker}"))[0][
            "x-gateway-destination-endpoint"
        ] == reply.worker


@pytest.mark.parametrize("encoding", ["list", "text"])
async def test_only_endpoints_of_the_subset_are_picked(tmp_path: Path, encoding: str) -> None:
    async with sim_workers(3) as workers:
        names = [address(worker.url) for worker in workers]
        hint = [names[1], "192.0.2.1:80"] if encoding == "list" else f"{names[1]}, 192.0.2.1:80"
        settings = EnvoySettings(subset=hint)
        async with front([entry(w) for w in workers], tmp_path, settings) as one:
            for _ in range(8):
                reply = await one.proxy.complete("x")
                assert reply.worker == names[1]
            headers, _ = await one.last_request(workers[1].url)
            assert headers["x-gateway-destination-endpoint"] == names[1]
        async with front([entry(w) for w in workers], tmp_path / "b", EnvoySettings(subset=[])) as one:
            reply = await one.proxy.complete("x")
            assert reply.status == 503
            assert reply.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


async def test_ranks_are_named_in_a_header(tmp_path: Path) -> None:
    async with sim_workers(1) as [worker]:
        told = WorkerEntry(
            url=worker.url, id="w", events=worker.events, replay=worker.replay, p2p=worker.p2p, ranks=2
        )
        async with front([WorkerEntry(url=told.url, id="w", ranks=2)], tmp_path) as one:
            await one.proxy.complete("x")
            headers, _ = await one.last_request(worker.url)
            assert headers["x-data-parallel-rank"] in {"0", "1"}


async def test_nothing_to_serve_is_a_503_with_its_reason(tmp_path: Path) -> None:
    async with envoy_and_workers(1, tmp_path) as (one, [worker]):
        await one.desk.drain(address(worker.url))
        reply = await one.proxy.complete("x")
        assert reply.status == 503
        assert reply.json["error"]["code"] == "all_draining"
        assert reply.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


async def test_tenants_keys_end_at_the_proxy_and_their_salt_goes_on(tmp_path: Path) -> None:
    tenants = [{"name": "a", "api_keys": ["key-of-tenant-a"]}]
    async with envoy_and_workers(1, tmp_path, tenants__entries=tenants, tenants__require=True) as (
        one,
        [worker],
    ):
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
        assert (await one.proxy.post("/v1/completions", body)).status == 401
        key = {"authorization": "Bearer key-of-tenant-a"}
        assert (await one.proxy.post("/v1/completions", body, key)).status == 200
        headers, sent = await one.last_request(worker.url)
        assert "authorization" not in headers
        assert json.loads(sent)["cache_salt"]


async def test_the_standard_metrics_count(tmp_path: Path) -> None:
    async with envoy_and_workers(2, tmp_path) as (one, _):
        reply = await one.proxy.complete(PROMPT, max_tokens=5)
        assert reply.status == 200
        await idle(one)
        names = {"model_name": MODEL, "target_model_name": MODEL}
        assert await one.desk.metric("inference_objective_request_total", **names) == 1
        assert await one.desk.metric("inference_objective_output_tokens_sum", **names) == 5
        assert await one.desk.metric("inference_objective_running_requests", model_name=MODEL) == 0
        assert await one.desk.metric("inference_pool_ready_pods") == 2
        assert await one.desk.metric("inference_extension_scheduler_e2e_duration_seconds_count") == 1
