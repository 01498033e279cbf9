# SPDX-License-Identifier: Apache-2.0
"""From the pods of a pool to workers: every target port of a pod is one. Pure.

Port ``i`` of several is data-parallel rank ``i`` of the pod: a worker with one rank, whose events, replay, P2P
and extension ports are those of rank 0 plus ``i``, as vLLM counts them. A single port may have several ranks behind it.

Names are ``POD.UID8:PORT``: a pod of a StatefulSet that comes back under its old name is another worker, whatever is
still under way to the old one. A restarted container is the same worker with another incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from router.config_discovery import PodDefaults
from router.fleet.discovery.annotations import AnnotationError, settings_of
from router.fleet.discovery.objects import Pod
from router.fleet.discovery.targets import Target
from router.fleet.worker import Role, Transfer, WorkerSpec

_MAX_PORT = 65535
_OVER = ("Succeeded", "Failed")
"""Phases in which no container runs any more; the address may be another pod's."""


@dataclass(frozen=True, slots=True)
class PodRules:
    """How pods become workers."""

    ports: tuple[int, ...]
    defaults: PodDefaults
    scheme: str = "http"
    container: str | None = None


@dataclass(frozen=True, slots=True)
class Endpoints:
    """What the pods come to."""

    targets: list[Target]
    rejected: dict[str, str]
    """Pods that say something of themselves that is not accepted, and what."""


def endpoints(pods: Iterable[Pod], rules: PodRules) -> Endpoints:
    """All workers. Of pods with one address the youngest has it. O(pods x ports + pods log pods)."""
    at_host: dict[str, Pod] = {}
    for pod in sorted(pods, key=_age):
        host = _address(pod)
        if host is not None:
            at_host[host] = pod
    targets: list[Target] = []
    rejected: dict[str, str] = {}
    for host, pod in at_host.items():
        try:
            targets += _workers(pod, host, rules)
        except AnnotationError as error:
            rejected[pod.metadata.name] = str(error)
    return Endpoints(targets, rejected)


def _age(pod: Pod) -> tuple[str, str]:
    return pod.metadata.creation_timestamp or "", pod.metadata.uid


def _address(pod: Pod) -> str | None:
    """Where to reach a pod that is there to stay: an IP, IPv6 in brackets."""
    status = pod.status
    if pod.metadata.deletion_timestamp is not None or status.phase in _OVER or not status.pod_ip:
        return None
    try:
        address = ip_address(status.pod_ip)
    except ValueError:
        return None
    return f"[{address}]" if address.version == 6 else str(address)


def _workers(pod: Pod, host: str, rules: PodRules) -> list[Target]:
    settings = settings_of(pod.metadata, rules.defaults)
    transfer = _transfer(settings)
    _check_ports(settings, rules.ports)
    incarnation, ready = _incarnation(pod, rules), _ready(pod)
    name = f"{pod.metadata.name}.{pod.metadata.uid[:8]}"
    alone = len(rules.ports) == 1

    def at(base: int | None, rank: int, scheme: str = "") -> str | None:
        return None if base is None else f"{scheme}{host}:{base + rank}"

    found = []
    for rank, port in enumerate(rules.ports):
        spec = WorkerSpec(
            id=f"{name}:{port}",
            url=f"{rules.scheme}://{host}:{port}",
            events=at(settings.events_port, rank, "tcp://"),
            replay=at(settings.replay_port, rank, "tcp://"),
            p2p=at(settings.p2p_port, rank),
            extension=at(settings.extension_port, rank),
            ranks=(settings.ranks or 1) if alone else 1,
            role=Role(settings.role),
            transfer=transfer,
            chunk_blocks=settings.chunk_blocks,
            block_size_tokens=settings.block_size_tokens,
            fingerprint=settings.fingerprint,
            ranks_given=settings.ranks is not None or not alone,
        )
        found.append(Target(spec, incarnation, ready))
    return found


def _check_ports(settings: PodDefaults, ports: Sequence[int]) -> None:
    """No two ranks may listen at one port, whatever for."""
    bases = {
        "events-port": settings.events_port,
        "replay-port": settings.replay_port,
        "p2p-port": settings.p2p_port,
        "extension-port": settings.extension_port,
    }
    users: dict[int, str] = dict.fromkeys(ports, "a target port")
    for name, base in bases.items():
        for port in range(base, base + len(ports)) if base is not None else ():
            if port in users:
                raise AnnotationError(f"port {port} of {name} is {users[port]} too ({len(ports)} ranks)")
            if port > _MAX_PORT:
                raise AnnotationError(f"{name} leaves no port for rank {port - (base or 0)}")
            users[port] = name


def _transfer(settings: PodDefaults) -> Transfer | None:
    if settings.transfer == "p2p" and settings.p2p_port is None:
        raise AnnotationError("transfer p2p needs a p2p-port")
    transfer = settings.transfer or ("p2p" if settings.p2p_port is not None else None)
    if settings.role != "both" and transfer is None:
        raise AnnotationError(f"role {settings.role} needs a transfer, or a p2p-port")
    return None if transfer is None else Transfer(transfer)


def _ready(pod: Pod) -> bool:
    return any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())


def _incarnation(pod: Pod, rules: PodRules) -> str:
    """The restarts of the containers that count: a side car's restart leaves the engine as it is."""
    counted = _engines(pod, rules)
    # An init container that is always restarted is a side car by another name.
    statuses = (*(pod.status.container_statuses or ()), *(pod.status.init_container_statuses or ()))
    restarts = [f"{one.name}:{one.restart_count}" for one in statuses if not counted or one.name in counted]
    return ",".join(sorted(restarts))


def _engines(pod: Pod, rules: PodRules) -> frozenset[str]:
    """Names of the containers that serve; empty where it cannot be told."""
    if rules.container is not None:
        return frozenset({rules.container})
    return frozenset(
        one.name
        for one in (*pod.spec.containers, *(pod.spec.init_containers or ()))
        if any(port.container_port in rules.ports for port in one.ports or ())
    )
