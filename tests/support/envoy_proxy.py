# SPDX-License-Identifier: Apache-2.0
"""A real Envoy in front of workers, with ext_proc; every port is a free one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp
from eventually import eventually

_TYPE = "type.googleapis.com/envoy."
_DESTINATION = "x-gateway-destination-endpoint"
_SUBSET = "envoy.lb.subset_hint"


@dataclass(frozen=True, kw_only=True)
class EnvoySettings:
    """How Envoy treats its endpoint picker."""

    request_mode: str = "FULL_DUPLEX_STREAMED"
    response_mode: str = "FULL_DUPLEX_STREAMED"
    fail_open: bool = False
    original_dst: bool = False
    """Go wherever the header says, instead of to the endpoints that are known."""
    message_timeout: str = "30s"
    response_attributes: tuple[str, ...] = ("upstream.address",)
    subset: Sequence[str] | str | None = None
    """Subset hint of every request, as a list or as one text."""
    concurrency: int = 1


@dataclass
class Envoy:
    """A running proxy."""

    url: str
    admin: str
    process: subprocess.Popen[bytes]


@contextlib.asynccontextmanager
async def running_envoy(
    picker: str, workers: Sequence[str], home: Path, settings: EnvoySettings | None = None
) -> AsyncIterator[Envoy]:
    """Envoy in front of ``workers`` (``ip:port``), asking the picker at ``ip:port``."""
    settings = settings or EnvoySettings()
    config, address, log = _prepare(home, bootstrap(picker, workers, settings))
    command = [
        str(Path(sys.executable).with_name("envoy")), "-c", str(config), "--disable-hot-restart",
        "--concurrency", str(settings.concurrency), "--admin-address-path", str(address), "-l", "warning",
    ]  # fmt: skip
    process = await asyncio.to_thread(
        subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    try:
        async with aiohttp.ClientSession() as session:
            admin, url = await _addresses(process, session, address, home / "envoy.log")
        yield Envoy(url, admin, process)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
        log.close()


def _prepare(home: Path, config: Mapping[str, Any]) -> tuple[Path, Path, IO[bytes]]:
    """Files for the configuration, for the address of the admin port, and for the log."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "envoy.json").write_text(json.dumps(config))
    return home / "envoy.json", home / "admin.txt", (home / "envoy.log").open("wb")


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


async def _addresses(
    process: subprocess.Popen[bytes], session: aiohttp.ClientSession, file: Path, log: Path
) -> tuple[str, str]:
    async def listening() -> tuple[str, str] | None:
        assert process.poll() is None, _text(log)
        if not (told := _text(file)):
            return None
        admin = f"http://{told}"
        try:
            async with session.get(f"{admin}/ready") as answer:
                if (await answer.text()).strip() != "LIVE":
                    return None
            async with session.get(f"{admin}/listeners?format=json") as answer:
                rows = json.loads(await answer.text())["listener_statuses"]
        except aiohttp.ClientError:
            return None
        port = rows[0]["local_address"]["socket_address"]["port_value"]
        return admin, f"http://127.0.0.1:{port}"

    found = await eventually(listening, "an Envoy that does not start")
    assert found is not None
    return found


def bootstrap(picker: str, workers: Sequence[str], settings: EnvoySettings) -> Mapping[str, Any]:
    """Envoy's configuration."""
    return {
        "admin": {"address": _address("127.0.0.1:0")},
        "static_resources": {
            "listeners": [_listener(settings)],
            "clusters": [_workers(workers, settings), _picker(picker)],
        },
    }


def _address(endpoint: str) -> dict[str, Any]:
    host, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _listener(settings: EnvoySettings) -> dict[str, Any]:
    filters = [_ext_proc(settings), {"name": "router", "typed_config": {"@type": f"{_TYPE}extensions.filters.http.router.v3.Router"}}]  # fmt: skip
    if settings.subset is not None:
        filters.insert(0, _subset_hint(settings.subset))
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "workers",
            "timeout": "0s",
            "retry_policy": {"retry_on": "connect-failure,refused-stream", "num_retries": 2},
        },
    }
    manager = {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": filters,
        "generate_request_id": False,
    }
    return {
        "name": "front",
        "address": _address("127.0.0.1:0"),
        "per_connection_buffer_limit_bytes": 64 * 2**20,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _subset_hint(subset: Sequence[str] | str) -> dict[str, Any]:
    value = {"x-gateway-destination-endpoint-subset": subset}
    return {
        "name": "set_metadata",
        "typed_config": {
            "@type": f"{_TYPE}extensions.filters.http.set_metadata.v3.Config",
            "metadata": [{"metadata_namespace": _SUBSET, "value": value}],
        },
    }


def _ext_proc(settings: EnvoySettings) -> dict[str, Any]:
    trailers = "SEND" if "FULL_DUPLEX_STREAMED" in (settings.request_mode, settings.response_mode) else "SKIP"
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{_TYPE}extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
            "failure_mode_allow": settings.fail_open,
            "message_timeout": settings.message_timeout,
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": settings.request_mode,
                "response_body_mode": settings.response_mode,
                "request_trailer_mode": trailers,
                "response_trailer_mode": trailers,
            },
            "response_attributes": list(settings.response_attributes),
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb", _SUBSET]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }


def _workers(workers: Sequence[str], settings: EnvoySettings) -> dict[str, Any]:
    if settings.original_dst:
        return {
            "name": "workers",
            "type": "ORIGINAL_DST",
            "connect_timeout": "2s",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": _DESTINATION},
        }
    round_robin = {
        "typed_extension_config": {
            "name": "round_robin",
            "typed_config": {"@type": f"{_TYPE}extensions.load_balancing_policies.round_robin.v3.RoundRobin"},
        }
    }
    policy = {
        "@type": f"{_TYPE}extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": _DESTINATION}]}},
            {"header": _DESTINATION},
        ],
        "fallback_policy": {"policies": [round_robin]},
    }
    return {
        "name": "workers",
        "type": "STATIC",
        "connect_timeout": "2s",
        "per_connection_buffer_limit_bytes": 64 * 2**20,
        "load_assignment": {
            "cluster_name": "workers",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(one)}} for one in workers]}],
        },
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "override_host", "typed_config": policy}}]
        },
    }


def _picker(picker: str) -> dict[str, Any]:
    http2 = {
        "@type": f"{_TYPE}extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "2s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(picker)}}]}],
        },
    }
