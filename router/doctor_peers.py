# SPDX-License-Identifier: Apache-2.0
"""Checks that concern workers together: can they pull from one another. Pure."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from router.config_addresses import split_host_port
from router.fleet.worker import WorkerSpec

Finding = tuple[str, str, bool | None, str, str]
"""Worker (or ``-``), name of the check, ok, detail, hint."""


def peer_checks(specs: Sequence[WorkerSpec], block_sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Loopback addresses among several hosts, addresses used twice, block sizes that differ.

    ``block_sizes`` holds tokens per block by worker id, where known.
    """
    peers = [spec for spec in specs if spec.p2p is not None]
    if not peers:
        return
    yield from _loopback(specs, peers)
    yield _duplicates(peers)
    yield _block_sizes(peers, block_sizes)


def _loopback(specs: Sequence[WorkerSpec], peers: Sequence[WorkerSpec]) -> Iterator[Finding]:
    hosts = {urlsplit(spec.url).hostname for spec in specs}
    hint = "p2p must be an address that the other workers reach; vLLM's own default is 0.0.0.0"
    for spec in peers:
        host, _ = split_host_port(spec.p2p or "")
        if len(hosts) > 1 and is_loopback(host):
            yield spec.id, "p2p address", False, f"{spec.p2p}, but the workers run on several hosts", hint


def is_loopback(host: str) -> bool:
    """Whether other hosts cannot reach this one by that name."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _duplicates(peers: Sequence[WorkerSpec]) -> Finding:
    """Every rank has a port of its own: base plus rank."""
    owners: dict[tuple[str, int], list[str]] = defaultdict(list)
    for spec in peers:
        host, port = split_host_port(spec.p2p or "")
        for rank in range(spec.ranks):
            owners[host, port + rank].append(spec.id)
    shared = {address: ids for address, ids in owners.items() if len(ids) > 1}
    if not shared:
        return "-", "p2p addresses unique", True, f"{len(owners)} addresses", ""
    detail = "; ".join(f"{host}:{port} is {' and '.join(ids)}" for (host, port), ids in shared.items())
    return (
        "-",
        "p2p addresses unique",
        False,
        detail,
        "a pull would reach the wrong worker: give each its port",
    )


def _block_sizes(peers: Sequence[WorkerSpec], block_sizes: Mapping[str, int]) -> Finding:
    name = "p2p block sizes equal"
    sizes = {(block_sizes[spec.id], spec.chunk_blocks) for spec in peers if spec.id in block_sizes}
    if not sizes:
        return "-", name, None, "no block size is known", ""
    detail = ", ".join(f"{size} tokens times {chunk}" for size, chunk in sorted(sizes))
    hint = "peers must agree on --block-size and blocks_per_chunk; their handshake refuses others"
    return "-", name, len(sizes) == 1, detail, "" if len(sizes) == 1 else hint
