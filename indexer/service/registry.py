# SPDX-License-Identifier: Apache-2.0
"""What was registered: one subscription for each (model, tenant, instance, rank), and whose slots are whose.

Invariants:

* A registration is one worker of the ``HolderTable``, so one rank that restarts empties no other.
* The block size of a group (model, tenant) is that of its first registration; a group lives as long as it has any.
* Answers for a group read only slots of that group, without ranks under suspicion.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from indexer.holders import HolderTable
from indexer.identity import WorkerId, WorkerRank
from indexer.service.requests import Register, RequestError
from indexer.snapshot.sections import Recalled
from indexer.subscriber import RankEndpoints

_ENDPOINT = re.compile(r"(?:tcp://[^\s/]+:(?P<port>\d{1,5})|ipc://\S+)\Z")
_MAX_INSTANCE = 0xFFFF_FFFF_FFFF_FFFF


class Subscriptions(Protocol):
    """What follows the event streams (``indexer.subscriber.EventSubscriber``)."""

    def add(self, endpoints: list[RankEndpoints]) -> None: ...
    def remove(self, worker: WorkerId) -> None: ...


@dataclass(frozen=True, slots=True)
class GroupKey:
    """What has an index of its own."""

    model: str
    tenant: str

    def __str__(self) -> str:
        return f"model={self.model} tenant={self.tenant}"


@dataclass(frozen=True, slots=True)
class Registration:
    """One event stream."""

    worker: WorkerId
    group: GroupKey
    instance_id: int
    dp_rank: int
    endpoint: str
    replay_endpoint: str | None
    lora: str
    """The adapter of all its events, where they name none; empty for the base model."""


@dataclass(frozen=True, slots=True)
class Place:
    """Whose slot it is."""

    instance: str
    dp_rank: int
    registration: WorkerId
    is_store: bool


@dataclass(slots=True)
class Group:
    """The registrations of a model and tenant."""

    key: GroupKey
    block_size: int
    registrations: dict[tuple[int, int], Registration] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    revision: int = -1
    """Of the holder table, when ``places`` was made."""


class Registry:
    """Used by one thread, that of the event loop."""

    def __init__(
        self,
        holders: HolderTable,
        subscriptions: Subscriptions,
        recalled: Recalled | None = None,
        offload_grace_s: float = 0.0,
    ) -> None:
        """``recalled``: what registrations held before, if that is known. ``offload_grace_s``: of all engines."""
        self._holders = holders
        self._subscriptions = subscriptions
        self._recalled = Recalled() if recalled is None else recalled
        self._offload_grace_s = offload_grace_s
        self._groups: dict[GroupKey, Group] = {}
        self._numbers = itertools.count(1)

    def groups(self) -> Iterable[Group]:
        return self._groups.values()

    def group(self, model: str, tenant: str) -> Group:
        """The group that a question is about.

        Raises:
            RequestError: 404 where nothing is registered for it.
        """
        group = self._groups.get(GroupKey(model, tenant))
        if group is None:
            raise RequestError(404, f"no indexer for model_name={model} tenant_id={tenant}")
        return group

    def register(self, request: Register) -> None:
        """Follow a stream from now on; returns before it is connected.

        Raises:
            RequestError: 400 for an endpoint that cannot be one, 409 where it contradicts what is registered, 503 where
                there is no room for it.
        """
        _check_endpoints(request)
        if request.instance_id > _MAX_INSTANCE:
            raise RequestError(422, "instance_id: an unsigned 64-bit integer is expected")
        key = GroupKey(request.model_name, request.tenant)
        group = self._groups.get(key) or Group(key, request.block_size)
        rank = request.dp_rank or 0
        if group.block_size != request.block_size:
            raise RequestError(
                409,
                f"block_size mismatch for {key}: existing={group.block_size}, requested={request.block_size}",
            )
        if (request.instance_id, rank) in group.registrations:
            raise RequestError(
                409, f"instance_id {request.instance_id} dp_rank {rank} is already registered for {key}"
            )
        worker = WorkerId(f"{request.instance_id}/{rank}#{next(self._numbers)}")
        lora = request.lora_name or ""
        one = Registration(
            worker, key, request.instance_id, rank, request.endpoint, request.replay_endpoint, lora
        )
        try:
            self._holders.register(
                worker, index_model(key.model, lora), rank + 1, offload_grace_s=self._offload_grace_s
            )
        except MemoryError:
            raise RequestError(503, "the index has no room for another event stream") from None
        self._groups[key] = group
        group.registrations[request.instance_id, rank] = one
        streams = [RankEndpoints(WorkerRank(worker, rank), one.endpoint, one.replay_endpoint)]
        self._subscriptions.add(self._recalled.adopt(self._holders, worker, streams))

    def unregister(self, model: str, instance_id: int, tenant: str | None, dp_rank: int | None) -> None:
        """Forget streams and all they said; ``None`` stands for all tenants or all ranks.

        Raises:
            RequestError: 404 where nothing of that is registered.
        """
        found = [
            one
            for group in self._groups.values()
            if group.key.model == model and tenant in (None, group.key.tenant)
            for one in group.registrations.values()
            if one.instance_id == instance_id and dp_rank in (None, one.dp_rank)
        ]
        if not found:
            of_tenant = "" if tenant is None else f" tenant_id={tenant}"
            of_rank = "" if dp_rank is None else f" dp_rank={dp_rank}"
            raise RequestError(
                404, f"instance_id {instance_id} is not registered for model_name={model}{of_tenant}{of_rank}"
            )
        for one in found:
            self._subscriptions.remove(one.worker)
            self._holders.unregister(one.worker)
            group = self._groups[one.group]
            del group.registrations[one.instance_id, one.dp_rank]
            if not group.registrations:
                del self._groups[one.group]

    def places(self, group: Group) -> dict[int, Place]:
        """Slots of a group that count. O(1) unless slots have changed since the last question."""
        revision = self._holders.revision
        if revision != group.revision:
            group.places = dict(self._places(group))
            group.revision = revision
        return group.places

    def _places(self, group: Group) -> Iterable[tuple[int, Place]]:
        for one in group.registrations.values():
            slots = self._holders.slots(one.worker, 0)
            if slots is None or not slots.ranks:
                continue
            name = str(one.instance_id)
            yield slots.store, Place(name, one.dp_rank, one.worker, is_store=True)
            # The stream is the registered rank's; who doubts it doubts all that came over it.
            if not slots.suspect[one.dp_rank]:
                for rank, slot in enumerate(slots.ranks):
                    yield slot, Place(name, rank, one.worker, is_store=False)


def index_model(model: str, lora: str) -> str:
    """The index's name of a model whose events belong to an adapter that they do not name."""
    return f"{model}\n{lora}" if lora else model


def namespaces(group: Group, lora: str) -> list[tuple[str, str]]:
    """(model, LoRA) of the index in which blocks of a prompt may be: mostly one."""
    model = group.key.model
    found = [(model, lora)]
    if lora and any(one.lora == lora for one in group.registrations.values()):
        found += [(index_model(model, lora), ""), (index_model(model, lora), lora)]
    return found


def _check_endpoints(request: Register) -> None:
    for name, endpoint in (("endpoint", request.endpoint), ("replay_endpoint", request.replay_endpoint)):
        if endpoint is None:
            continue
        found = _ENDPOINT.match(endpoint)
        if found is None or not 0 < int(found["port"] or 1) < 1 << 16:
            raise RequestError(400, f"{name}: {endpoint!r} is no ZMQ endpoint such as tcp://10.0.0.1:5557")
