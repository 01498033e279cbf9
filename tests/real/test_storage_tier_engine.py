# SPDX-License-Identifier: Apache-2.0
"""PointsmanStorageTier in real engines: blocks that RAM lost come back from the directory, after a restart as well.

The model's greedy text depends on every byte of its KV cache, so equal text and the engine's own count of tokens from
disk together say that the right bytes came back.
"""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from indexer.hashing import HashKey
from indexer.identity import Tier
from indexer.index import IndexLimits, open_index

from .asking import B, Workers, complete, text
from .engine import MODEL_NAME, RealWorker, WorkerConfig
from .events import removed, replay, stored, wait_for_events
from .imports import Version
from .launch import Extension
from .prompts import token_ids

HBM_BLOCKS = 39
BLOCK_BYTES = 1 << 13
"""Of the small model, in a row of the host region."""
RAM_BYTES = 40 * BLOCK_BYTES
STORE_BLOCKS = 300
STORE_BYTES = STORE_BLOCKS * (64 + BLOCK_BYTES)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: tmp_path_factory.mktemp(f"store-{name}"))


@pytest.fixture
def root(roots: Callable[[str], Path], vllm_version: Version) -> Path:
    return roots(vllm_version)


@pytest.fixture
def worker(real_workers: Workers, vllm_version: Version, root: Path) -> RealWorker:
    tier = {
        "type": "PointsmanStorageTier",
        "module_path": "engine_ext.vllm.tier",
        "root_dir": str(root),
        "capacity_bytes": STORE_BYTES,
        "locality": "REMOTE",
    }
    config = WorkerConfig(
        extension=Extension(tiers=(tier,), cpu_bytes=RAM_BYTES),
        gpu_blocks=HBM_BLOCKS + 1,
        max_model_len_tokens=1024,
        byte_hashes=True,
        vllm=vllm_version,
    )
    (one,) = real_workers(config)
    return one


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


def hashes_of(worker: RealWorker, prompt: list[int]) -> list[bytes]:
    """The engine's hashes of a prompt's blocks, as it published them for HBM."""
    by_tokens = {}
    for event in stored(events(worker), "GPU"):
        for i, block in enumerate(event["block_hashes"]):
            by_tokens[tuple(event["token_ids"][i * B : (i + 1) * B])] = block
    return [by_tokens[tuple(prompt[i : i + B])] for i in range(0, len(prompt) // B * B, B)]


def store(worker: RealWorker, root: Path, prompt: list[int], **more: Any) -> str:
    """Runs a prompt and returns its text once the files of all its blocks are there."""
    answer = text(complete(worker, prompt, **more))
    wanted = set(hashes_of(worker, prompt))
    deadline = time.monotonic() + 20
    while not wanted <= files(root):
        assert time.monotonic() < deadline, "not every block was stored"
        time.sleep(0.02)
    return answer


def push_out(worker: RealWorker, root: Path, rounds: int = 2) -> None:
    """Fills HBM and RAM with other blocks."""
    for _ in range(rounds):
        store(worker, root, token_ids(30 * B + 1))


def from_disk(worker: RealWorker) -> float:
    return worker.tokens_by_source().get("disk", 0.0)


def test_what_hbm_and_ram_lost_comes_back_from_the_directory(worker: RealWorker, root: Path) -> None:
    prompt = token_ids(20 * B + 5)
    cold = store(worker, root, prompt)
    push_out(worker, root)
    before = from_disk(worker)
    again = complete(worker, prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 20 * B
    assert text(again) == cold
    worker.wait_for_source("disk", before + 20 * B)


def test_a_promotion_is_announced_with_its_tokens_and_parents(worker: RealWorker, root: Path) -> None:
    prompt = token_ids(4 * B + 1)
    store(worker, root, prompt)
    hashes = hashes_of(worker, prompt)
    push_out(worker, root)
    start = replay(worker.replay)[-1].seq + 1
    complete(worker, prompt)
    heard = wait_for_events(
        worker.replay,
        start,
        lambda heard: {h for e in stored(heard, "CPU") for h in e["block_hashes"]} >= set(hashes),
    )
    promoted = {e["block_hashes"][0]: e for e in stored(heard, "CPU")}
    for i, block in enumerate(hashes):
        assert promoted[block]["token_ids"] == prompt[i * B : (i + 1) * B]
        assert promoted[block].get("parent_block_hash") == (hashes[i - 1] if i else None)


def test_a_salted_prompt_finds_nothing_of_another_salt(worker: RealWorker, root: Path) -> None:
    prompt = token_ids(6 * B + 1)
    cold = store(worker, root, prompt, cache_salt="blue")
    push_out(worker, root)
    before = from_disk(worker)
    for salt in ({"cache_salt": "red"}, {}):
        other = complete(worker, prompt, **salt)
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert text(other) == cold
    assert from_disk(worker) == before
    push_out(worker, root)
    assert (
        complete(worker, prompt, cache_salt="blue")["usage"]["prompt_tokens_details"]["cached_tokens"]
        == 6 * B
    )


def test_capacity_is_kept_and_every_eviction_is_announced(worker: RealWorker, root: Path) -> None:
    # Files that were found damaged are announced as removed too, and are no evictions.
    others = _announced_removals(worker) - _metric(worker, "vllm:pointsman_storage_evictions_total")
    for _ in range(12):
        push_out(worker, root, rounds=1)
        size = sum(path.stat().st_size for path in root.glob("*/*/*"))
        assert size <= STORE_BYTES
    wait_for_events(worker.replay, 0, lambda heard: bool(removed(heard, "STORAGE")))
    complete(worker, token_ids(3))
    assert said(worker) == files(root)
    evictions = _metric(worker, "vllm:pointsman_storage_evictions_total")
    assert evictions == _announced_removals(worker) - others
    assert {event["locality"] for event in removed(events(worker), "STORAGE")} == {"REMOTE"}
    assert _metric(worker, "vllm:pointsman_storage_bytes") <= STORE_BYTES
    assert _metric(worker, "vllm:pointsman_storage_files") == len(files(root))


def test_an_index_that_hears_the_events_finds_the_prompt_on_storage(worker: RealWorker, root: Path) -> None:
    prompt = token_ids(8 * B)
    store(worker, root, prompt)
    push_out(worker, root)
    assert _indexed(worker, prompt) == {Tier.STORAGE: 8}


def test_a_restarted_worker_serves_from_the_directory_and_reports_it_before_its_first_request(
    worker: RealWorker, root: Path
) -> None:
    prompt = token_ids(20 * B + 5)
    cold = store(worker, root, prompt)
    worker.stop()
    left = files(root)
    worker.start_again()
    heard = _eventually(lambda: _reported(worker, len(left)))
    assert {h for event in stored(heard, "STORAGE") for h in event["block_hashes"]} == left
    again = complete(worker, prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 20 * B
    assert text(again) == cold
    worker.wait_for_source("disk", 20 * B)
    push_out(worker, root)
    assert _indexed(worker, prompt[: 20 * B]) == {Tier.STORAGE: 20}, (
        "the GPU's events of the reload identify them"
    )


def test_a_file_damaged_on_disk_is_computed_again(worker: RealWorker, root: Path) -> None:
    prompt = token_ids(6 * B + 1)
    cold = store(worker, root, prompt)
    bad = hashes_of(worker, prompt)[3].hex()
    push_out(worker, root)
    (path,) = root.glob(f"*/*/{bad}*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    again = complete(worker, prompt)
    assert text(again) == cold
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] <= 5 * B
    assert _metric(worker, "vllm:pointsman_storage_errors_total", 'kind="defective"') >= 1


def _eventually(look: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 30
    while not (seen := look()):
        assert time.monotonic() < deadline, "no full report"
        time.sleep(0.25)
    return seen


def _reported(worker: RealWorker, blocks: int) -> list[dict[str, Any]]:
    """All events, once so many blocks are among those of storage."""
    heard = events(worker)
    return heard if sum(len(event["block_hashes"]) for event in stored(heard, "STORAGE")) >= blocks else []


def _indexed(worker: RealWorker, prompt: list[int]) -> dict[Tier, int]:
    """Blocks of the prompt per tier, as an index that was started just now and replays the worker's events finds them."""
    index = open_index(HashKey(bytes(16)), IndexLimits())
    slot, shared = index.open(MODEL_NAME, False), index.open(MODEL_NAME, False)
    for message in replay(worker.replay):
        index.apply([slot], 0, shared, message.payload)
    hashes = index.hash_blocks(array("I", prompt), B, MODEL_NAME, "", [])
    return {Tier(tier): end for _, tier, begin, end, _ in index.match(hashes) if begin == 0}


def _announced_removals(worker: RealWorker) -> int:
    return sum(len(event["block_hashes"]) for event in removed(events(worker), "STORAGE"))


def _metric(worker: RealWorker, name: str, label: str = "") -> float:
    rows = worker.metrics().items()
    return sum(value for full, value in rows if full.startswith(name + "{") and label in full)
