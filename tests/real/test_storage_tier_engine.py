# SPDX-License-Identifier: Apache-2.0
"""PointsmanStorageTier in real engines: blocks that RAM lost come back from the directory, after a restart as well.

The model's greedy text depends on every byte of its KV cache, so equal text and the engine's own count of tokens from
disk together say that the right bytes came back.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from indexer.identity import Tier

from .adapters import load_adapter, unload_adapter, write_adapter
from .asking import B, Workers, assert_heads, cached, complete, heads, text
from .engine import RealWorker
from .events import next_seq, removed, replay, stored, wait_for_events
from .imports import Version
from .prompts import token_ids
from .storage_engine import (
    STORE_BYTES,
    announced_removals,
    events,
    files,
    from_disk,
    held_up_to,
    indexed,
    metric,
    push_out,
    said,
    store,
    storing,
    wait_until,
)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: tmp_path_factory.mktemp(f"store-{name}"))


@pytest.fixture
def root(roots: Callable[[str], Path], vllm_version: Version) -> Path:
    return roots(vllm_version)


@pytest.fixture
def worker(real_workers: Workers, vllm_version: Version, root: Path) -> RealWorker:
    (one,) = real_workers(storing(root, vllm_version))
    return one


def test_what_hbm_and_ram_lost_comes_back_from_the_directory(worker: RealWorker) -> None:
    prompt = token_ids(20 * B + 5)
    cold = store(worker, prompt).text
    goes_on = heads(worker, prompt)
    push_out(worker)
    before = from_disk(worker)
    again = complete(worker, prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 20 * B
    assert text(again) == cold
    worker.wait_for_source("disk", before + 20 * B)
    assert_heads(worker, prompt, goes_on)


def test_a_promotion_is_announced_with_its_tokens_and_parents(worker: RealWorker) -> None:
    prompt = token_ids(4 * B + 1)
    hashes = store(worker, prompt).hashes
    push_out(worker)
    start = next_seq(worker.replay)
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


def test_a_salted_prompt_finds_nothing_of_another_salt(worker: RealWorker) -> None:
    prompt = token_ids(6 * B + 1)
    cold = store(worker, prompt, cache_salt="blue")
    push_out(worker)
    before = from_disk(worker)
    for salt in ({"cache_salt": "red"}, {}):
        other = store(worker, prompt, **salt)
        assert (other.cached, other.text) == (0, cold.text)
        assert set(other.hashes).isdisjoint(cold.hashes)
    assert from_disk(worker) == before
    push_out(worker)
    assert (
        complete(worker, prompt, cache_salt="blue")["usage"]["prompt_tokens_details"]["cached_tokens"]
        == 6 * B
    )


def test_an_adapter_that_is_reloaded_under_its_name_finds_no_block_of_its_former_weights(
    worker: RealWorker, tmp_path: Path
) -> None:
    folder, prompt = tmp_path / "adapter", token_ids(6 * B + 1)
    model: dict[str, Any] = {"model": "tuned"}
    write_adapter(folder, worker.model_dir, seed=1)
    load_adapter(worker, "tuned", folder)
    first = store(worker, prompt, **model)
    assert cached(worker, prompt, **model) == 6 * B, "HBM has them"

    write_adapter(folder, worker.model_dir, seed=2)
    between = complete(worker, prompt, **model)
    assert between["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, (
        "which weights compute is not known"
    )
    start = next_seq(worker.replay)
    load_adapter(worker, "tuned", folder, in_place=True)
    second = store(worker, prompt, **model)
    assert (second.cached, second.text != first.text) == (0, True)
    # Whoever follows the events stops counting on them at once, not when they are evicted.
    wait_for_events(
        worker.replay,
        start,
        lambda heard: {h for e in removed(heard, "GPU") for h in e["block_hashes"]} >= set(first.hashes),
    )
    unload_adapter(worker, "tuned")
    write_adapter(folder, worker.model_dir, seed=3)
    load_adapter(worker, "tuned", folder)
    third = store(worker, prompt, **model)
    assert third.cached == 0
    assert len({first.text, second.text, third.text, text(complete(worker, prompt))}) == 4

    push_out(worker)
    before = from_disk(worker)
    assert cached(worker, prompt, **model) == 6 * B
    worker.wait_for_source("disk", before + 6 * B)
    unload_adapter(worker, "tuned")


def test_capacity_is_kept_and_every_eviction_is_announced(worker: RealWorker, root: Path) -> None:
    # Files that were found damaged are announced as removed too, and are no evictions.
    others = announced_removals(worker) - metric(worker, "vllm:pointsman_storage_evictions_total")
    for _ in range(12):
        push_out(worker, rounds=1)
        size = sum(path.stat().st_size for path in root.glob("*/*/*"))
        assert size <= STORE_BYTES
    wait_until(lambda: said(worker) == files(root), "events that tell what is there")
    assert {event["locality"] for event in removed(events(worker), "STORAGE")} == {"REMOTE"}
    wait_until(
        lambda: (
            0
            < metric(worker, "vllm:pointsman_storage_evictions_total")
            == announced_removals(worker) - others
        ),
        "as many evictions counted as announced",
    )
    wait_until(
        lambda: metric(worker, "vllm:pointsman_storage_files") == len(files(root)), "the count of files"
    )
    assert metric(worker, "vllm:pointsman_storage_bytes") <= STORE_BYTES


def test_an_index_that_hears_the_events_finds_the_prompt_on_storage(worker: RealWorker) -> None:
    prompt = token_ids(8 * B)
    store(worker, prompt)
    push_out(worker)
    wait_until(lambda: indexed(worker, prompt) == {Tier.STORAGE: 8}, "the prompt on storage alone")


def test_a_block_is_never_unknown_while_it_sinks_from_hbm_to_ram_to_disk(worker: RealWorker) -> None:
    prompt, start = token_ids(20 * B + 5), next_seq(worker.replay)
    complete(worker, prompt)
    complete(worker, token_ids(30 * B + 1))  # at once, so that HBM evicts as early as it may
    push_out(worker)
    wait_until(lambda: indexed(worker, prompt, start) == {Tier.STORAGE: 20}, "the prompt on storage alone")
    depths = held_up_to(worker, prompt, start)
    assert set(depths[depths.index(20) :]) == {20}


def test_a_listener_that_missed_the_stores_finds_the_prompt_again_once_it_is_used(worker: RealWorker) -> None:
    prompt = token_ids(8 * B)
    kept = store(worker, prompt)
    push_out(worker)
    start = next_seq(worker.replay)

    def told_again() -> set[bytes]:
        complete(
            worker, token_ids(3), max_tokens=1
        )  # an engine with nothing to do takes no steps, and says nothing
        heard = [event for message in replay(worker.replay, start) for event in message.events]
        return {block for event in stored(heard, "STORAGE") for block in event["block_hashes"]}

    wait_until(lambda: told_again() >= set(kept.hashes), "a report of what is there")
    complete(worker, prompt + token_ids(1))
    push_out(worker)
    wait_until(lambda: indexed(worker, prompt, start) == {Tier.STORAGE: 8}, "the prompt on storage alone")


@pytest.mark.parametrize("lost", ["the prompt", "everything"])
def test_files_that_are_gone_cost_a_recomputation_and_are_not_believed_in_any_more(
    worker: RealWorker, root: Path, lost: str
) -> None:
    prompt = token_ids(6 * B + 1)
    kept = store(worker, prompt)
    push_out(worker)
    wait_until(lambda: indexed(worker, prompt) == {Tier.STORAGE: 6}, "the prompt on storage alone")
    for folder in root.iterdir() if lost == "everything" else ():
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    for name in kept.hashes if lost == "the prompt" else ():
        (path,) = root.glob(f"*/*/{name.hex()}*")
        path.unlink()
    again = complete(worker, prompt, kv_transfer_params={"max_offload_tokens": 0})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert text(again) == kept.text
    wait_until(lambda: indexed(worker, prompt) == {Tier.HBM: 6}, "removals of what is gone")
    push_out(worker)


def test_a_restarted_worker_serves_from_the_directory_and_reports_it_before_its_first_request(
    worker: RealWorker, root: Path
) -> None:
    prompt = token_ids(20 * B + 5)
    cold = store(worker, prompt).text
    worker.stop()
    left = files(root)
    worker.start_again()
    wait_until(lambda: said(worker) == left, "a report of all that is there")
    again = complete(worker, prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 20 * B
    assert text(again) == cold
    worker.wait_for_source("disk", 20 * B)
    push_out(worker)
    # The GPU's events of the reload identify them.
    wait_until(lambda: indexed(worker, prompt[: 20 * B]) == {Tier.STORAGE: 20}, "the prompt on storage alone")


def test_a_file_damaged_on_disk_is_computed_again(worker: RealWorker, root: Path) -> None:
    prompt = token_ids(6 * B + 1)
    cold = store(worker, prompt)
    push_out(worker)
    (path,) = root.glob(f"*/*/{cold.hashes[3].hex()}*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    again = complete(worker, prompt)
    assert text(again) == cold.text
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] <= 5 * B
    wait_until(
        lambda: metric(worker, "vllm:pointsman_storage_errors_total", 'kind="defective"') >= 1,
        "the count of damaged files",
    )
