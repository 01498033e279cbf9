# SPDX-License-Identifier: Apache-2.0
"""The calls of the service: a body in, a status and an answer out. No HTTP, no waiting except for ``/dump``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.index import Run
from indexer.service.answer import answer, rows
from indexer.service.dump import dump_group
from indexer.service.registry import Group, Registry, namespaces
from indexer.service.requests import Peer, Query, QueryByHash, Register, RequestError, Unregister, decode
from indexer.service.workers import Streams, worker_rows

Reply = tuple[int, object]
_OK = {"status": "ok"}


class Calls:
    """One method a call; each may raise ``RequestError``."""

    def __init__(
        self, registry: Registry, holders: HolderTable, streams: Streams, key: HashKey, peers: Sequence[str]
    ) -> None:
        self._registry = registry
        self._holders = holders
        self._streams = streams
        self._key_id = key.id
        self._peers = dict.fromkeys(peers)
        self._register: msgspec.json.Decoder[Register] = msgspec.json.Decoder(Register)
        self._unregister: msgspec.json.Decoder[Unregister] = msgspec.json.Decoder(Unregister)
        self._query: msgspec.json.Decoder[Query] = msgspec.json.Decoder(Query)
        self._query_by_hash: msgspec.json.Decoder[QueryByHash] = msgspec.json.Decoder(QueryByHash)
        self._peer: msgspec.json.Decoder[Peer] = msgspec.json.Decoder(Peer)

    def query(self, body: bytes) -> Reply:
        """Who holds how much of a prompt. O(tokens + blocks)."""
        asked = decode(self._query, body)
        group = self._registry.group(asked.model_name, asked.tenant)
        tokens = asked.tokens()
        salt = [asked.cache_salt] if asked.cache_salt else []
        index = self._holders.index
        version = index.version  # what follows is at least as new
        runs: list[Run] = []
        for model, lora in namespaces(group, asked.lora_name or ""):
            runs += index.match(index.hash_blocks(tokens, group.block_size, model, lora, salt))
        return 200, self._answer(group, runs, version)

    def query_by_hash(self, body: bytes) -> Reply:
        """The same for hashes of ``/dump``."""
        asked = decode(self._query_by_hash, body)
        if asked.hash_key_id not in (None, self._key_id):
            message = f"hash_key_id: {asked.hash_key_id}, where hashes are made with key {self._key_id}"
            raise RequestError(409, message)
        group = self._registry.group(asked.model_name, asked.tenant)
        version = self._holders.index.version
        runs = self._holders.index.match(asked.hashes())
        return 200, {**self._answer(group, runs, version), "hash_key_id": self._key_id}

    def register(self, body: bytes) -> Reply:
        """Follow a worker; it counts as pending until it connects."""
        self._registry.register(decode(self._register, body))
        return 201, _OK

    def unregister(self, body: bytes) -> Reply:
        """Forget a worker, or one rank of it."""
        asked = decode(self._unregister, body)
        self._registry.unregister(asked.model_name, asked.instance_id, asked.named_tenant, asked.dp_rank)
        return 200, _OK

    def workers(self, _: bytes) -> Reply:
        """What is registered, and how its streams are."""
        return 200, worker_rows(self._registry.groups(), self._holders, self._streams)

    async def dump(self, _: bytes) -> Reply:
        """Everything held, by our hashes. O(blocks)."""
        groups = [
            (group.key, group.block_size, dict(self._registry.places(group)))
            for group in self._registry.groups()
        ]
        dumped: dict[str, Any] = {}
        for key, block_size, places in groups:
            events = await asyncio.to_thread(dump_group, self._holders.index, places)
            name = f"{key.model}:{key.tenant}"
            dumped[name] = {"block_size": block_size, "hash_key_id": self._key_id, "events": events}
        return 200, dumped

    def register_peer(self, body: bytes) -> Reply:
        """Remember another indexer."""
        url = decode(self._peer, body).url
        if not url.startswith(("http://", "https://")):
            raise RequestError(400, f"url: {url!r} is no http:// or https:// address")
        self._peers[url] = None
        return 201, _OK

    def deregister_peer(self, body: bytes) -> Reply:
        """Forget it."""
        url = decode(self._peer, body).url
        if url not in self._peers:
            raise RequestError(404, f"peer {url} not found")
        del self._peers[url]
        return 200, _OK

    def peers(self, _: bytes) -> Reply:
        """The other indexers, first come first."""
        return 200, list(self._peers)

    def _answer(self, group: Group, runs: list[Run], version: int) -> dict[str, object]:
        found = answer(rows(runs, self._registry.places(group)), group.block_size)
        return {**found, "index_version": version}
