# SPDX-License-Identifier: Apache-2.0
"""An engine with PointsmanStorageTier: its configuration, prompts that it kept on disk, and what its events tell."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventually import eventually_now

from indexer.hashing import HashKey
from indexer.identity import Tier
from indexer.index import IndexLimits, open_index

from .adapters import ARGUMENTS
from .asking import B, complete, text
from .engine import MODEL_NAME, RealWorker, WorkerConfig
from .events import Message, next_seq, removed, replay, stored, wait_for_events
from .imports import Version
from .launch import Extension
from .prompts import token_ids

HBM_BLOCKS = 39
BLOCK_BYTES = 1 << 13
"""Of the small model, in a row of the host region."""
RAM_BYTES = 40 * BLOCK_BYTES
STORE_BLOCKS = 300
STORE_BYTES = STORE_BLOCKS * (64 + BLOCK_BYTES)

wait_until = functools.partial(eventually_now, patience_s=60)


def storing(root: Path, version: Version) -> WorkerConfig:
    """HBM and RAM for little more than one long prompt, a directory for ten, and room for adapters."""
    tier = {
        "type": "PointsmanStorageTier",
        "module_path": "engine_ext.vllm.tier",
        "root_dir": str(root),
        "capacity_bytes": STORE_BYTES,
        "locality": "REMOTE",
        "lookup_deadline_s": 30.0,
        "load_deadline_s": 60.0,
        "report_interval_s": 5.0,
    }
    return WorkerConfig(
        extension=Extension(tiers=(tier,), cpu_bytes=RAM_BYTES),
        gpu_blocks=HBM_BLOCKS + 1,
        max_model_len_tokens=1024,
        byte_hashes=True,
        arguments=ARGUMENTS,
        vllm=version,
    )


def files(root: Path) -> set[bytes]:
    """Hashes of the blocks whose files lie below the root."""
    found = (path.name for path in root.glob("*/*/*") if not path.name.startswith("."))
    return {bytes.fromhex(name)[:-4] for name in found}


def events(worker: RealWorker) -> list[dict[str, Any]]:
    return [event for message in replay(worker.replay) for event in message.events]


def said(worker: RealWorker) -> set[bytes]:
    """Hashes that are stored, as somebody knows who heard every event and nothing else."""
    held: set[bytes] = set()
    for event in events(worker):
        if event.get("medium") == "STORAGE":
            hashes = event["block_hashes"]
            held = held | set(hashes) if event["type"] == "BlockStored" else held - set(hashes)
    return held


@dataclass(frozen=True, slots=True)
class Kept:
    """A prompt whose blocks were all written to the directory."""

    text: str
    cached: int
    hashes: list[bytes]
    """The engine's, of its blocks, as it published them for HBM."""


def store(worker: RealWorker, prompt: list[int], **more: Any) -> Kept:
    """Runs a prompt that no tier has, until each of its blocks was announced as stored and RAM may drop them all.

    Whether the files are there at one moment says less: some may be evicted by then. And as long as the job is not
    over they stay pinned in RAM, where the next prompt then finds no room, and is stored nowhere.
    """
    start, written = next_seq(worker.replay), written_bytes(worker)
    answer = complete(worker, prompt, **more)
    blocks = [tuple(prompt[i : i + B]) for i in range(0, len(prompt) // B * B, B)]
    names: dict[tuple[int, ...], bytes] = {}

    def announced(heard: list[dict[str, Any]]) -> bool:
        names.update(_names(heard))
        on_disk = {block for event in stored(heard, "STORAGE") for block in event["block_hashes"]}
        return all(names.get(tokens) in on_disk for tokens in blocks)

    wait_for_events(worker.replay, start, announced)
    done = written + len(blocks) * BLOCK_BYTES
    wait_until(lambda: written_bytes(worker) >= done, "the end of the store job")
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Kept(text(answer), cached, [names[tokens] for tokens in blocks])


def _names(heard: list[dict[str, Any]]) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Tokens and hash of each block stored in HBM."""
    for event in stored(heard, "GPU"):
        for i, block in enumerate(event["block_hashes"]):
            yield tuple(event["token_ids"][i * B : (i + 1) * B]), block


def written_bytes(worker: RealWorker) -> float:
    """Of jobs that are over: their blocks are free to leave RAM. There is no such series before the first."""
    return metric(worker, "vllm:kv_offload_tiering_write_bytes_total")


def push_out(worker: RealWorker, rounds: int = 2) -> None:
    """Fills HBM and RAM with other blocks."""
    for _ in range(rounds):
        store(worker, token_ids(30 * B + 1))


def from_disk(worker: RealWorker) -> float:
    return worker.tokens_by_source().get("disk", 0.0)


class Listener:
    """An index that hears one worker's events, as a router's does."""

    def __init__(self) -> None:
        self._index = open_index(HashKey(bytes(16)), IndexLimits())
        self._slots = [self._index.open(MODEL_NAME, False)]
        self._shared = self._index.open(MODEL_NAME, False)

    def hear(self, message: Message) -> None:
        self._index.apply(self._slots, 0, self._shared, message.payload)

    def tiers(self, prompt: list[int]) -> dict[Tier, int]:
        """Blocks of the prompt that each tier holds from its beginning."""
        return {Tier(tier): end for _, tier, begin, end, _ in self._match(prompt) if begin == 0}

    def depth(self, prompt: list[int]) -> int:
        """Blocks of the prompt up to the first that no tier holds."""
        return max((end for _, _, _, end, _ in self._match(prompt)), default=0)

    def _match(self, prompt: list[int]) -> list[Any]:
        hashes = self._index.hash_blocks(array("I", prompt), B, MODEL_NAME, "", [])
        return list(self._index.match(hashes))


def indexed(worker: RealWorker, prompt: list[int], start: int = 0) -> dict[Tier, int]:
    """Blocks of the prompt per tier, as an index finds them that starts just now and replays what was said since `start`."""
    listener = Listener()
    for message in replay(worker.replay, start):
        listener.hear(message)
    return listener.tiers(prompt)


def held_up_to(worker: RealWorker, prompt: list[int], start: int) -> list[int]:
    """After each message since `start`: blocks of the prompt up to the first that no tier holds."""
    listener, depths = Listener(), []
    for message in replay(worker.replay, start):
        listener.hear(message)
        depths.append(listener.depth(prompt))
    return depths


def announced_removals(worker: RealWorker) -> int:
    return sum(len(event["block_hashes"]) for event in removed(events(worker), "STORAGE"))


def metric(worker: RealWorker, name: str, label: str = "") -> float:
    rows = worker.metrics().items()
    return sum(value for full, value in rows if full.startswith(name + "{") and label in full)
