# SPDX-License-Identifier: Apache-2.0
"""A pool whose pods have several target ports, behind the endpoint picker and a real Envoy."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from eventually import eventually
from fake_kube import FakeKube, Object, pod, pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service import QUICK

from engine_ext.sim.config import SimConfig
from engine_ext.sim.running import SimWorkerOptions, running_sim_worker

from ..extproc.conftest import front, picker  # noqa: TID252  the same Envoy and picker

HOSTS = ("127.0.0.1", "127.0.0.2")
RANKS = 4
PROMPT = list(range(1, 161))


def free_ports() -> tuple[int, ...]:
    """Ports one after the other that were free a moment ago, on every host."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server((HOSTS[0], 0))).getsockname()[1]
            wanted = range(first, first + RANKS)
            try:
                for host in HOSTS:
                    for port in wanted:
                        if (host, port) != (HOSTS[0], first):
                            stack.enter_context(socket.create_server((host, port)))
            except (OSError, OverflowError):
                continue
            return tuple(wanted)


@contextlib.asynccontextmanager
async def pods(kube: FakeKube) -> AsyncIterator[tuple[int, ...]]:
    """Two pods of four ranks each, all of them running; their HTTP ports."""
    http, events, replay = free_ports(), free_ports(), free_ports()
    async with contextlib.AsyncExitStack() as stack:
        for host in HOSTS:
            for rank in range(RANKS):
                options = SimWorkerOptions(
                    host=host,
                    port=http[rank],
                    events=f"tcp://{host}:{events[rank]}",
                    replay=f"tcp://{host}:{replay[rank]}",
                    time_scale=QUICK,
                    engine=SimConfig(ram_blocks=4096),
                )
                await stack.enter_async_context(running_sim_worker(options))
            kube.put("pods", pod_at(host, http, events[0], replay[0]))
        kube.put("inferencepools", pool(ports=http))
        yield http


def pod_at(host: str, http: tuple[int, ...], events: int, replay: int) -> Object:
    annotations = {"pointsman.io/events-port": str(events), "pointsman.io/replay-port": str(replay)}
    return pod(f"vllm-{host[-1]}", host, annotations=annotations, ports=http)


async def test_a_prefix_goes_back_to_the_port_that_holds_it_until_port_or_pod_leave(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with pods(kube) as http:
        settings = {
            "fleet.kubernetes.kubeconfig": kube.kubeconfig(tmp_path),
            "fleet.kubernetes.pool": "llama",
        }
        everyone = [f"{host}:{port}" for host in HOSTS for port in http]
        async with front((), tmp_path, overrides=settings, known=everyone) as one:
            await one.desk.connected()
            urls = {name: row["url"] for name, row in (await one.desk.workers()).items()}
            assert sorted(urls.values()) == sorted(f"http://{endpoint}" for endpoint in everyone)

            first = await one.proxy.complete(PROMPT)
            holder = first.worker

            async def known() -> bool:
                return len(one.desk.known(holder)) >= 9

            await eventually(known, "blocks of the prompt")
            for _ in range(4):
                again = await one.proxy.complete(PROMPT)
                assert again.worker == holder
                assert again.cached > 0

            port = int(holder.rpartition(":")[2])
            rest = tuple(number for number in http if number != port)
            kube.put("inferencepools", pool(ports=rest))

            async def fewer() -> bool:
                return len(await one.desk.workers()) == 2 * (RANKS - 1)

            await eventually(fewer, "workers at a port that left the pool")
            elsewhere = await one.proxy.complete(PROMPT)
            assert elsewhere.status == 200
            assert int(elsewhere.worker.rpartition(":")[2]) != port

            for host in HOSTS:
                unready = kube.get("pods", f"vllm-{host[-1]}")
                unready["status"]["conditions"][0]["status"] = "False"
                kube.put("pods", unready)

            async def none() -> bool:
                return {row["health"] for row in (await one.desk.workers()).values()} == {"not_ready"}

            await eventually(none, "workers of pods that are not ready")
            assert (await one.proxy.complete(PROMPT)).status == 503


async def test_a_picker_that_never_heard_of_its_workers_is_alive_and_not_ready(
    kube: FakeKube, tmp_path: Path
) -> None:
    kube.put("inferencepools", pool())
    kube.refuse = 503
    settings = {
        "fleet.kubernetes.kubeconfig": kube.kubeconfig(tmp_path),
        "fleet.kubernetes.pool": "llama",
        "fleet.kubernetes.start_timeout_s": 0.1,
    }
    async with (
        picker((), tmp_path, settings) as (app, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{app.servers.health_port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        async def serves(service: str) -> bool:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        assert await serves("liveness")
        assert not await serves("readiness")
        assert not await serves("envoy.service.ext_proc.v3.ExternalProcessor")
        kube.refuse = None

        async def ready() -> bool:
            return await serves("readiness")

        await eventually(ready, "a picker that is ready")
