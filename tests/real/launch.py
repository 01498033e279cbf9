# SPDX-License-Identifier: Apache-2.0
"""What a real worker is started with: its configuration, its ports, its command line and its environment.

HTTP, replay and P2P listen on loopback. vLLM binds its event socket only for wildcard addresses, so that one
listens on all interfaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .imports import Version, default_version, python_path

BLOCK_SIZE_TOKENS = 32
"""The smallest block that vLLM's CPU attention takes."""
MODEL_NAME = "tiny"
PEER_PORT = "port:peer"
"""As a value in an extension's tier: this worker's own port for its peers, chosen at launch."""
P2P_PORT = "port:p2p"
"""The same for the in-tree P2P tier."""


@dataclass(frozen=True, slots=True)
class Offload:
    """vLLM's OffloadingConnector with its host tier, and its P2P tier unless `p2p` is false."""

    cpu_bytes: int = 32 * 2**20
    self_describing: bool = True
    p2p: bool = True
    blocks_per_chunk: int = 1
    prompt_only: bool = True


@dataclass(frozen=True, slots=True)
class Extension:
    """vLLM's OffloadingConnector with PointsmanOffloadingSpec; nothing of it is in the stock configurations."""

    tiers: tuple[Mapping[str, Any], ...] = ()
    """Entries of `secondary_tiers`; PEER_PORT and P2P_PORT stand for the worker's ports."""
    policy: str | None = None
    """`eviction_policy`; the name of one of ours needs no module path, the plugin has registered it."""
    cpu_bytes: int = 32 * 2**20
    blocks_per_chunk: int = 1
    self_describing: bool = True
    prompt_only: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More keys of `kv_connector_extra_config`."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What differs between the workers that tests ask for. At most one of `offload`, `extension` and `nixl`."""

    offload: Offload | None = None
    extension: Extension | None = None
    nixl: bool = False
    """NixlConnector, through host memory."""
    vllm: Version = field(default_factory=default_version)
    gpu_blocks: int = 256
    """`--num-gpu-blocks-override`; one of them is vLLM's null block, so one fewer is usable."""
    max_model_len_tokens: int = 2048
    byte_hashes: bool = False
    """Whether events carry 32-byte hashes instead of their low 64 bits as integers."""
    hash_algorithm: str = "sha256"
    arguments: tuple[str, ...] = ()
    more_environment: tuple[tuple[str, str], ...] = ()


PLAIN = WorkerConfig()
P2P = WorkerConfig(offload=Offload())
NIXL = WorkerConfig(nixl=True)


@dataclass(frozen=True, slots=True)
class Ports:
    http: int
    events: int
    replay: int
    p2p: int
    """Of the P2P tier's control channel, or of NixlConnector's handshake."""
    peer: int
    """Of our peer tier's control channel."""

    @classmethod
    def free(cls) -> Ports:
        """Ports that were free a moment ago."""
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(socket.socket()) for _ in range(5)]
            for one in held:
                one.bind(("127.0.0.1", 0))
            return cls(*(one.getsockname()[1] for one in held))


def real_home() -> Path | None:
    """The directory that setup.sh filled, from the setting POINTSMAN_REAL."""
    named = os.environ.get("POINTSMAN_REAL")
    if not named:
        return None
    home = Path(named).expanduser().resolve()
    complete = (home / "venv/bin/vllm").exists() and (home / "model/config.json").exists()
    return home if complete else None


def enabling_command() -> str:
    named = os.environ.get("POINTSMAN_REAL") or "~/.cache/pointsman-real"
    return f"tests/real/setup.sh {named} && POINTSMAN_REAL={named} pytest"


def command(config: WorkerConfig, ports: Ports, home: Path, topic: str) -> list[str]:
    """`vllm serve` with its arguments."""
    listen = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.events}",
        "replay_endpoint": f"tcp://127.0.0.1:{ports.replay}",
        "topic": topic,
    }
    words = [str(home / "venv/bin/vllm"), "serve", str(home / "model")]
    words += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(ports.http)]
    words += ["--max-model-len", str(config.max_model_len_tokens), "--max-num-seqs", "8", "--enforce-eager"]
    words += ["--enable-prefix-caching", "--prefix-caching-hash-algo", config.hash_algorithm]
    words += ["--block-size", str(BLOCK_SIZE_TOKENS), "--num-gpu-blocks-override", str(config.gpu_blocks)]
    words += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(listen)]
    transfer = _transfer(config, ports)
    if transfer is not None:
        words += ["--kv-transfer-config", json.dumps(transfer)]
    return [*words, *config.arguments]


def environment(config: WorkerConfig, ports: Ports, home: Path) -> dict[str, str]:
    """Everything the worker's processes see."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON", "VIRTUAL_ENV"))}
    return kept | {
        "PYTHONPATH": python_path(home, config.vllm, extension=config.extension is not None),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # two workers with OpenMP pools on two cores answer five requests a second
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.p2p),
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0" if config.byte_hashes else "1",
        **dict(config.more_environment),
    }


def _transfer(config: WorkerConfig, ports: Ports) -> dict[str, Any] | None:
    """The value of --kv-transfer-config."""
    if config.nixl:
        return _nixl()
    if config.extension:
        return _extended(config.extension, ports)
    return _offloading(config.offload, ports) if config.offload else None


def _with_ports(options: Mapping[str, Any], own: Mapping[str, int]) -> dict[str, Any]:
    """The options with this worker's ports in place of their names, in nested options too."""
    return {
        key: _with_ports(value, own)
        if isinstance(value, Mapping)
        else own.get(value, value)
        if isinstance(value, str)
        else value
        for key, value in options.items()
    }


def names_port(options: Mapping[str, Any], port: str) -> bool:
    """Whether PEER_PORT or P2P_PORT stands anywhere in a tier's options."""
    return any(
        names_port(value, port) if isinstance(value, Mapping) else value == port for value in options.values()
    )


def _extended(extension: Extension, ports: Ports) -> dict[str, Any]:
    own = {PEER_PORT: ports.peer, P2P_PORT: ports.p2p}
    tiers = [_with_ports(tier, own) for tier in extension.tiers]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "PointsmanOffloadingSpec",  # no module path: the plugin has registered it in each process
            "cpu_bytes_to_use": extension.cpu_bytes,
            "blocks_per_chunk": extension.blocks_per_chunk,
            "self_describing_kv_events": extension.self_describing,
            "offload_prompt_only": extension.prompt_only,
            "secondary_tiers": tiers,
            **({"eviction_policy": extension.policy} if extension.policy else {}),
            **extension.extra,
        },
    }


def _offloading(offload: Offload, ports: Ports) -> dict[str, Any]:
    p2p = {"type": "p2p", "host": "127.0.0.1", "port": ports.p2p, "num_threads": 0}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostCopyOffloadingSpec",
            "spec_module_path": "host_copy_spec",
            "cpu_bytes_to_use": offload.cpu_bytes,
            "blocks_per_chunk": offload.blocks_per_chunk,
            "self_describing_kv_events": offload.self_describing,
            "offload_prompt_only": offload.prompt_only,
            "secondary_tiers": [p2p] if offload.p2p else [],
        },
    }


def _nixl() -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"num_threads": 0},
    }
