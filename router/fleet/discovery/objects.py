# SPDX-License-Identifier: Apache-2.0
"""The parts of Kubernetes objects that count here, as the API server writes them (JSON, camelCase, nulls allowed).

Pod: ``core/v1``. InferencePool: ``inference.networking.k8s.io/v1`` of the Gateway API Inference Extension.
InferenceObjective: its ``inference.networking.x-k8s.io/v1alpha2``. Unknown fields are skipped while decoding, so a
list of a thousand pods costs no more than what is read of it.
"""

from __future__ import annotations

from msgspec import Struct, field


class Metadata(Struct, frozen=True, rename="camel"):
    """``metadata`` of any object."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: str | None = None
    """RFC 3339 in UTC with whole seconds: texts compare as times."""
    deletion_timestamp: str | None = None


class ContainerPort(Struct, frozen=True, rename="camel"):
    container_port: int


class Container(Struct, frozen=True):
    name: str
    ports: list[ContainerPort] | None = None


class PodSpec(Struct, frozen=True, rename="camel"):
    containers: list[Container] = []
    init_containers: list[Container] | None = None


class ContainerStatus(Struct, frozen=True, rename="camel"):
    name: str
    restart_count: int = 0


class Condition(Struct, frozen=True):
    type: str
    status: str


class PodStatus(Struct, frozen=True, rename="camel"):
    phase: str | None = None
    pod_ip: str | None = field(name="podIP", default=None)
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None


class Pod(Struct, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class TargetPort(Struct, frozen=True):
    number: int


class LabelSelector(Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str] = {}


class PoolSpec(Struct, frozen=True, rename="camel"):
    selector: LabelSelector
    target_ports: list[TargetPort]


class InferencePool(Struct, frozen=True):
    metadata: Metadata
    spec: PoolSpec


class PoolRef(Struct, frozen=True):
    name: str


class ObjectiveSpec(Struct, frozen=True, rename="camel"):
    priority: int | None = None
    """Higher goes first, negative may be shed, none is 0."""
    pool_ref: PoolRef | None = None


class InferenceObjective(Struct, frozen=True):
    metadata: Metadata
    spec: ObjectiveSpec = ObjectiveSpec()
