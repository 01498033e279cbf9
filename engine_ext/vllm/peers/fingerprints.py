# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of this engine's blocks, from what vLLM tells a tier. Reads the model's folder, nothing else.

vLLM gives a tier the model's name, the type of the cache, the groups and the parallel layout, but no revision: where
the option is not set, the weights are told apart by the commit in the path of a Hugging Face snapshot, and otherwise
by a digest of the configuration, the index, and of each weight file its name, its size and three samples. Times of
files are left out on purpose: copies of one model on two hosts must agree.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine_ext.transfer.fingerprint import Fingerprint

SAMPLE_BYTES = 1 << 16
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".gguf"}
_COMMIT = re.compile(r"[0-9a-f]{40}")


def fingerprint_of(
    config: Any,
    *,
    block_bytes: int,
    hash_root: bytes,
    platform: str,
    weights_revision: str = "",
    tenant: str = "",
) -> Fingerprint:
    """What must be equal at a peer.

    Args:
        config: vLLM's `OffloadingConfig` (`vllm/v1/kv_offload/config.py`).
        block_bytes: From one chunk of the host tier to the next.
        hash_root: `NONE_HASH`, which is the root of all block hashes: it differs with the algorithm and with the seed.
        platform: What the pages were written by, as vLLM names it (`cuda`, `cpu`); kernels of others lay them out
            in other ways.
        weights_revision: Names the weights; empty: `weights_of` the model.
        tenant: Whose region it is; empty: shared.
    """
    name = config.model.name
    return Fingerprint(
        model=model_name(name),
        weights_revision=weights_revision or weights_of(name),
        dtype=config.model.dtype,
        block_length_bytes=block_bytes,
        layout=layout_of(config, platform),
        tp_map=tp_map_of(config),
        hash_seed=hashlib.sha256(b"pointsman block hash root\0" + hash_root).hexdigest(),
        tenant=tenant,
    )


def layout_of(config: Any, platform: str) -> str:
    """Everything that orders bytes inside a chunk."""
    groups = ";".join(
        f"{group.group_id}:{group.tokens_per_block}x{len(group.layer_names)}:{_digest(group.layer_names)}"
        for group in config.groups
    )
    return (
        f"{platform} {config.kv_cache_layout or 'default'} canonical={int(config.canonical_layout)} "
        f"blocks_per_chunk={config.cache.blocks_per_chunk} tokens_per_hash={config.cache.tokens_per_hash} "
        f"worker_bytes={config.worker_kv_bytes_per_block} groups={groups}"
    )


def tp_map_of(config: Any) -> str:
    """Which worker's share lies where in a chunk. Canonical pages lie the same way under every topology."""
    parallel = config.parallel
    if config.canonical_layout and parallel.is_parallelism_agnostic:
        return "canonical"
    return (
        f"world={parallel.world_size} tp={parallel.tp_size} pp={parallel.pp_size} pcp={parallel.pcp_size} "
        f"dcp={parallel.dcp_size} replicated={int(config.replicated_layout)}"
    )


def model_name(name: str) -> str:
    """A name that two hosts agree on: hub ids as they are, folders by what they are called."""
    path = Path(name)
    if not path.is_dir():
        return name
    repository = next((part for part in path.parts if part.startswith("models--")), None)
    if path.parent.name == "snapshots" and repository is not None:
        return repository.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def weights_of(name: str) -> str:
    """What tells these weights from others of the same name."""
    path = Path(name)
    if path.is_dir():
        if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
            return path.name
        return "files:" + weights_digest(path)
    snapshots = sorted(one.name for one in _hub_snapshots(name))
    return "snapshots:" + ",".join(snapshots) if snapshots else "unnamed"


def weights_digest(folder: Path) -> str:
    """Of the configuration, the index, and samples of the weight files. Milliseconds, whatever their size."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name == "config.json" or file.name.endswith(".index.json"):
            _add(digest, file.name.encode(), file.read_bytes())
        elif file.suffix in WEIGHT_SUFFIXES:
            size = file.stat().st_size
            _add(digest, file.name.encode(), str(size).encode(), *_samples(file, size))
    return digest.hexdigest()


def _samples(file: Path, size: int) -> Iterable[bytes]:
    with file.open("rb") as opened:
        for start in (0, max(0, size // 2 - SAMPLE_BYTES // 2), max(0, size - SAMPLE_BYTES)):
            opened.seek(start)
            yield opened.read(SAMPLE_BYTES)


def _add(digest: Any, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)


def _hub_snapshots(name: str) -> Iterable[Path]:
    home = os.environ.get("HF_HUB_CACHE") or Path(
        os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface", "hub"
    )
    folder = Path(home, "models--" + name.replace("/", "--"), "snapshots")
    return folder.iterdir() if folder.is_dir() else ()


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
