# SPDX-License-Identifier: Apache-2.0
"""Engines with our extension pull one prompt from several others, by the ranges of the plan."""

from __future__ import annotations

import pytest

from engine_ext.sim.profile import load_profile
from engine_ext.sim.request import PeerSource, Tier, parse_transfer_params

PROFILE = load_profile("default")
TOKENS = 240


def pull(host: str, start: int, end: int, deadline_ms: int = 60_000) -> dict[str, object]:
    return {
        "source": f"{host}:1",
        "kind": "pointsman",
        "start_token": start,
        "end_token": end,
        "deadline_ms": deadline_ms,
    }


def plan(*pulls: dict[str, object]) -> dict[str, object]:
    return {"pointsman": {"version": 1, "plan_id": "p", "pulls": list(pulls)}}


def wire_s(tokens: int) -> float:
    return tokens * PROFILE.kv_bytes_per_token / PROFILE.peer_bytes_per_s


def warmed(fleet, *holders: tuple[str, int], **options):
    """A fleet of four of which some hold the beginning of the prompt."""
    one = fleet("abcd", extension=True, **options)
    for engine, tokens in holders:
        one.submit(engine, f"cold-{engine}", range(tokens))
        one.run()
    return one


def pulled(one, name: str) -> int:
    return one.finished[name].usage.cached_by_tier[Tier.PEER]


def test_each_source_brings_its_range(fleet) -> None:
    one = warmed(fleet, ("a", 80), ("b", TOKENS))
    one.submit("c", "warm", range(TOKENS), kv_transfer_params=plan(pull("a", 0, 80), pull("b", 80, TOKENS)))
    one.run()
    assert pulled(one, "warm") == TOKENS
    assert one.engines["c"].metrics().counters.peer_lookups == 2


def test_two_busy_links_bring_a_prompt_in_the_time_of_its_halves(fleet) -> None:
    """Each source sends as much to somebody else; alone it would take as long as both together."""

    def took_s(*pulls: dict[str, object]) -> float:
        one = fleet("abcdef", extension=True)
        for engine in "ab":
            one.submit(engine, f"cold-{engine}", range(TOKENS))
            one.submit(engine, f"other-{engine}", range(5000, 5000 + TOKENS))
            one.run()
        begun_s = one.now_s
        for engine, holder in (("e", "a"), ("f", "b")):
            others = plan(pull(holder, 0, TOKENS))
            one.submit(engine, f"busy-{holder}", range(5000, 5000 + TOKENS), kv_transfer_params=others)
        one.submit("c", "warm", range(TOKENS), kv_transfer_params=plan(*pulls))
        one.run()
        assert pulled(one, "warm") == TOKENS
        return one.first_token_s["warm"] - begun_s

    alone_s = took_s(pull("a", 0, TOKENS))
    both_s = took_s(pull("a", 0, TOKENS // 2), pull("b", TOKENS // 2, TOKENS))
    # Its link is shared by two; half of the bytes come over each of two such links.
    assert alone_s - both_s == pytest.approx(wire_s(TOKENS), rel=0.05)


def test_what_one_source_lacks_ends_the_prefix_there(fleet) -> None:
    one = warmed(fleet, ("a", 40), ("b", TOKENS))
    one.submit("c", "warm", range(TOKENS), kv_transfer_params=plan(pull("a", 0, 80), pull("b", 80, TOKENS)))
    one.run()
    assert pulled(one, "warm") == 40


def test_nothing_is_asked_of_a_source_outside_its_range(fleet) -> None:
    one = warmed(fleet, ("a", TOKENS))
    one.submit("c", "warm", range(TOKENS), kv_transfer_params=plan(pull("a", 0, 42)))
    one.run()
    assert pulled(one, "warm") == 40, "ranges are rounded inwards to blocks"


def test_a_source_that_says_nothing_is_waited_for_no_longer_than_its_deadline(fleet) -> None:
    one = fleet("ab", extension=True)
    one.silent.add("a")
    one.submit("b", "cold", range(TOKENS), kv_transfer_params=plan(pull("a", 0, TOKENS, 300)))
    one.run()
    assert pulled(one, "cold") == 0
    assert one.first_token_s["cold"] == pytest.approx(0.3 + PROFILE.prefill_s(TOKENS, 0), abs=0.1)


def test_a_pull_that_takes_longer_than_its_deadline_is_a_miss(fleet) -> None:
    one = warmed(fleet, ("a", TOKENS), ("b", TOKENS))
    tight_ms = int(1000 * (PROFILE.peer_connect_s + PROFILE.peer_lookup_s + wire_s(TOKENS) / 8))
    both = plan(pull("a", 0, TOKENS // 2), pull("b", TOKENS // 2, TOKENS, max(tight_ms, 1)))
    one.submit("c", "warm", range(TOKENS), kv_transfer_params=both)
    one.run()
    assert pulled(one, "warm") == TOKENS // 2
    assert all(engine.next_event_s() is None for engine in one.engines.values()), "nothing is left under way"


def test_stock_engines_ignore_the_key(fleet) -> None:
    one = fleet("ab")
    one.submit("a", "cold", range(TOKENS))
    one.run()
    one.submit("b", "warm", range(TOKENS), kv_transfer_params=plan(pull("a", 0, TOKENS)))
    one.run()
    assert pulled(one, "warm") == 0


@pytest.mark.parametrize(
    "broken",
    [None, 3, {"pulls": 3}, {"pulls": [3]}, {"pulls": [{"source": "nowhere"}]}, {"pulls": [pull("a", 4, 4)]}],
)
def test_what_is_no_plan_is_none(broken: object) -> None:
    assert parse_transfer_params({"pointsman": broken}, extension=True).sources == ()


def test_a_plan_is_read_as_the_extension_reads_it() -> None:
    params = parse_transfer_params(plan(pull("[fd00::1]", 16, 32, 250)), extension=True)
    assert params.sources == (PeerSource("pull-0", "fd00::1", 1, 16, 32, 0.25),)
