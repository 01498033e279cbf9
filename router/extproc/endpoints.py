# SPDX-License-Identifier: Apache-2.0
"""Workers as a proxy knows them: ``ip:port``. Each port of a pod is an endpoint, and so a worker, of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from router.config_fleet import WorkerEntry
from router.errors import ConfigError
from router.fleet.worker import WorkerStatus


def endpoint_of(url: str) -> str:
    """``ip:port`` of a worker's URL; IPv6 in brackets, as Envoy writes it."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return _joined(host, port)


def check_endpoints(workers: Sequence[WorkerEntry], at: str = "fleet.workers") -> None:
    """Whether a proxy can be sent to each of these workers, of the list ``at``.

    Raises:
        ConfigError: an address that is no IP, or a URL with a path, which no destination can carry.
    """
    accepted = "http://IP:PORT for the endpoint picker: proxies are told addresses, not names or paths"
    for position, worker in enumerate(workers):
        parts = urlsplit(worker.url)
        try:
            ip_address(parts.hostname or "")
        except ValueError:
            raise ConfigError(f"{at}[{position}].url", worker.url, accepted) from None
        if parts.path.strip("/"):
            raise ConfigError(f"{at}[{position}].url", worker.url, accepted)


class Endpoints:
    """Which worker is at which address. The maps are made once per list of workers that the fleet gives out."""

    def __init__(self, statuses: Callable[[], Sequence[WorkerStatus]]) -> None:
        self._statuses = statuses
        self._made_of: Sequence[WorkerStatus] | None = None
        self._workers: dict[str, str] = {}
        self._endpoints: dict[str, str] = {}
        self._of_host: dict[str, list[str]] = {}

    def endpoint(self, worker_id: str) -> str | None:
        """Where a worker of the fleet is."""
        self._bring_up_to_date()
        return self._endpoints.get(worker_id)

    def worker_at(self, endpoint: str) -> str | None:
        """Who is there, if it is one of the fleet."""
        self._bring_up_to_date()
        return self._workers.get(endpoint) or self._workers.get(_normal(endpoint))

    def workers_at(self, entries: Iterable[str]) -> frozenset[str]:
        """Workers that a subset hint names: by ``ip:port``, or all ports of a bare IP. What is unknown names nobody."""
        self._bring_up_to_date()
        found: set[str] = set()
        for entry in entries:
            text = _normal(entry)
            worker = self._workers.get(text)
            if worker is not None:
                found.add(worker)
            else:
                found.update(self._of_host.get(text.strip("[]"), ()))
        return frozenset(found)

    def _bring_up_to_date(self) -> None:
        statuses = self._statuses()
        if statuses is self._made_of:
            return
        self._made_of = statuses
        self._endpoints = {status.spec.id: endpoint_of(status.spec.url) for status in statuses}
        self._workers = {endpoint: worker for worker, endpoint in self._endpoints.items()}
        self._of_host = {}
        for worker, endpoint in self._endpoints.items():
            self._of_host.setdefault(endpoint.rpartition(":")[0].strip("[]"), []).append(worker)


def _normal(endpoint: str) -> str:
    """One way to write an address: IPv6 can be written in many."""
    text = endpoint.strip()
    host, colon, port = text.rpartition(":")
    if colon and port.isdigit() and (host.startswith("[") or ":" not in host):
        try:
            return _joined(str(ip_address(host.strip("[]"))), int(port))
        except ValueError:
            return text
    try:
        return str(ip_address(text.strip("[]")))
    except ValueError:
        return text


def _joined(host: str, port: int) -> str:
    try:
        host = str(ip_address(host))
    except ValueError:
        return f"{host}:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
