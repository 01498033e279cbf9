# SPDX-License-Identifier: Apache-2.0
"""The picker as a process: it is killed, told to stop, given other certificates, asked how it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from envoy_proxy import Envoy, EnvoySettings, running_envoy
from eventually import eventually
from grpc_health.v1 import health_pb2, health_pb2_grpc
from picker_client import picker_client
from service import MODEL, sim_workers

from engine_ext.sim.running import RunningSimWorker

from .conftest import address

CERTIFICATES = Path(__file__).parent / "certificates"
BODY = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4}).encode()
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class PickerProcess:
    """``pointsman epp`` and where it listens."""

    process: subprocess.Popen[bytes]
    told: dict[str, str]

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.asynccontextmanager
async def picker_process(
    workers: Sequence[RunningSimWorker], home: Path, **settings: str
) -> AsyncIterator[PickerProcess]:
    command = [sys.executable, "-P", "-m", "router", "epp"]
    for port in ("grpc", "health", "http"):
        command += [f"--{port}-port", "0"]
    for worker in workers:
        command += ["--worker", f"{worker.url},events={worker.events}"]
    more = {f"POINTSMAN_{name.upper()}": value for name, value in settings.items()}
    environment = {**os.environ, "XDG_STATE_HOME": str(home), "POINTSMAN_EPP__HOST": "127.0.0.1", **more}
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    try:
        yield PickerProcess(process, json.loads(await asyncio.to_thread(process.stdout.readline)))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass
class Scene:
    """One worker, the picker, Envoy."""

    worker: RunningSimWorker
    picker: PickerProcess
    envoy: Envoy
    session: aiohttp.ClientSession

    async def complete(self) -> tuple[int, str]:
        url = f"{self.envoy.url}/v1/completions"
        async with self.session.post(url, data=BODY, headers={"content-type": "application/json"}) as answer:
            return answer.status, await answer.text()

    @contextlib.asynccontextmanager
    async def streaming(self, tokens: int) -> AsyncIterator[aiohttp.ClientResponse]:
        """A stream whose first event has come."""
        body = {"model": MODEL, "prompt": "hello", "max_tokens": tokens, "stream": True}
        async with self.session.post(f"{self.envoy.url}/v1/completions", json=body) as answer:
            assert (await answer.content.readuntil(b"\n\n")).startswith(b"data: {")
            yield answer


@contextlib.asynccontextmanager
async def scene(
    home: Path, settings: EnvoySettings | None = None, time_scale: float = 20.0, **epp: str
) -> AsyncIterator[Scene]:
    async with contextlib.AsyncExitStack() as stack:
        workers = await stack.enter_async_context(sim_workers(1, time_scale=time_scale))
        picker = await stack.enter_async_context(picker_process(workers, home, **epp))
        endpoints = [address(worker.url) for worker in workers]
        envoy = await stack.enter_async_context(
            running_envoy(picker.told["grpc"], endpoints, home / "envoy", settings)
        )
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        )
        yield Scene(workers[0], picker, envoy, session)


OPEN = EnvoySettings(fail_open=True, request_mode="BUFFERED", response_mode="STREAMED")
"""Envoy 1.40 fails open only for what it still has: in full duplex a body is gone once it went to the picker."""


@pytest.mark.parametrize("settings", [OPEN, EnvoySettings()], ids=["open", "closed"])
async def test_without_a_picker_requests_pass_or_fail_as_the_proxy_is_told(
    tmp_path: Path, settings: EnvoySettings
) -> None:
    async with scene(tmp_path, settings) as one:
        assert (await one.complete())[0] == 200
        one.picker.kill()
        status, text = await one.complete()
        assert status == (200 if settings.fail_open else 500), text
        if settings.fail_open:
            assert json.loads(text)["usage"]["completion_tokens"] == 4


async def test_in_full_duplex_only_what_has_no_body_passes_without_a_picker(tmp_path: Path) -> None:
    async with scene(tmp_path, EnvoySettings(fail_open=True)) as one:
        one.picker.kill()
        async with one.session.get(f"{one.envoy.url}/v1/models") as answer:
            assert answer.status == 200


@pytest.mark.parametrize("settings", [OPEN, EnvoySettings()], ids=["open", "closed"])
async def test_a_picker_that_is_killed_within_an_answer_breaks_at_most_that_one(
    tmp_path: Path, settings: EnvoySettings
) -> None:
    async with scene(tmp_path, settings, time_scale=1.0) as one:
        async with one.streaming(200) as answer:
            one.picker.kill()
            try:
                rest = await answer.content.read()
            except aiohttp.ClientError:
                rest = b""
            # Whole, or visibly broken: never an answer that only looks whole.
            assert rest.endswith(b"data: [DONE]\n\n") or (b"[DONE]" not in rest and not settings.fail_open)
        assert (await one.complete())[0] == (200 if settings.fail_open else 500)


async def test_a_picker_that_is_told_to_stop_lets_open_streams_end(tmp_path: Path) -> None:
    async with scene(tmp_path, time_scale=1.0, epp__drain_timeout_s="30") as one:
        async with one.streaming(60) as answer:
            one.picker.process.send_signal(signal.SIGTERM)
            rest = await answer.content.read()
            assert rest.endswith(b"data: [DONE]\n\n")
        assert await one.picker.ended() == 0


async def test_streams_that_outlast_the_drain_are_cut(tmp_path: Path) -> None:
    async with scene(tmp_path, time_scale=0.05, epp__drain_timeout_s="0.2") as one, one.streaming(10_000):
        one.picker.process.send_signal(signal.SIGTERM)
        assert await one.picker.ended() == 0


async def health_of(stub: Any, service: str) -> int:
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    status: int = answer.status
    return status


async def test_health_says_not_serving_while_it_drains(tmp_path: Path) -> None:
    names = ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension", "")
    async with (
        sim_workers(1) as workers,
        picker_process(workers, tmp_path, epp__drain_delay_s="20") as picker,
        grpc.aio.insecure_channel(picker.told["health"]) as channel,
        picker_client(picker.told["grpc"]) as client,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for name in (*names, "liveness"):
            assert await health_of(stub, name) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health_of(stub, "something else")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == SERVING
        picker.process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        for name in names:
            assert await health_of(stub, name) == NOT_SERVING
        assert await health_of(stub, "liveness") == SERVING
        # Proxies hear of it late: their requests are still served.
        assert await client.pick(BODY) == [address(workers[0].url)]


async def test_a_port_that_is_taken_is_a_usage_error(tmp_path: Path) -> None:
    async with sim_workers(1) as workers, picker_process(workers, tmp_path) as picker:
        taken = picker.told["grpc"].rpartition(":")[2]
        command = [sys.executable, "-P", "-m", "router", "epp", "--worker", workers[0].url]
        command += ["--grpc-port", taken, "--health-port", "0", "--http-port", "0"]
        environment = {
            **os.environ,
            "XDG_STATE_HOME": str(tmp_path / "b"),
            "POINTSMAN_EPP__HOST": "127.0.0.1",
        }
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2, done.stderr
        assert f"epp.grpc_port: {taken} is not accepted" in done.stderr


# Certificates


def install(name: str, home: Path) -> None:
    for suffix in ("crt", "key"):
        shutil.copy(CERTIFICATES / f"{name}.{suffix}", home / f"new.{suffix}")
        (home / f"new.{suffix}").replace(home / f"tls.{suffix}")


@contextlib.asynccontextmanager
async def trusting(endpoint: str, *names: str, own: str | None = None) -> AsyncIterator[Any]:
    """A client that trusts these certificates, and shows one of its own."""
    roots = b"".join((CERTIFICATES / f"{name}.crt").read_bytes() for name in names)
    pair = (
        [(CERTIFICATES / f"{own}.{suffix}").read_bytes() for suffix in ("key", "crt")]
        if own
        else [None, None]
    )
    credentials = grpc.ssl_channel_credentials(roots, *pair)
    options = [("grpc.ssl_target_name_override", "picker"), ("grpc.use_local_subchannel_pool", 1)]
    async with picker_client(endpoint, credentials, options) as client:
        yield client


async def picks(endpoint: str, *names: str, own: str | None = None) -> bool:
    async with trusting(endpoint, *names, own=own) as client:
        try:
            return bool(await client.pick(BODY))
        except AssertionError:
            return False


async def test_certificates_are_read_again_when_they_change(tmp_path: Path) -> None:
    install("first", tmp_path)
    files = {
        f"epp__tls__{name}_file": str(tmp_path / f"tls.{s}") for name, s in (("cert", "crt"), ("key", "key"))
    }
    async with sim_workers(1) as workers, picker_process(workers, tmp_path, **files) as picker:
        endpoint = picker.told["grpc"]
        async with trusting(endpoint, "first") as open_before:
            assert await open_before.pick(BODY)
            assert not await picks(endpoint, "second")
            install("second", tmp_path)

            async def is_new() -> bool:
                return await picks(endpoint, "second")

            await eventually(is_new, "a picker with its old certificate")
            assert not await picks(endpoint, "first")
            assert await open_before.pick(BODY), "connections stay open"


async def test_a_proxy_must_show_a_certificate_where_one_is_asked_for(tmp_path: Path) -> None:
    install("first", tmp_path)
    files = {
        f"epp__tls__{name}_file": str(tmp_path / f"tls.{s}") for name, s in (("cert", "crt"), ("key", "key"))
    }
    files["epp__tls__client_ca_file"] = str(CERTIFICATES / "second.crt")
    async with sim_workers(1) as workers, picker_process(workers, tmp_path, **files) as picker:
        assert await picks(picker.told["grpc"], "first", own="second")
        assert not await picks(picker.told["grpc"], "first")
        assert not await picks(picker.told["grpc"], "first", own="first")
