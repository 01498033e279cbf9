# SPDX-License-Identifier: Apache-2.0
"""Recorded streams of further kinds: the prompts behind them are found by what makes them different, and only by that."""

from __future__ import annotations

import base64
import gzip
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kv_batches as kv
import msgspec
import pytest

from indexer.hashing import HashKey, canonical_extra_keys, namespace_root, next_hash
from indexer.identity import Tier
from indexer.index import Backend, IndexLimits, PrefixIndex, open_index

FOLDER = Path(__file__).parent / "kv_events" / "kinds"
KEY = HashKey(kv.KEY_BYTES)
MODEL = "tiny"
SIZE = 32
ADAPTER = "a1"
FAULTS = (
    "malformed_events",
    "unknown_events",
    "unknown_medium_events",
    "conflicts",
    "dropped_waiting",
    "detached",
)
NAMES = sorted(
    p.name.removesuffix(".jsonl.gz") for p in FOLDER.glob("*.jsonl.gz") if ".requests." not in p.name
)


def lines(name: str) -> list[Any]:
    with gzip.open(FOLDER / f"{name}.jsonl.gz") as file:
        return [msgspec.json.decode(line) for line in file]


def payloads(name: str) -> Iterator[bytes]:
    for line in lines(name):
        yield base64.b64decode(line["payload"])


def events(name: str) -> Iterator[Any]:
    for payload in payloads(name):
        yield from msgspec.msgpack.decode(payload)[1]


class Filled:
    """An index with one worker whose ranks have these streams."""

    def __init__(self, backend: Backend, *streams: str) -> None:
        self.index: PrefixIndex = open_index(KEY, IndexLimits(), backend)
        self.ranks = [self.index.open(MODEL, False) for _ in streams]
        self.store = self.index.open(MODEL, False)
        self.totals = dict.fromkeys((*FAULTS, "sparse_events", "stored"), 0)
        for rank, name in enumerate(streams):
            for payload in payloads(name):
                counts = self.index.apply(self.ranks, rank, self.store, payload)
                assert not counts.malformed_batch
                for key in self.totals:
                    self.totals[key] += getattr(counts, key)
        assert self.index.check() == ""

    def held(
        self, tokens: Sequence[int], *, lora: str | None = None, salt: str | None = None, rank: int = 0
    ) -> int:
        """Leading blocks in the HBM of a rank."""
        keys = [salt] if salt else []
        return self.of(self.index.hash_blocks(array("I", tokens), SIZE, MODEL, lora or "", keys), rank)

    def of(self, hashes: bytes, rank: int = 0) -> int:
        runs = [run for run in self.index.match(hashes) if run[:3] == (self.ranks[rank], Tier.HBM, 0)]
        return runs[0][3] if runs else 0


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_is_read_without_a_fault(name: str, backend: Backend) -> None:
    filled = Filled(backend, name)
    assert {key: filled.totals[key] for key in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert filled.totals["stored"] > 0


@pytest.mark.parametrize("stream", ["adapter", "array_0_20"])
def test_prompts_of_base_model_and_adapter_are_found_under_their_names_in_both_encodings(
    stream: str, backend: Backend
) -> None:
    filled = Filled(backend, stream)
    for request in lines(f"{stream}.requests"):
        prompt, lora, salt = request["prompt"], request.get("lora"), request["salt"]
        assert filled.held(prompt, lora=lora, salt=salt) == len(prompt) // SIZE
        assert filled.held(prompt, lora=lora, salt="of somebody else") == 0
    (only_adapter,) = {
        tuple(r["prompt"]) for r in lines(f"{stream}.requests") if len(r["prompt"]) == 2 * SIZE + 1
    }
    assert filled.held(only_adapter, lora=ADAPTER) == 2
    assert (filled.held(only_adapter), filled.held(only_adapter, lora="another")) == (0, 0)


def test_events_that_know_an_adapter_by_number_only_never_count_for_the_base_model(backend: Backend) -> None:
    assert all(isinstance(event, list) for event in events("array_0_11"))
    filled = Filled(backend, "array_0_11")
    for request in lines("array_0_11.requests"):
        prompt = request["prompt"]
        if request.get("lora") is None and request["salt"] is None:
            assert filled.held(prompt) == len(prompt) // SIZE
        elif request.get("lora") is not None:
            assert filled.held(prompt, lora=ADAPTER) == 0
    only_adapter = next(r["prompt"] for r in lines("array_0_11.requests") if len(r["prompt"]) == 2 * SIZE + 1)
    assert filled.held(only_adapter) == 0


def test_prompts_are_found_on_the_rank_that_computed_them(backend: Backend) -> None:
    filled = Filled(backend, "two_ranks_0", "two_ranks_1")
    for rank in (0, 1):
        for request in lines(f"two_ranks_{rank}.requests"):
            prompt = request["prompt"]
            assert request["dp_rank"] == rank
            assert filled.held(prompt, rank=rank) == len(prompt) // SIZE
            # Three prompts begin alike, two of them on rank 1 and one on rank 0.
            shared = 3 if len(prompt) == 4 * SIZE + 2 else 0
            assert filled.held(prompt, rank=1 - rank) == shared


def test_a_batch_goes_to_the_rank_that_it_names(backend: Backend) -> None:
    """The engine's batches name their rank, so they may come over any socket of the worker."""
    index = open_index(KEY, IndexLimits(), backend)
    ranks, store = [index.open(MODEL, False) for _ in range(2)], index.open(MODEL, False)
    for payload in payloads("two_ranks_1"):
        index.apply(ranks, 0, store, payload)
    assert (index.counts(ranks[0]).hbm, index.counts(ranks[1]).hbm > 0) == (0, True)


def test_of_a_hybrid_model_only_full_attention_is_held(backend: Backend) -> None:
    filled = Filled(backend, "hybrid")
    expected: set[int] = set()
    for event in events("hybrid"):
        if event["type"] == "BlockStored" and event["kv_cache_spec_kind"] == "full_attention":
            expected |= set(event["block_hashes"])
        elif event["type"] == "BlockRemoved" and event["group_idx"] == 1:
            expected -= set(event["block_hashes"])
    sliding = [e for e in events("hybrid") if e.get("kv_cache_spec_kind") == "sliding_window"]
    assert any(len(event["token_ids"]) > SIZE * len(event["block_hashes"]) for event in sliding)
    assert filled.totals["sparse_events"] == len(sliding) > 0
    assert filled.index.counts(filled.ranks[0]).hbm == len(expected) > 0
    newest = lines("hybrid.requests")[-2]["prompt"]
    assert filled.held(newest) == len(newest) // SIZE


def image_hashes(prompt: Sequence[int], images: Sequence[Any], salt: str | None) -> bytes:
    """The chain as an engine's extra keys make it: adapter, then images with their offsets, then the salt."""
    value, hashes = namespace_root(KEY, MODEL, ""), []
    for i in range(len(prompt) // SIZE):
        start, end = i * SIZE, (i + 1) * SIZE
        keys: list[Any] = [
            [name, offset - start]
            for name, offset, length in images
            if offset < end and offset + length > start
        ]
        keys += [salt] if salt and i == 0 else []
        value = next_hash(KEY, value, prompt[start:end], canonical_extra_keys(keys))
        hashes.append(value)
    return array("Q", hashes).tobytes()


def test_prompts_with_images_are_found_with_their_own_images_only(backend: Backend) -> None:
    filled = Filled(backend, "images")
    for request in lines("images.requests"):
        prompt, images, salt = request["prompt"], request["images"], request["salt"]
        assert filled.of(image_hashes(prompt, images, salt)) == len(prompt) // SIZE
        if images:
            before_image = min(offset for _, offset, _ in images) // SIZE
            other = [["of nobody", offset, length] for _, offset, length in images]
            assert filled.of(image_hashes(prompt, other, salt)) == before_image
            # What a request is hashed to without its images: it matches up to the first of them.
            assert filled.held(prompt, salt=salt) == before_image


def test_a_prompt_is_found_whatever_follows_its_blocks(backend: Backend) -> None:
    """With lookahead an engine may hold a block several times, by what follows it; to a prompt it is one block."""
    assert any(event.get("lookahead_token_ids") for event in events("lookahead"))
    filled = Filled(backend, "lookahead")
    requests = lines("lookahead.requests")
    for request in requests[:3]:
        prompt = request["prompt"]
        assert filled.held(prompt) == len(prompt) // SIZE - (len(prompt) % SIZE == 0)
    held = filled.index.blocks(filled.ranks[0])
    assert len(held) > len({value for value, _ in held})
