# SPDX-License-Identifier: Apache-2.0
"""The section ``fleet``: the workers, from the configuration file or from ``--worker`` arguments."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from router.config_addresses import check_endpoint, check_http_url, check_peer_address, worker_id_of_url
from router.config_discovery import KubernetesConfig
from router.config_schema import config_error
from router.config_types import Seconds
from router.errors import ConfigError


class WorkerEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One worker of ``fleet.workers``, or one ``--worker`` argument."""

    url: Annotated[str, Meta(description="Base URL of the worker's HTTP server.")]
    id: Annotated[str | None, Meta(description="Name of the worker; `host:port` of the URL if absent.")] = (
        None
    )
    events: Annotated[str | None, Meta(description="ZMQ endpoint of its KV events (rank 0).")] = None
    replay: Annotated[str | None, Meta(description="ZMQ endpoint of its event replay (rank 0).")] = None
    p2p: Annotated[
        str | None, Meta(description="`host:port` of its P2P control channel (rank 0), as peers reach it.")
    ] = None
    extension: Annotated[
        str | None,
        Meta(
            description="`host:port` of the control channel of our engine extension (rank 0), as peers reach it; "
            "absent on stock vLLM."
        ),
    ] = None
    ranks: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Data-parallel ranks; from `/kv_event_sources` if absent."),
    ] = None
    role: Annotated[Literal["both", "prefill", "decode"], Meta(description="Phases it takes.")] = "both"
    transfer: Annotated[
        Literal["p2p", "nixl"] | None,
        Meta(
            description="How blocks go from a prefill to a decode worker: vLLM's P2P tier (the default with "
            "`p2p`) or NixlConnector."
        ),
    ] = None
    chunk_blocks: Annotated[
        int, Meta(ge=1, le=65536, description="Blocks per offloading chunk (`blocks_per_chunk`).")
    ] = 1
    offloads: Annotated[
        bool | None,
        Meta(
            description="Whether its engine offloads blocks to RAM; if absent, where `p2p` or `extension` is given."
        ),
    ] = None
    fingerprint: Annotated[
        str | None,
        Meta(description="What else must be equal for blocks to be exchanged: weights revision, layout, TP."),
    ] = None
    block_size_tokens: Annotated[
        Annotated[int, Meta(ge=8, le=65536)] | None,
        Meta(description="Tokens per KV block; needed only if neither events nor `/metrics` tell it."),
    ] = None


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The workers and how they are watched."""

    workers: Annotated[tuple[WorkerEntry, ...], Meta(description="The workers.")] = ()
    file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="YAML file with more workers, as in `workers`; read again whenever it changes."),
    ] = None
    kubernetes: KubernetesConfig = KubernetesConfig()
    poll_interval_s: Annotated[Seconds, Meta(description="Pause between two polls of a worker.")] = 1.0
    poll_timeout_s: Annotated[Seconds, Meta(description="Limit for one polled answer.")] = 2.0
    failure_threshold: Annotated[
        int, Meta(ge=1, le=1000, description="Failures in a row (requests, or unanswered polls) that count.")
    ] = 3
    backoff_min_s: Annotated[Seconds, Meta(description="First pause of a failing worker; doubles.")] = 1.0
    backoff_max_s: Annotated[Seconds, Meta(description="Longest pause of a failing worker.")] = 30.0

    @property
    def discovers(self) -> bool:
        """Whether workers come and go by themselves."""
        return self.file is not None or self.kubernetes.followed


_BOOLEANS = {"true": True, "false": False}


def parse_worker_argument(argument: str) -> WorkerEntry:
    """The worker of ``URL[,events=tcp://H:P][,replay=...][,p2p=H:P][,extension=H:P][,ranks=N][,role=...][,transfer=...][,chunk=N][,id=NAME]``.

    Raises:
        ConfigError: the field is ``--worker.<sub-field>``.
    """
    names = {"chunk": "chunk_blocks", "block_size": "block_size_tokens"}
    url, *options = argument.split(",")
    values: dict[str, Any] = {"url": url.strip()}
    for option in options:
        key, equals, raw = option.strip().partition("=")
        name = names.get(key, key)
        if not equals or name == "url" or name not in WorkerEntry.__struct_fields__:
            accepted = (
                "events, replay, p2p, extension, ranks, role, transfer, chunk, block_size, offloads, fingerprint "
                "or id, each as key=value"
            )
            raise ConfigError("--worker", option, accepted)
        if name in values:
            raise ConfigError(f"--worker.{key}", raw, "each option once")
        numeric = name in {"ranks", "chunk_blocks", "block_size_tokens"} and re.fullmatch(r"-?\d+", raw)
        values[name] = int(raw) if numeric else _BOOLEANS.get(raw, raw) if name == "offloads" else raw
    try:
        worker = msgspec.convert(with_id(values), WorkerEntry)
    except msgspec.ValidationError as error:
        raise config_error(error, WorkerEntry, values, "--worker") from error
    check_worker(worker, "--worker")
    return worker


def with_id(worker: object) -> object:
    if isinstance(worker, dict) and worker.get("id") is None and isinstance(worker.get("url"), str):
        return {**worker, "id": worker_id_of_url(worker["url"])}
    return worker


def check_worker(worker: WorkerEntry, path: str) -> None:
    check_http_url(f"{path}.url", worker.url)
    if worker.id is not None and not re.fullmatch(r"[A-Za-z0-9._:\-\[\]/]{1,200}", worker.id):
        raise ConfigError(f"{path}.id", worker.id, "1 to 200 of the characters A-Z a-z 0-9 . _ : - / [ ]")
    for name, endpoint in (("events", worker.events), ("replay", worker.replay)):
        if endpoint is not None:
            check_endpoint(f"{path}.{name}", endpoint)
    if worker.extension is not None:
        check_peer_address(f"{path}.extension", worker.extension)
    if worker.p2p is not None:
        check_peer_address(f"{path}.p2p", worker.p2p)
    elif worker.transfer == "p2p":
        raise ConfigError(f"{path}.transfer", "p2p", "p2p only with an address in p2p")
