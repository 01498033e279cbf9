# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections import Counter

import pytest

from engine_ext.sim.core import SimEngine
from engine_ext.sim.errors import KvRequestIdInUseError
from engine_ext.sim.events import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from engine_ext.sim.hashing import chain_hashes, root_hash
from engine_ext.sim.request import Tier
from engine_ext.sim.tiers import StorageTier


def source(port: int = 1, name: str = "k1") -> dict[str, object]:
    return {"remote_kv_source": {"kv_request_id": name, "remote_host": "peer", "remote_port": port}}


def push_out(one, prompts: int = 20) -> None:
    """Fill HBM with other prompts."""
    for start in range(1000, 1000 + prompts * 100, 100):
        one.complete(range(start, start + 60), max_tokens=1)


def test_prompt_blocks_are_offloaded_as_placeholders_one_event_a_block(drive) -> None:
    one = drive(ram_blocks=100)
    one.complete(range(10), max_tokens=8)
    hashes = chain_hashes(range(10), 4, root_hash())
    stored = [
        event for event in one.events() if isinstance(event, BlockStored) and event.medium is Medium.CPU
    ]
    assert [event.block_hashes for event in stored] == [(hashes[0],), (hashes[1],)]
    for event in stored:
        assert (event.parent, event.block_size_tokens, event.token_ids.tolist()) == (None, 0, [])
        assert (event.extra_keys, event.spec_kind) == (None, None)


def test_self_describing_stores_carry_tokens_and_parent_but_no_extra_keys(drive) -> None:
    one = drive(ram_blocks=100, self_describing_events=True)
    one.complete(range(8), max_tokens=1, extra_keys=("salt",))
    hashes = chain_hashes(range(8), 4, root_hash(), salt=("salt",))
    stored = [
        event for event in one.events() if isinstance(event, BlockStored) and event.medium is Medium.CPU
    ]
    assert [(event.block_hashes, event.parent) for event in stored] == [
        ((hashes[0],), None),
        ((hashes[1],), hashes[0]),
    ]
    assert [event.token_ids.tolist() for event in stored] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(event.extra_keys is None and event.block_size_tokens == 4 for event in stored)


def test_generated_blocks_are_offloaded_only_when_asked_for(drive) -> None:
    for prompt_only, blocks in ((True, 2), (False, 4)):
        one = drive(ram_blocks=100, offload_prompt_only=prompt_only)
        one.complete(range(8), max_tokens=9)  # the last token is never computed: four full blocks
        assert one.engine.metrics().ram_blocks == blocks


@pytest.mark.parametrize(("length", "cached"), [(7, 4), (8, 8), (9, 8), (12, 12), (13, 12)])
def test_a_prompt_evicted_from_hbm_comes_back_from_ram_and_may_be_whole(
    drive, length: int, cached: int
) -> None:
    one = drive(ram_blocks=1000)
    cold = one.submit(range(length))
    one.run()
    push_out(one)
    warm = one.submit(range(length))
    one.run()
    assert one.finished[warm].usage.cached_by_tier[Tier.RAM] == cached
    assert one.finished[warm].usage.cached_tokens == cached
    assert one.token_ids[warm] == one.token_ids[cold]
    assert one.engine.metrics().cached_by_source["host"] == cached


def test_hbm_first_then_ram_for_the_rest(drive) -> None:
    one = drive(ram_blocks=1000)
    one.complete(range(20), max_tokens=1)
    push_out(one)
    one.complete(range(9), max_tokens=1)  # brings the first two blocks back into HBM
    usage = one.complete(range(20), max_tokens=1).usage
    assert (usage.cached_by_tier[Tier.HBM], usage.cached_by_tier[Tier.RAM]) == (8, 12)


def test_a_load_takes_the_time_of_its_bytes_and_no_place_in_the_batch(drive) -> None:
    one = drive(ram_blocks=1000, max_num_seqs=1)
    one.complete(range(40), max_tokens=1)
    push_out(one)
    profile, start_s = one.engine.profile, one.now_s
    loading = one.submit(range(40), max_tokens=1)
    other = one.submit(range(500, 505), max_tokens=1)
    one.step()
    assert one.engine.metrics().waiting == 1
    one.run()
    assert one.first_token_s[other] < one.first_token_s[loading]
    load_s = profile.ram_latency_s + 10 * 4 * profile.kv_bytes_per_token / profile.ram_load_bytes_per_s
    ready_s = max(start_s + load_s, one.first_token_s[other])
    step_s = profile.step_base_s + profile.prefill_s(1, 39)
    assert one.first_token_s[loading] == pytest.approx(ready_s + step_s)


def test_ram_evicts_the_least_recently_used_prompt_in_one_event(drive) -> None:
    one = drive(ram_blocks=6)
    for start in (0, 100, 200):
        one.complete(range(start, start + 12), max_tokens=1)
    removed = [e for e in one.events() if isinstance(e, BlockRemoved) and e.medium is Medium.CPU]
    first = chain_hashes(range(12), 4, root_hash())
    assert removed == [BlockRemoved((first[2], first[1], first[0]), Medium.CPU)]
    assert one.engine.held_in_ram(first) == [False] * 3


def test_max_load_tokens_and_max_offload_tokens_are_rounded_down_to_blocks(drive) -> None:
    one = drive(ram_blocks=1000)
    one.complete(range(20), max_tokens=1)
    push_out(one)
    for cap, cached in ((0, 0), (3, 0), (11, 8)):
        two = drive(ram_blocks=1000)
        two.complete(range(20), max_tokens=1)
        push_out(two)
        usage = two.complete(range(20), max_tokens=1, kv_transfer_params={"max_load_tokens": cap}).usage
        assert usage.cached_by_tier[Tier.RAM] == cached
    three = drive(ram_blocks=1000)
    three.complete(range(20), max_tokens=1, kv_transfer_params={"max_offload_tokens": 9})
    assert three.engine.metrics().ram_blocks == 2


def pair(drive, **options: object):
    """A holder at peer:1 and a puller that knows it."""
    holder, puller = drive(ram_blocks=1000), drive(ram_blocks=1000, **options)
    puller.peers["peer", 1] = holder.engine
    return holder, puller


@pytest.mark.parametrize(("length", "cached"), [(7, 4), (8, 8), (9, 8)])
def test_a_pull_from_a_peer_counts_as_peer_and_gives_the_same_text(drive, length: int, cached: int) -> None:
    holder, puller = pair(drive)
    cold = holder.submit(range(length))
    holder.run()
    warm = puller.submit(range(length), kv_transfer_params=source())
    puller.run()
    usage = puller.finished[warm].usage
    assert usage.cached_by_tier == {Tier.HBM: 0, Tier.RAM: 0, Tier.PEER: cached, Tier.STORAGE: 0}
    assert puller.token_ids[warm] == holder.token_ids[cold]
    assert puller.engine.metrics().cached_by_source["p2p"] == cached
    hashes = chain_hashes(range(length), 4, root_hash())
    assert puller.engine.held_in_ram(hashes) == [True] * len(hashes)


def test_a_pull_costs_lookup_wire_and_promotion(drive) -> None:
    holder, puller = pair(drive)
    holder.complete(range(40), max_tokens=1)
    profile = puller.engine.profile
    size_bytes = 10 * 4 * profile.kv_bytes_per_token
    pull_s = profile.peer_lookup_s + size_bytes / profile.peer_bytes_per_s
    load_s = profile.ram_latency_s + size_bytes / profile.ram_load_bytes_per_s
    step_s = profile.step_base_s + profile.prefill_s(1, 39)
    first = puller.submit(range(40), max_tokens=1, kv_transfer_params=source())
    puller.run()
    assert puller.first_token_s[first] == pytest.approx(profile.peer_connect_s + pull_s + load_s + step_s)


def test_pulls_share_the_link_of_their_source(drive) -> None:
    holder = drive(ram_blocks=1000)
    holder.complete(range(240), max_tokens=1)
    arrivals = []
    for _ in range(3):
        puller = drive(ram_blocks=1000)
        puller.peers["peer", 1] = holder.engine
        puller.now_s = holder.now_s
        name = puller.submit(range(240), max_tokens=1, kv_transfer_params=source())
        puller.run()
        arrivals.append(puller.first_token_s[name])
    wire_s = 240 * puller.engine.profile.kv_bytes_per_token / puller.engine.profile.peer_bytes_per_s
    assert arrivals[1] - arrivals[0] == pytest.approx(wire_s)
    assert arrivals[2] - arrivals[1] == pytest.approx(wire_s)


def test_a_peer_serves_from_ram_only(drive) -> None:
    puller = drive(ram_blocks=1000)
    holder = drive()  # has it in HBM, and no RAM tier
    puller.peers["peer", 1] = holder.engine
    holder.complete(range(20))
    usage = puller.complete(range(20), kv_transfer_params=source()).usage
    assert usage.cached_tokens == 0


def test_a_peer_that_holds_a_part_gives_that_part(drive) -> None:
    holder, puller = pair(drive)
    holder.complete(range(8), max_tokens=1)
    assert puller.complete(range(20), kv_transfer_params=source()).usage.cached_by_tier[Tier.PEER] == 8


def test_a_dead_peer_costs_the_timeout_and_nothing_else(drive) -> None:
    puller = drive(ram_blocks=1000)
    name = puller.submit(range(20), kv_transfer_params=source())
    other = puller.submit(range(500, 520))
    puller.run()
    assert puller.first_token_s[other] < 1
    assert puller.first_token_s[name] == pytest.approx(puller.engine.profile.peer_timeout_s, abs=0.1)
    assert puller.finished[name].usage.cached_tokens == 0
    assert puller.engine.metrics().counters.peer_timeouts == 1


def test_a_silent_peer_is_given_up_after_the_timeout(drive) -> None:
    puller = drive(ram_blocks=1000)
    name = puller.submit(range(20), kv_transfer_params=source())
    engine: SimEngine = puller.engine
    outputs = []
    while (due_s := engine.next_event_s()) is not None:
        outputs.append((due_s, engine.advance(due_s)))  # lookups are left without an answer
    ends = [due_s for due_s, out in outputs for end in out.finished if end.request_id == name]
    assert ends[0] == pytest.approx(engine.profile.peer_timeout_s, abs=0.1)


def test_naming_oneself_stalls_for_the_timeout_without_asking_anybody(drive) -> None:
    one = drive(ram_blocks=1000, p2p_address=("peer", 1))
    name = one.submit(range(20), kv_transfer_params=source())
    one.run()
    assert one.lookups == []
    assert one.first_token_s[name] >= one.engine.profile.peer_timeout_s


def test_two_live_requests_cannot_share_a_kv_request_id(drive) -> None:
    one = drive(ram_blocks=100)
    first = one.submit(range(8), kv_transfer_params=source())
    with pytest.raises(KvRequestIdInUseError, match="k1"):
        one.submit(range(8), kv_transfer_params=source())
    one.engine.abort(first, one.now_s)
    one.submit(range(8), kv_transfer_params=source())  # free again


def test_an_idle_engine_with_an_answered_lookup_has_no_event_left(drive) -> None:
    holder, puller = pair(drive)
    holder.complete(range(8))
    puller.complete(range(8), kv_transfer_params=source())
    assert puller.engine.next_event_s() is None
    assert puller.now_s < 1


@pytest.mark.parametrize(
    ("tiers", "peer", "storage"),
    [(None, 8, 0), ([], 0, 0), ([{"medium": "STORAGE"}], 8, 0), ([{"medium": "CPU"}], 8, 0)],
)
def test_only_an_empty_tier_list_keeps_the_peer_out(drive, tiers: object, peer: int, storage: int) -> None:
    holder, puller = pair(drive)
    holder.complete(range(9))
    params = source() if tiers is None else {**source(), "kv_load_tiers": tiers}
    usage = puller.complete(range(9), kv_transfer_params=params).usage
    assert (usage.cached_by_tier[Tier.PEER], usage.cached_by_tier[Tier.STORAGE]) == (peer, storage)


def test_storage_outlives_ram_and_can_be_left_out(drive) -> None:
    shared = StorageTier()
    writer, reader = drive(shared, ram_blocks=1000), drive(shared, ram_blocks=1000)
    writer.complete(range(20), max_tokens=1)
    on_disk = [e for e in writer.events() if isinstance(e, BlockStored) and e.medium is Medium.STORAGE]
    assert len(on_disk) == 5
    for tiers in ([], [{"medium": "CPU"}]):
        fresh = drive(shared, ram_blocks=1000)
        assert fresh.complete(range(20), kv_transfer_params={"kv_load_tiers": tiers}).usage.cached_tokens == 0
    usage = reader.complete(range(20), max_tokens=1).usage
    assert usage.cached_by_tier == {Tier.HBM: 0, Tier.RAM: 0, Tier.PEER: 0, Tier.STORAGE: 20}
    assert reader.engine.metrics().cached_by_source["disk"] == 20


def test_ram_that_is_full_of_pinned_blocks_makes_a_pull_a_miss(drive) -> None:
    holder, puller = pair(drive)
    tight = drive(ram_blocks=2)
    tight.peers["peer", 1] = holder.engine
    holder.complete(range(20), max_tokens=1)
    usage = tight.complete(range(20), max_tokens=1, kv_transfer_params=source()).usage
    assert usage.cached_by_tier[Tier.PEER] == 8
    assert puller.finished == {}


def test_aborting_a_request_while_it_loads_frees_its_blocks_when_the_load_is_over(drive) -> None:
    one = drive(ram_blocks=1000)
    one.complete(range(40), max_tokens=1)
    push_out(one)
    name = one.submit(range(40))
    one.step()
    assert one.engine.metrics().kv_cache_usage > 0
    one.engine.abort(name, one.now_s)
    one.run()
    assert one.engine.metrics().kv_cache_usage == 0
    assert name not in one.finished
    assert one.complete(range(40), max_tokens=1).usage.cached_tokens == 40


def test_two_requests_for_one_evicted_prompt_load_it_once(drive) -> None:
    one = drive(ram_blocks=1000)
    one.complete(range(40), max_tokens=1)
    push_out(one)
    names = [one.submit(range(40), max_tokens=1) for _ in range(2)]
    one.run()
    tiers = [one.finished[name].usage.cached_by_tier for name in names]
    assert tiers[0][Tier.RAM] == 40
    assert (tiers[1][Tier.HBM], tiers[1][Tier.RAM]) == (36, 4)


def test_the_events_alone_tell_what_every_tier_holds(drive) -> None:
    rng = random.Random(7)
    shared = StorageTier()
    holder = drive(ram_blocks=60)
    one = drive(shared, hbm_blocks=40, ram_blocks=30, max_num_batched_tokens=24, offload_prompt_only=False)
    one.peers["peer", 1] = holder.engine
    trunks = [[rng.randrange(50) for _ in range(rng.randrange(4, 60))] for _ in range(8)]
    for trunk in trunks:
        holder.complete(trunk, max_tokens=1)
    hbm: Counter[bytes] = Counter()
    ram: set[bytes] = set()
    for turn in range(400):
        trunk = rng.choice(trunks)
        params = source(name=f"k{turn}") if rng.random() < 0.3 else None
        prompt = [*trunk[: rng.randrange(1, len(trunk) + 1)], rng.randrange(50)]
        name = one.submit(prompt, rng.randrange(1, 30), kv_transfer_params=params)
        for _ in range(rng.randrange(12)):
            one.step()
        if rng.random() < 0.1:
            one.engine.abort(name, one.now_s)
        if rng.random() < 0.02:
            one.run()
            assert one.engine.reset_prefix_cache(one.now_s)
    one.run()
    if one.engine.next_event_s() is None:
        one.complete([51, 51], max_tokens=1)  # flushes a pending clear
    for event in one.events():
        if isinstance(event, AllBlocksCleared):
            hbm.clear()
        elif isinstance(event, BlockStored):
            if event.medium is Medium.GPU:
                hbm.update(event.block_hashes)
            elif event.medium is Medium.CPU:
                ram.update(event.block_hashes)
        elif event.medium is Medium.GPU:
            hbm.subtract(event.block_hashes)
        else:
            ram.difference_update(event.block_hashes)
    held = one.engine.held_blocks()
    assert {b.block_hash: b.hbm_copies for b in held if b.hbm_copies} == {h: n for h, n in hbm.items() if n}
    assert {b.block_hash for b in held if b.in_ram} == ram
    counters = one.engine.metrics().counters
    assert min(counters.preemptions, counters.peer_lookups, *counters.cached_by_tier.values()) > 0
    assert one.engine.metrics().kv_cache_usage == 0
    for block in held:
        parent = block.parent or one.engine.root
        assert chain_hashes(block.token_ids, 4, parent) == [block.block_hash]
