# SPDX-License-Identifier: Apache-2.0
"""The section ``fleet.kubernetes``: which pods are workers, and where the API server is."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from router.config_types import Seconds
from router.errors import ConfigError

MAX_TARGET_PORTS = 8
"""InferencePool v1: ``spec.targetPorts`` has 1 to 8 items."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_GROUP_VERSION = re.compile(r"[a-z0-9.-]{1,253}/v[a-z0-9]{1,62}")
_PodPort = Annotated[int, Meta(ge=1, le=65535)]


class PodDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """What holds for a pod whose annotations do not say."""

    events_port: Annotated[_PodPort | None, Meta(description="Port of KV events (rank 0).")] = None
    replay_port: Annotated[_PodPort | None, Meta(description="Port of event replay (rank 0).")] = None
    p2p_port: Annotated[
        _PodPort | None, Meta(description="Port of the control channel of vLLM's P2P tier (rank 0).")
    ] = None
    extension_port: Annotated[
        _PodPort | None, Meta(description="Port of the control channel of our engine extension (rank 0).")
    ] = None
    ranks: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Data-parallel ranks behind one port; from `/kv_event_sources` if absent."),
    ] = None
    role: Annotated[Literal["both", "prefill", "decode"], Meta(description="Phases it takes.")] = "both"
    transfer: Annotated[Literal["p2p", "nixl"] | None, Meta(description="As `fleet.workers[].transfer`.")] = (
        None
    )
    chunk_blocks: Annotated[
        int, Meta(ge=1, le=65536, description="Blocks per offloading chunk (`blocks_per_chunk`).")
    ] = 1
    fingerprint: Annotated[str | None, Meta(description="As `fleet.workers[].fingerprint`.")] = None
    block_size_tokens: Annotated[
        Annotated[int, Meta(ge=8, le=65536)] | None,
        Meta(description="As `fleet.workers[].block_size_tokens`."),
    ] = None


class KubernetesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Pods of a pool as workers; followed where ``pool`` or ``selector`` is set."""

    pool: Annotated[
        str | None,
        Meta(description="Name of the InferencePool; its selector and target ports say who serves."),
    ] = None
    selector: Annotated[
        dict[str, str], Meta(description="Without `pool`: labels that the pods of the fleet have.")
    ] = {}
    ports: Annotated[
        tuple[_PodPort, ...],
        Meta(
            max_length=MAX_TARGET_PORTS,
            description="Without `pool`: ports that serve HTTP; each is a worker.",
        ),
    ] = ()
    namespace: Annotated[
        str | None,
        Meta(description="Namespace of pool and pods; our own, or that of the kubeconfig, if absent."),
    ] = None
    kubeconfig: Annotated[
        str | None, Meta(description="Path of a kubeconfig; the service account of our own pod if absent.")
    ] = None
    context: Annotated[
        str | None, Meta(description="Context of the kubeconfig; its current one if absent.")
    ] = None
    container: Annotated[
        str | None,
        Meta(
            description="Container whose restart is one of the engine; if absent, those that declare a target port, "
            "or all of them."
        ),
    ] = None
    scheme: Annotated[Literal["http", "https"], Meta(description="How the workers speak.")] = "http"
    objectives: Annotated[
        str | None,
        Meta(
            description="Group and version of InferenceObjective, whose priorities hold here; null for none."
        ),
    ] = "inference.networking.x-k8s.io/v1alpha2"
    watch_s: Annotated[
        Seconds, Meta(description="Longest life of one watch; it is opened again where it ended.")
    ] = 60.0
    start_timeout_s: Annotated[
        Seconds,
        Meta(
            description="How long a start waits for the first list; then it goes on, and is not ready until there is one."
        ),
    ] = 5.0
    defaults: PodDefaults = PodDefaults()

    @property
    def followed(self) -> bool:
        """Whether workers come from Kubernetes at all."""
        return self.pool is not None or bool(self.selector)


def check_kubernetes(config: KubernetesConfig) -> None:
    """Rules between the fields.

    Raises:
        ConfigError: both pool and selector, a selector without ports, ports twice, a name that Kubernetes cannot have.
    """
    at = "fleet.kubernetes"
    if not config.followed:
        return
    for field, name in (("pool", config.pool), ("namespace", config.namespace)):
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(f"{at}.{field}", name, "a name of Kubernetes: a-z 0-9 . -")
    if config.pool is not None and (config.selector or config.ports):
        raise ConfigError(f"{at}.pool", config.pool, "either pool, or selector and ports")
    if config.pool is None and not config.ports:
        raise ConfigError(f"{at}.ports", list(config.ports), "at least one port where there is no pool")
    if len(set(config.ports)) < len(config.ports):
        raise ConfigError(f"{at}.ports", list(config.ports), "each port once")
    if config.context is not None and config.kubeconfig is None:
        raise ConfigError(f"{at}.context", config.context, "only with kubeconfig")
    if config.objectives is not None and not _GROUP_VERSION.fullmatch(config.objectives):
        raise ConfigError(f"{at}.objectives", config.objectives, "GROUP/VERSION")
