# SPDX-License-Identifier: Apache-2.0
"""Event streams recorded from real vLLM: both backends read all of them, alike, and find the prompts behind them."""

from __future__ import annotations

import base64
import gzip
from array import array
from pathlib import Path
from typing import Any

import kv_batches as kv
import msgspec
import pytest

from indexer.hashing import HashKey
from indexer.identity import Tier
from indexer.index import Backend, IndexLimits, PrefixIndex, open_index

FOLDER = Path(__file__).parent / "kv_events"
BLOCK_SIZE_TOKENS = 32
NAMES = sorted(
    path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz") if ".requests." not in path.name
)
WITH_REQUESTS = [name for name in NAMES if (FOLDER / f"{name}.requests.jsonl.gz").exists()]
FAULTS = (
    "malformed_batches",
    "malformed_events",
    "unknown_events",
    "unknown_medium_events",
    "sparse_events",
    "evicted",
    "conflicts",
    "dropped_waiting",
)


def lines(name: str) -> list[Any]:
    with gzip.open(FOLDER / f"{name}.jsonl.gz") as file:
        return [msgspec.json.decode(line) for line in file]


def payloads(name: str) -> list[bytes]:
    return [
        base64.b64decode(line["payload"])
        if isinstance(line["payload"], str)
        else msgspec.msgpack.encode(with_bytes(line["payload"]))
        for line in lines(name)
    ]


def with_bytes(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("hex:"):
        return bytes.fromhex(value[4:])
    if isinstance(value, list):
        return [with_bytes(one) for one in value]
    if isinstance(value, dict):
        return {key: with_bytes(one) for key, one in value.items()}
    return value


def filled(name: str, backend: Backend = "native") -> tuple[PrefixIndex, int, int, dict[str, int]]:
    """(index, slot of the worker, slot of its store, sums of what the batches did)."""
    index = open_index(HashKey(kv.KEY_BYTES), IndexLimits(), backend)
    slot, store = index.open("tiny", False), index.open("tiny", False)
    totals = dict.fromkeys((*FAULTS, "detached", "unidentified", "stored"), 0)
    for payload in payloads(name):
        counts = index.apply([slot], 0, store, payload)
        for key in totals:
            totals[key] += counts.malformed_batch if key == "malformed_batches" else getattr(counts, key)
    return index, slot, store, totals


def held(index: PrefixIndex, slot: int, tokens: list[int], salt: str | None) -> dict[Tier, int]:
    hashes = index.hash_blocks(array("I", tokens), BLOCK_SIZE_TOKENS, "tiny", "", [salt] if salt else [])
    found = dict.fromkeys(Tier, 0)
    for owner, tier, start, end, _ in index.match(hashes):
        if owner == slot:
            found[Tier(tier)] += end - start
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_stream_is_read_without_a_fault(name: str) -> None:
    index, slot, _, totals = filled(name)
    assert {key: totals[key] for key in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert totals["stored"] > 0
    assert index.check() == ""
    counts = index.counts(slot)
    assert (counts.detached, counts.block_size) == (0, BLOCK_SIZE_TOKENS)


@pytest.mark.parametrize("name", NAMES)
def test_both_backends_hold_the_same_after_a_recorded_stream(name: str) -> None:
    native, slot, store, native_totals = filled(name, "native")
    reference, _, _, reference_totals = filled(name, "reference")
    assert native_totals == reference_totals
    for one in (slot, store):
        assert sorted(native.blocks(one)) == sorted(reference.blocks(one))


@pytest.mark.parametrize("name", WITH_REQUESTS)
def test_last_prompt_is_found_where_the_engine_keeps_it(name: str) -> None:
    index, slot, _, _ = filled(name)
    last = lines(f"{name}.requests")[-1]
    found = held(index, slot, last["prompt"], last["salt"])
    assert found[Tier.HBM] == len(last["prompt"]) // BLOCK_SIZE_TOKENS
    if name.startswith(("chunked_described", "p2p")):
        assert found[Tier.RAM] > 0


@pytest.mark.parametrize("name", WITH_REQUESTS)
def test_another_salt_finds_nothing(name: str) -> None:
    index, slot, _, _ = filled(name)
    for request in lines(f"{name}.requests"):
        salt = "of somebody else" if request["salt"] is None else None
        others = [r["prompt"] for r in lines(f"{name}.requests") if r["salt"] == salt]
        if not any(other[:BLOCK_SIZE_TOKENS] == request["prompt"][:BLOCK_SIZE_TOKENS] for other in others):
            assert sum(held(index, slot, request["prompt"], salt).values()) == 0


def test_kind_of_engine_hash_makes_no_difference_to_what_is_found() -> None:
    prompts = [(r["prompt"], r["salt"]) for r in lines("salted_int_hash.requests")]
    assert prompts == [(r["prompt"], r["salt"]) for r in lines("salted_bytes_hash.requests")]
    by_int, by_bytes = filled("salted_int_hash"), filled("salted_bytes_hash")
    assert sorted(by_int[0].blocks(by_int[1])) == sorted(by_bytes[0].blocks(by_bytes[1]))
