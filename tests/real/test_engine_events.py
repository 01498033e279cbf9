# SPDX-License-Identifier: Apache-2.0
"""What the product takes for granted about vLLM's KV events. Asked of vLLM itself; no product code is involved.

If one of these fails after an upgrade of the engine, the place that relies on it is wrong as well.
"""

from __future__ import annotations

import msgspec
import zmq

from .asking import B, Pair, complete, compute, forget_hbm
from .events import events_since, next_seq, removed, replay, stored, wait_for_events
from .prompts import token_ids


def test_a_stored_block_carries_everything_that_identifies_it(real_pair: Pair) -> None:
    worker = real_pair[0]
    prompt = token_ids(2 * B + 5)
    start = next_seq(worker.replay)
    complete(worker, prompt, max_tokens=B, cache_salt="salt")
    events = wait_for_events(worker.replay, start, lambda events: len(stored(events, "GPU")) == 2)
    first, second = stored(events, "GPU")
    assert first["token_ids"] == prompt[: 2 * B]
    assert first["parent_block_hash"] is None
    assert first["block_size"] == B
    assert first["extra_keys"] == [["salt"], None], "the salt is an extra key of the first block only"
    assert first["lora_id"] is None
    assert first["lora_name"] is None
    assert first["group_idx"] == 0
    assert first["kv_cache_spec_kind"] == "full_attention"
    assert len(first["block_hashes"]) == 2
    assert all(0 <= h < 2**64 for h in first["block_hashes"])
    assert second["parent_block_hash"] == first["block_hashes"][1], "decoding chains on to the prompt"
    assert second["token_ids"][:5] == prompt[2 * B :]


def test_a_batch_is_an_array_of_time_events_and_rank_and_its_events_are_maps(real_pair: Pair) -> None:
    worker = real_pair[0]
    start = next_seq(worker.replay)
    compute(worker, token_ids(B + 1))
    (message,) = replay(worker.replay, start)
    time_s, events, rank = msgspec.msgpack.decode(message.payload)
    assert isinstance(time_s, float)
    assert events[-1]["type"] == "BlockStored"
    assert rank == 0


def test_two_workers_give_the_same_block_the_same_hash(real_pair: Pair) -> None:
    prompt = token_ids(2 * B)
    (first,), (second,) = (compute(worker, prompt) for worker in real_pair)
    assert first["block_hashes"] == second["block_hashes"]


def test_a_repeat_that_hits_in_hbm_emits_nothing(real_pair: Pair) -> None:
    worker = real_pair[0]
    prompt = token_ids(2 * B + 1)
    compute(worker, prompt)
    start = next_seq(worker.replay)
    complete(worker, prompt)
    compute(worker, other := token_ids(B))
    assert [e["token_ids"] for e in stored(list(events_since(worker.replay, start)), "GPU")] == [other]


def test_eviction_removes_block_by_block_the_tail_of_the_oldest_first(real_pair: Pair) -> None:
    worker = real_pair[0]
    forget_hbm(worker)
    start = next_seq(worker.replay)
    oldest = token_ids(4 * B)
    complete(worker, oldest)
    for _ in range(8):
        complete(worker, token_ids(32 * B), max_tokens=1)
    events = wait_for_events(worker.replay, start, lambda events: len(removed(events, "GPU")) >= 5)
    (mine,) = [e["block_hashes"] for e in stored(events, "GPU") if e["token_ids"] == oldest]
    assert [e["block_hashes"] for e in removed(events, "GPU")[:4]] == [[h] for h in reversed(mine)]


def test_a_reset_is_announced_with_the_next_request(real_pair: Pair) -> None:
    worker = real_pair[0]
    compute(worker, token_ids(B))
    start = next_seq(worker.replay)
    forget_hbm(worker)
    assert list(events_since(worker.replay, start)) == []
    complete(worker, token_ids(B))
    events = wait_for_events(worker.replay, start, lambda events: len(events) >= 2)
    assert events[0] == {"type": "AllBlocksCleared"}
    assert events[1]["type"] == "BlockStored"


def test_replay_returns_the_published_bytes_from_the_asked_sequence_on(real_pair: Pair) -> None:
    worker = real_pair[0]
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.rcvtimeo = 500
        subscriber.subscribe("kv@")
        subscriber.connect(worker.events)
        live = []
        for _ in range(40):  # a publisher drops what it sends before it has seen the subscription
            complete(worker, token_ids(B))
            try:
                live.append(subscriber.recv_multipart())
            except zmq.Again:
                continue
            if len(live) == 3:
                break
    assert len(live) == 3
    topic, first, _ = live[0]
    start = int.from_bytes(first, "big")
    again = replay(worker.replay, start)
    assert [m.seq for m in again] == list(range(start, start + len(again)))
    assert [(m.topic.encode(), m.seq.to_bytes(8, "big"), m.payload) for m in again][:3] == [
        tuple(m) for m in live
    ]
    assert topic.decode() == worker.topic


def test_replay_from_beyond_the_end_is_empty(real_pair: Pair) -> None:
    worker = real_pair[0]
    complete(worker, token_ids(B))
    assert replay(worker.replay, next_seq(worker.replay) + 5) == []
