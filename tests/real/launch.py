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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_SIZE_TOKENS = 32
"""The smallest block that vLLM's CPU attention takes."""
MODEL_NAME = "tiny"

_HOOK = Path(__file__).resolve().parent / "hook"


@dataclass(frozen=True, slots=True)
class Offload:
    """vLLM's OffloadingConnector with its host tier, and its P2P tier unless `p2p` is false."""

    cpu_bytes: int = 32 * 2**20
    self_describing: bool = True
    p2p: bool = True
    blocks_per_chunk: int = 1
    prompt_only: bool = True


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What differs between the workers that tests ask for."""

    offload: Offload | None = None
    nixl: bool = False
    """NixlConnector, through host memory; not together with `offload`."""
    gpu_blocks: int = 256
    """`--num-gpu-blocks-override`; one of them is vLLM's null block, so one fewer is usable."""
    max_model_len_tokens: int = 2048
    byte_hashes: bool = False
    """Whether events carry 32-byte hashes instead of their low 64 bits as integers."""
    hash_algorithm: str = "sha256"
    arguments: tuple[str, ...] = ()


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

    @classmethod
    def free(cls) -> Ports:
        """Four ports that were free a moment ago."""
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(socket.socket()) for _ in range(4)]
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
    transfer = _nixl() if config.nixl else _offloading(config.offload, ports) if config.offload else None
    if transfer is not None:
        words += ["--kv-transfer-config", json.dumps(transfer)]
    return [*words, *config.arguments]


def environment(config: WorkerConfig, ports: Ports) -> dict[str, str]:
    """Everything the worker's processes see."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON", "VIRTUAL_ENV"))}
    return kept | {
        "PYTHONPATH": str(_HOOK),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # two workers with OpenMP pools on two cores answer five requests a second
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.p2p),
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0" if config.byte_hashes else "1",
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
