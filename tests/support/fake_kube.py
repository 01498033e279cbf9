# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes API server as far as lists and watches go, on loopback over plain HTTP.

One version counter for everything, a log of changes per resource, watches that replay the log from the version they
name, label selectors (an object that leaves a selector is DELETED to its watchers), pages, bookmarks, and 410 for a
version that was compacted away. Faults are methods: connections that break, servers that refuse, events that never
come, lines that nobody expects.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiohttp import web

Object = dict[str, Any]
NAMESPACE = "models"
API_VERSIONS = {
    "pods": ("v1", "Pod"),
    "inferencepools": ("inference.networking.k8s.io/v1", "InferencePool"),
    "inferenceobjectives": ("inference.networking.x-k8s.io/v1alpha2", "InferenceObjective"),
}


@dataclass
class _Change:
    version: int
    before: Object | None
    after: Object | None


@dataclass(eq=False)
class _Watch:
    resource: str
    labels: dict[str, str]
    version: int
    bookmarks: bool
    transport: asyncio.Transport | None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    raw: list[str] = field(default_factory=list)
    ended: bool = False


class FakeKube:
    """``async with FakeKube() as kube``; everything runs on the loop of the test."""

    def __init__(self) -> None:
        self.url = ""
        self.refuse: int | None = None
        """Status that every request is answered with."""
        self.token = "s3cret"  # noqa: S105
        """What every request must bear."""
        self.resources = set(API_VERSIONS)
        """Others are 404, as those whose CRD is not installed."""
        self.page_limit = 10_000
        self.stale = False
        """Every version is too old to watch from."""
        self.hasty = False
        """Every watch is ended as soon as it has told what there was."""
        self.requests: list[tuple[str, Mapping[str, str]]] = []
        self._version = 100
        self._compacted = 0
        self._objects: dict[str, dict[str, Object]] = {name: {} for name in API_VERSIONS}
        self._log: dict[str, list[_Change]] = {name: [] for name in API_VERSIONS}
        self._watches: set[_Watch] = set()
        self._runner: web.AppRunner | None = None
        self._watching = asyncio.Condition()

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def listen(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get("/{group:.*}/namespaces/{namespace}/{resource}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.5, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        address = site._server.sockets[0].getsockname()  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{address[1]}"

    async def close(self) -> None:
        """Every connection breaks, and new ones are refused."""
        self.break_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, folder: Path) -> str:
        """A file with a cluster, a user with the token of now, and a context that names the namespace."""
        path = folder / "kubeconfig"
        entry = {"name": "fake", "cluster": {"server": self.url}}
        user = {"name": "us", "user": {"token": self.token}}
        context = {"name": "here", "context": {"cluster": "fake", "user": "us", "namespace": NAMESPACE}}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [entry],
                    "users": [user],
                    "contexts": [context],
                    "current-context": "here",
                }
            )
        )
        return str(path)

    # What is in the cluster

    def put(self, resource: str, one: Object) -> None:
        """Create or change; a change bumps the version and reaches the watchers."""
        self._version += 1
        one = copy.deepcopy(one)
        one["apiVersion"], one["kind"] = API_VERSIONS[resource]
        metadata = one["metadata"]
        metadata.setdefault("namespace", NAMESPACE)
        metadata["resourceVersion"] = str(self._version)
        before = self._objects[resource].get(metadata["name"])
        self._objects[resource][metadata["name"]] = one
        self._changed(resource, _Change(self._version, before, one))

    def delete(self, resource: str, name: str) -> None:
        self._version += 1
        before = self._objects[resource].pop(name)
        last = copy.deepcopy(before)
        last["metadata"]["resourceVersion"] = str(self._version)
        self._changed(resource, _Change(self._version, last, None))

    def get(self, resource: str, name: str) -> Object:
        """A copy to change and put back."""
        return copy.deepcopy(self._objects[resource][name])

    # Faults

    def compact(self) -> None:
        """Forget the history: who watches from an older version gets 410."""
        self._compacted = self._version
        for log in self._log.values():
            log.clear()

    def break_watches(self) -> int:
        """Reset every connection that watches; how many there were."""
        watches = list(self._watches)
        for watch in watches:
            if watch.transport is not None:
                watch.transport.abort()
        return len(watches)

    def end_watches(self) -> None:
        """End every watch in order, as after its time-out."""
        for watch in self._watches:
            watch.ended = True
            watch.wake.set()

    def say(self, resource: str, what: str, one: Object) -> None:
        """A line to every watcher of a resource, whatever the server has."""
        self.say_raw(resource, json.dumps({"type": what, "object": one}))

    def say_raw(self, resource: str, line: str) -> None:
        for watch in self._watches:
            if watch.resource == resource:
                watch.raw.append(line)
                watch.wake.set()

    def say_gone(self, resource: str) -> None:
        """410 within a watch, as an ERROR event."""
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        self.say(resource, "ERROR", status)

    def bookmark(self) -> None:
        """A version to go on from, to whoever asked for bookmarks."""
        self._version += 1
        for watch in self._watches:
            if watch.bookmarks:
                kind = API_VERSIONS[watch.resource][1]
                one = {
                    "kind": kind,
                    "metadata": {"resourceVersion": str(self._version), "creationTimestamp": None},
                }
                watch.raw.append(json.dumps({"type": "BOOKMARK", "object": one}))
                watch.wake.set()

    # What was asked

    def watches_of(self, resource: str) -> int:
        return sum(1 for watch in self._watches if watch.resource == resource)

    def lists_of(self, resource: str) -> int:
        return sum(1 for path, query in self.requests if path.endswith(resource) and "watch" not in query)

    def watched_from(self, resource: str) -> list[str]:
        """Versions that watches began at."""
        return [q["resourceVersion"] for path, q in self.requests if path.endswith(resource) and "watch" in q]

    async def until_watched(self, resource: str, patience_s: float = 20.0) -> None:
        """Returns once somebody watches the resource."""
        async with asyncio.timeout(patience_s), self._watching:
            await self._watching.wait_for(lambda: self.watches_of(resource))

    # Requests

    def _changed(self, resource: str, change: _Change) -> None:
        self._log[resource].append(change)
        for watch in self._watches:
            if watch.resource == resource:
                watch.wake.set()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        resource, query = request.match_info["resource"], dict(request.query)
        self.requests.append((request.path, query))
        group = request.match_info["group"].removeprefix("apis/").removeprefix("api/")
        if self.refuse is not None:
            return _status(self.refuse, "refused by the test")
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if resource not in self.resources or API_VERSIONS[resource][0] != group:
            return _status(404, "the server could not find the requested resource")
        if request.match_info["namespace"] != NAMESPACE:
            return _status(403, "another namespace")
        labels = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
        if "watch" in query:
            return await self._watch(request, resource, labels, query)
        return self._list(resource, labels, query)

    def _list(self, resource: str, labels: dict[str, str], query: Mapping[str, str]) -> web.Response:
        start = 0
        if "continue" in query:
            version, _, offset = query["continue"].partition(":")
            if int(version) < self._compacted:
                return _status(410, "the continue token is too old")
            start = int(offset)
        found = [one for one in self._objects[resource].values() if _fits(one, labels)]
        limit = min(self.page_limit, int(query.get("limit", self.page_limit)))
        page, rest = found[start : start + limit], found[start + limit :]
        metadata = {"resourceVersion": str(self._version)}
        if rest:
            metadata["continue"] = f"{self._version}:{start + limit}"
        return web.json_response({"kind": "List", "metadata": metadata, "items": page})

    async def _watch(
        self, request: web.Request, resource: str, labels: dict[str, str], query: Mapping[str, str]
    ) -> web.StreamResponse:
        version = int(query["resourceVersion"])
        if version < self._compacted or self.stale:
            return _status(410, "too old resource version")
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        bookmarks = query.get("allowWatchBookmarks") == "true"
        watch = _Watch(resource, labels, version, bookmarks, request.transport)
        watch.ended = self.hasty
        self._watches.add(watch)
        async with self._watching:
            self._watching.notify_all()
        try:
            async with asyncio.timeout(float(query.get("timeoutSeconds", 300))):
                while not watch.ended:
                    await self._send(watch, answer)
                    await watch.wake.wait()
                await self._send(watch, answer)
        except (TimeoutError, ConnectionResetError):
            pass
        finally:
            self._watches.discard(watch)
        return answer

    async def _send(self, watch: _Watch, answer: web.StreamResponse) -> None:
        watch.wake.clear()
        lines = []
        for change in self._log[watch.resource]:
            if change.version > watch.version:
                watch.version = change.version
                line = _line(change, watch.labels)
                if line is not None:
                    lines.append(line)
        lines += watch.raw
        watch.raw.clear()
        if lines:
            await answer.write(("\n".join(lines) + "\n").encode())


def _fits(one: Object | None, labels: Mapping[str, str]) -> bool:
    if one is None:
        return False
    have = one["metadata"].get("labels") or {}
    return all(have.get(key) == value for key, value in labels.items())


def _line(change: _Change, labels: Mapping[str, str]) -> str | None:
    """What a watcher with this selector is told."""
    was, is_now = _fits(change.before, labels), _fits(change.after, labels)
    if not was and not is_now:
        return None
    what = "MODIFIED" if was and is_now else "ADDED" if is_now else "DELETED"
    one = copy.deepcopy(change.after if is_now else change.before)
    assert one is not None
    one["metadata"]["resourceVersion"] = str(change.version)
    return json.dumps({"type": what, "object": one})


def _status(code: int, message: str) -> web.Response:
    return web.json_response(
        {"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code
    )


def pod(
    name: str,
    ip: str | None,
    *,
    uid: str | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    ready: bool = True,
    restarts: int = 0,
    created: str = "2026-01-01T00:00:00Z",
    ports: tuple[int, ...] = (8000,),
) -> Object:
    """A running pod with one container, as the API server shows it."""
    return {
        "metadata": {
            "name": name,
            "uid": uid or f"uid-{name}",
            "labels": {"app": "vllm", **(labels or {})},
            "annotations": dict(annotations or {}),
            "creationTimestamp": created,
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
        },
        "spec": {"containers": [{"name": "vllm", "ports": [{"containerPort": port} for port in ports]}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"name": "vllm", "restartCount": restarts, "ready": ready}],
        },
    }


def pool(
    name: str = "llama", ports: tuple[int, ...] = (8000,), labels: Mapping[str, str] | None = None
) -> Object:
    """An InferencePool v1."""
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "selector": {"matchLabels": dict(labels or {"app": "vllm"})},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        },
    }


def objective(name: str, priority: int | None, pool_name: str = "llama") -> Object:
    """An InferenceObjective."""
    return {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {"poolRef": {"name": pool_name}} | ({} if priority is None else {"priority": priority}),
    }
