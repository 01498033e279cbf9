# SPDX-License-Identifier: Apache-2.0
"""Engines that pull from each other in virtual time: shared links, pending blocks, failures, prefill elsewhere."""

from __future__ import annotations

import msgspec
import pytest

from engine_ext.sim.hashing import chain_hashes, root_hash
from engine_ext.sim.output import SimMetrics
from engine_ext.sim.profile import SimProfile, load_profile
from engine_ext.sim.request import Moved, Tier

PROFILE = load_profile("default")


def profile(**changes: float) -> SimProfile:
    return msgspec.structs.replace(PROFILE, **changes)


def role(host: str, name: str = "k") -> dict[str, object]:
    return {"kv_request_id": name, "remote_host": host, "remote_port": 1}


def source(host: str, name: str = "k") -> dict[str, object]:
    return {"remote_kv_source": role(host, name)}


def wire_s(tokens: int, bytes_per_s: float) -> float:
    return tokens * PROFILE.kv_bytes_per_token / bytes_per_s


def metrics(one, engine: str) -> SimMetrics:
    return one.engines[engine].metrics()


def held(one, engine: str, tokens: int) -> list[bool]:
    return one.engines[engine].held_in_ram(chain_hashes(range(tokens), 4, root_hash()))


def cached(one, name: str, tier: Tier) -> int:
    return one.finished[name].usage.cached_by_tier[tier]


def test_two_pulls_from_one_source_share_its_link(fleet) -> None:
    one = fleet("abc")
    one.submit("a", "cold", range(240))
    one.run()
    begun_s = one.now_s
    for engine in "bc":
        one.submit(engine, engine, range(240), kv_transfer_params=source("a"))
    one.run()
    pull_s = PROFILE.peer_connect_s + PROFILE.peer_lookup_s + 2 * wire_s(240, PROFILE.peer_bytes_per_s)
    load_s = PROFILE.ram_latency_s + wire_s(240, PROFILE.ram_load_bytes_per_s)
    step_s = PROFILE.step_base_s + PROFILE.prefill_s(1, 239)
    for engine in "bc":
        assert one.first_token_s[engine] - begun_s == pytest.approx(pull_s + load_s + step_s)
        assert cached(one, engine, Tier.PEER) == 240


def test_pulls_over_different_links_do_not_disturb_each_other(fleet) -> None:
    one = fleet("abcd")
    one.submit("a", "cold", range(240))
    one.submit("b", "other", range(1000, 1240))
    one.run()
    begun_s = one.now_s
    one.submit("c", "one", range(240), kv_transfer_params=source("a"))
    one.submit("d", "two", range(1000, 1240), kv_transfer_params=source("b"))
    one.run()
    pull_s = PROFILE.peer_connect_s + PROFILE.peer_lookup_s + wire_s(240, PROFILE.peer_bytes_per_s)
    load_s = PROFILE.ram_latency_s + wire_s(240, PROFILE.ram_load_bytes_per_s)
    step_s = PROFILE.step_base_s + PROFILE.prefill_s(1, 239)
    assert one.first_token_s["one"] - begun_s == pytest.approx(pull_s + load_s + step_s)
    assert one.first_token_s["two"] - begun_s == pytest.approx(pull_s + load_s + step_s)


def test_loads_from_ram_share_the_link_into_hbm(fleet) -> None:
    slow = profile(ram_load_bytes_per_s=1e8)
    one = fleet("a", profile=slow, hbm_blocks=33)
    for start in (0, 100, 200, 300):
        one.submit("a", f"cold{start}", range(start, start + 60))
        one.run()
    begun_s = one.now_s
    for start in (0, 100):
        one.submit("a", f"warm{start}", range(start, start + 60))
    one.run()
    both_s = 2 * wire_s(60, 1e8) + slow.ram_latency_s
    for start in (0, 100):
        assert cached(one, f"warm{start}", Tier.RAM) == 60
        assert one.first_token_s[f"warm{start}"] - begun_s == pytest.approx(both_s, rel=0.2)
    assert one.first_token_s["warm100"] - begun_s > both_s


def test_a_lookup_of_blocks_that_are_being_written_is_answered_when_they_are(fleet) -> None:
    store_s = 1.0
    one = fleet(profile=profile(ram_store_bytes_per_s=40 * PROFILE.kv_bytes_per_token / store_s))
    one.submit("a", "cold", range(40))
    one.run(0.1)
    assert held(one, "a", 40) == [False] * 10
    moved = Moved()
    one.submit("b", "warm", range(40), kv_transfer_params=source("a"), moved=moved)
    one.run()
    assert cached(one, "warm", Tier.PEER) == 40
    assert one.first_token_s["warm"] > store_s
    assert moved.lookups == 1
    assert moved.lookup_s == pytest.approx(store_s - 0.1, abs=0.05)
    assert moved.peer_bytes == moved.ram_load_bytes == 40 * PROFILE.kv_bytes_per_token
    assert moved.promotion_s == pytest.approx(wire_s(40, PROFILE.ram_load_bytes_per_s), abs=0.001)


def test_a_lookup_waits_for_a_write_only_so_long(fleet) -> None:
    one = fleet(profile=profile(ram_store_bytes_per_s=1.0))
    one.submit("a", "cold", range(40))
    one.run(0.1)
    one.submit("b", "warm", range(40), kv_transfer_params=source("a"))
    one.run(50.0)
    assert one.first_token_s["warm"] == pytest.approx(0.1 + PROFILE.peer_pending_s, abs=0.1)
    assert one.finished["warm"].usage.cached_tokens == 0


def test_a_pull_that_breaks_is_computed_instead(fleet) -> None:
    one = fleet("ab", profile=profile(peer_bytes_per_s=40 * PROFILE.kv_bytes_per_token))
    one.submit("a", "cold", range(40))
    one.run()
    begun_s, moved = one.now_s, Moved()
    one.submit("b", "warm", range(40), kv_transfer_params=source("a"), moved=moved)
    one.run(begun_s + 0.2)
    one.submit("b", "waits", range(40), max_tokens=3)  # finds the blocks on their way, and waits for them
    one.run(begun_s + 0.5)
    assert metrics(one, "b").waiting == 2
    one.network.cut("a", one.now_s)
    one.run()
    for name in ("warm", "waits"):
        assert one.first_token_s[name] - begun_s == pytest.approx(0.5, abs=0.1)
    assert one.finished["warm"].usage.cached_tokens == 0
    assert metrics(one, "b").counters.failed_pulls == 1
    assert (moved.peer_bytes, moved.ram_load_bytes) == (0, 0)
    assert held(one, "b", 40) == [True] * 10, "stored from HBM, not left as half written"


def test_a_pull_that_takes_too_long_is_given_up(fleet) -> None:
    one = fleet(profile=profile(peer_bytes_per_s=PROFILE.kv_bytes_per_token / 10))
    one.submit("a", "cold", range(40))
    one.run()
    begun_s = one.now_s
    one.submit("b", "warm", range(40), kv_transfer_params=source("a"))
    one.run()
    assert one.first_token_s["warm"] - begun_s == pytest.approx(PROFILE.peer_timeout_s, abs=0.2)
    assert one.finished["warm"].usage.cached_tokens == 0
    assert one.network.next_s is None


def split(one, prompt_tokens: int, *, decode_first: bool = False, name: str = "k") -> None:
    """A prefill at a and its decode at b."""
    prefill = {"remote_decoder": {"kv_request_id": name}}
    decode = {"remote_prefiller": role("a", name)}
    legs = [("a", f"p{name}", 1, prefill), ("b", f"d{name}", 5, decode)]
    for engine, request, max_tokens, params in reversed(legs) if decode_first else legs:
        one.submit(engine, request, range(prompt_tokens), max_tokens, kv_transfer_params=params)


@pytest.mark.parametrize("decode_first", [False, True])
@pytest.mark.parametrize("length", [40, 43])
def test_a_decode_waits_for_its_prefill_elsewhere_and_pulls_all_of_it(
    fleet, length: int, decode_first: bool
) -> None:
    one = fleet()
    split(one, length, decode_first=decode_first)
    one.run()
    assert cached(one, "dk", Tier.PEER) == 40
    assert one.first_token_s["dk"] > one.first_token_s["pk"]
    assert metrics(one, "b").counters.peer_lookups == 0
    alone = fleet("c")
    alone.submit("c", "whole", range(length), 5)
    alone.run()
    assert one.finished["dk"].usage.completion_tokens == alone.finished["whole"].usage.completion_tokens


def test_blocks_of_a_prefill_travel_while_it_goes_on(fleet) -> None:
    tokens, chunks = 2000, 10
    # The wire takes as long as the prefill, so pulling only at the end would double the time.
    prefill_s = chunks * (PROFILE.step_base_s + PROFILE.prefill_s(tokens // chunks, tokens // 2))
    slow = profile(peer_bytes_per_s=tokens * PROFILE.kv_bytes_per_token / prefill_s)
    one = fleet(profile=slow, hbm_blocks=1000, max_num_batched_tokens=tokens // chunks)
    split(one, tokens)
    one.run()
    assert cached(one, "dk", Tier.PEER) == tokens
    after_s = one.first_token_s["dk"] - one.first_token_s["pk"]
    assert after_s < 0.4 * prefill_s


def test_a_prefill_that_never_comes_is_given_up(fleet) -> None:
    one = fleet()
    one.submit("b", "d", range(40), kv_transfer_params={"remote_prefiller": role("a")})
    other = {"remote_decoder": {"kv_request_id": "another"}}
    one.submit("a", "p", range(40), kv_transfer_params=other)
    one.run()
    # The source has the blocks by chance, but is not asked which it has.
    assert one.first_token_s["d"] < 1
    one = fleet()
    one.submit("b", "d", range(40), kv_transfer_params={"remote_prefiller": role("a")})
    one.run()
    assert one.first_token_s["d"] == pytest.approx(PROFILE.peer_timeout_s, abs=0.1)
    assert one.finished["d"].usage.cached_tokens == 0


def test_what_an_aborted_prefill_has_not_stored_is_computed_at_once(fleet) -> None:
    one = fleet(hbm_blocks=1000, max_num_batched_tokens=400)
    split(one, 2000)
    one.run(0.06)
    one.engines["a"].abort("pk", one.now_s)
    one.run()
    assert one.first_token_s["dk"] < 1
    assert 0 < cached(one, "dk", Tier.PEER) < 2000


def test_a_silent_prefiller_costs_the_timeout(fleet) -> None:
    one = fleet()
    one.silent.add("a")
    split(one, 40)
    one.run()
    assert one.first_token_s["dk"] == pytest.approx(PROFILE.peer_timeout_s, abs=0.1)


def test_what_a_prefill_stored_stays_until_its_decoder_comes(fleet) -> None:
    for params, kept in (({"remote_decoder": {"kv_request_id": "k"}}, True), (None, False)):
        one = fleet("ab", ram_blocks=20)
        one.submit("a", "p", range(40), kv_transfer_params=params)
        one.run(1.0)
        for start in range(1000, 1500, 100):
            one.submit("a", f"other{start}", range(start, start + 40))
            one.run(one.now_s + 1)
        assert held(one, "a", 40) == [kept] * 10
        if kept:
            one.submit("b", "d", range(40), kv_transfer_params={"remote_prefiller": role("a")})
            one.run(one.now_s + 1)
            assert cached(one, "d", Tier.PEER) == 40
            for start in range(2000, 2500, 100):
                one.submit("a", f"late{start}", range(start, start + 40))
                one.run(one.now_s + 1)
            assert held(one, "a", 40) == [False] * 10


def test_what_no_decoder_fetches_is_let_go_in_time(fleet) -> None:
    one = fleet("ab", ram_blocks=20)
    one.submit("a", "p", range(40), kv_transfer_params={"remote_decoder": {"kv_request_id": "k"}})
    one.run(PROFILE.peer_parked_s + 1)
    for start in range(1000, 1500, 100):
        one.submit("a", f"other{start}", range(start, start + 40))
        one.run(one.now_s + 1)
    assert held(one, "a", 40) == [False] * 10


def test_a_prefill_may_pull_what_it_passes_on(fleet) -> None:
    one = fleet("abc")
    one.submit("c", "cold", range(40))
    one.run()
    params = {"remote_decoder": {"kv_request_id": "k"}, "remote_kv_source": role("c", "other")}
    one.submit("a", "p", range(60), kv_transfer_params=params)
    one.submit("b", "d", range(60), kv_transfer_params={"remote_prefiller": role("a")})
    one.run()
    assert cached(one, "p", Tier.PEER) == 40
    assert cached(one, "d", Tier.PEER) == 60
