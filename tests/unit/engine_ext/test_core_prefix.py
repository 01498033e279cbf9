# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from engine_ext.sim.errors import PromptTooLongError
from engine_ext.sim.events import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from engine_ext.sim.hashing import chain_hashes, root_hash
from engine_ext.sim.request import Tier
from engine_ext.sim.text import OutputText


@pytest.mark.parametrize(
    ("length", "cached"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_a_repeated_prompt_hits_whole_blocks_up_to_its_last_token_but_one(
    drive, length: int, cached: int
) -> None:
    one = drive()
    assert one.complete(range(length)).usage.cached_tokens == 0
    again = one.complete(range(length)).usage
    assert again.cached_tokens == cached
    assert again.cached_by_tier == {Tier.HBM: cached, Tier.RAM: 0, Tier.PEER: 0, Tier.STORAGE: 0}
    assert again.prompt_tokens == length


def test_generated_blocks_are_found_by_the_next_turn(drive) -> None:
    one = drive()
    name = one.submit(range(6), max_tokens=7)
    one.run()
    # 6 + 7 tokens; the last one is sampled but never computed, so three blocks of four are full.
    turn = [*range(6), *one.token_ids[name], 99, 98]
    assert one.complete(turn).usage.cached_tokens == 12


def test_only_a_prefix_from_the_start_matches(drive) -> None:
    one = drive()
    one.complete([*range(8), 50])
    assert one.complete([*range(4, 8), *range(4), 50]).usage.cached_tokens == 0
    assert one.complete([*range(4), 7, 7, 7, 7, 50]).usage.cached_tokens == 4


def test_salt_and_adapter_keep_equal_prompts_apart(drive) -> None:
    one = drive()
    prompt = list(range(9))
    one.complete(prompt)
    for keys in ({"extra_keys": ("s1",)}, {"lora_name": "a1"}, {"lora_name": "a1", "extra_keys": ("s1",)}):
        assert one.complete(prompt, **keys).usage.cached_tokens == 0
        assert one.complete(prompt, **keys).usage.cached_tokens == 8
    assert one.complete(prompt).usage.cached_tokens == 8


def test_extra_keys_carry_the_adapter_on_every_block_and_the_salt_on_the_first(drive) -> None:
    one = drive()
    one.complete(range(8), lora_name="a1", lora_id=3, extra_keys=("s1",))
    stored = one.events()[0]
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == (("a1", "s1"), ("a1",))
    assert (stored.lora_name, stored.lora_id) == ("a1", 3)


def test_a_prompt_is_announced_once_and_decode_announces_each_block_it_fills(drive) -> None:
    one = drive()
    name = one.submit(range(10), max_tokens=8)
    one.run()
    stored = one.events()
    hashes = chain_hashes([*range(10), *one.token_ids[name]], 4, root_hash())
    assert [event.block_hashes for event in stored] == [tuple(hashes[:2]), (hashes[2],), (hashes[3],)]
    assert [event.parent for event in stored] == [None, hashes[1], hashes[2]]
    assert stored[0].token_ids.tolist() == list(range(8))
    assert stored[1].token_ids.tolist() == [8, 9, *one.token_ids[name][:2]]
    one.complete(range(10), max_tokens=1)
    assert one.events() == []  # a fully cached repeat announces nothing


def test_eviction_removes_the_tail_of_the_oldest_request_first_one_block_an_event(drive) -> None:
    one = drive(hbm_blocks=8)  # seven usable
    one.complete(range(12), max_tokens=1)
    one.complete(range(100, 112), max_tokens=1)
    one.events()
    one.complete(range(200, 212), max_tokens=1)
    hashes = chain_hashes(range(12), 4, root_hash())
    removed = [event for event in one.events() if isinstance(event, BlockRemoved)]
    assert removed == [BlockRemoved((h,), Medium.GPU) for h in (hashes[2], hashes[1])]
    assert one.complete(range(12), max_tokens=1).usage.cached_tokens == 4


def test_a_long_prompt_is_prefilled_in_chunks_of_the_token_budget(drive) -> None:
    one = drive(max_num_batched_tokens=10)
    one.submit(range(25), max_tokens=1)
    one.run()
    stored = [event for event in one.events() if isinstance(event, BlockStored)]
    assert [len(event.block_hashes) for event in stored] == [2, 3, 1]
    assert one.engine.metrics().counters.steps == 3


def test_decoding_goes_on_beside_a_chunked_prefill(drive) -> None:
    one = drive(max_num_batched_tokens=8)
    short = one.submit([1, 2, 3], max_tokens=6)
    one.step()
    one.submit(range(50, 90), max_tokens=1)
    one.run()
    # 40 prompt tokens at 7 a step take six steps; the short request ends within them.
    assert one.engine.metrics().counters.steps <= 8
    assert len(one.token_ids[short]) == 6


def test_prefill_time_follows_the_profile(drive) -> None:
    one = drive(hbm_blocks=2000, max_num_batched_tokens=4096)
    name = one.submit(range(4000), max_tokens=1)
    one.run()
    profile = one.engine.profile
    assert one.first_token_s[name] == pytest.approx(profile.step_base_s + profile.prefill_s(4000, 0))


def test_requests_beyond_max_num_seqs_wait(drive) -> None:
    one = drive(max_num_seqs=2)
    for start in range(3):
        one.submit(range(start * 10, start * 10 + 5), max_tokens=4)
    one.step()
    assert (one.engine.metrics().running, one.engine.metrics().waiting) == (2, 1)
    one.run()
    assert len(one.finished) == 3


def test_a_request_waits_until_its_whole_prompt_fits(drive) -> None:
    one = drive(hbm_blocks=9)
    one.submit(range(20), max_tokens=8)
    late = one.submit(range(100, 116), max_tokens=1)
    one.step()
    assert one.engine.metrics().waiting == 1
    one.run()
    assert late in one.finished


def test_preempted_requests_end_with_the_same_text_and_the_cached_tokens_of_their_first_start(drive) -> None:
    one = drive(hbm_blocks=9)
    names = [one.submit(range(start, start + 10), max_tokens=20) for start in (0, 100)]
    one.run()
    assert one.engine.metrics().counters.preemptions > 0
    for name, start in zip(names, (0, 100), strict=True):
        text = OutputText(chain_input(start))
        assert one.token_ids[name] == [text.token(i) for i in range(20)]
        assert one.finished[name].usage.cached_tokens == 0
    assert one.engine.metrics().kv_cache_usage == 0


def chain_input(start: int):
    from array import array

    return array("I", range(start, start + 10))


def test_abort_frees_the_blocks_of_a_waiting_and_of_a_running_request(drive) -> None:
    one = drive(hbm_blocks=9)
    running = one.submit(range(20), max_tokens=8)
    waiting = one.submit(range(100, 120), max_tokens=1)
    one.step()
    one.engine.abort(waiting, one.now_s)
    one.engine.abort(running, one.now_s)
    one.run()
    assert one.finished == {}
    metrics = one.engine.metrics()
    assert (metrics.running, metrics.waiting, metrics.kv_cache_usage) == (0, 0, 0)
    assert metrics.counters.aborted_requests == 2
    one.engine.abort(running, one.now_s)  # unknown by now
    assert one.complete(range(20)).usage.cached_tokens == 16  # what it computed stays cached


def test_reset_is_refused_while_a_request_runs_and_is_announced_with_the_next_step(drive) -> None:
    one = drive()
    one.submit(range(9), max_tokens=3)
    one.step()
    assert not one.engine.reset_prefix_cache(one.now_s)
    one.run()
    one.events()
    assert one.engine.reset_prefix_cache(one.now_s)
    assert one.engine.next_event_s() is None
    assert one.engine.held_blocks() == []
    assert one.complete(range(9), max_tokens=1).usage.cached_tokens == 0
    (batch,) = one.batches
    assert isinstance(batch[0], AllBlocksCleared)
    assert isinstance(batch[1], BlockStored)


def test_a_sleeping_engine_holds_nothing_and_answers_after_waking(drive) -> None:
    one = drive()
    one.complete(range(9))
    assert one.engine.sleep(one.now_s)
    name = one.submit(range(9))
    one.run()
    assert name not in one.finished
    assert one.engine.metrics().asleep
    one.engine.wake_up(one.now_s)
    one.run()
    assert one.finished[name].usage.cached_tokens == 0


def test_requests_that_cannot_run_are_refused(drive) -> None:
    one = drive(hbm_blocks=5)  # sixteen tokens
    with pytest.raises(PromptTooLongError, match="16 tokens"):
        one.submit(range(16))
    with pytest.raises(ValueError, match="at least one"):
        one.submit([])
    name = one.submit(range(15), max_tokens=50)
    one.run()
    assert one.finished[name].usage.completion_tokens == 1  # the context is full


def test_the_model_stops_by_itself_where_it_is_told_to(drive) -> None:
    one = drive()
    finished = one.complete(range(5), max_tokens=10, stop_after_tokens=3)
    assert (finished.reason, finished.usage.completion_tokens) == ("stop", 3)
    assert one.complete(range(5), max_tokens=2).reason == "length"
