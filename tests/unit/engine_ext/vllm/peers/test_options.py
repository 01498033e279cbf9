# SPDX-License-Identifier: Apache-2.0
"""Options and metrics of the tier."""

from __future__ import annotations

from typing import Any

import pytest

from engine_ext.vllm.peers.metrics import LOOKUPS, METRICS, PULL_SECONDS, Kind, Tally
from engine_ext.vllm.peers.options import TierConfigError, TierOptions


def test_everything_has_a_default() -> None:
    options = TierOptions.load({})
    assert options.p2p is None
    assert not options.allow_unfingerprinted_peers


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"prot": 1}, "prot"),
        ({"serve_share": 1.5}, "serve_share"),
        ({"longest_pull_s": 0}, "longest_pull_s"),
        ({"control": 5}, "control"),
        ({"p2p": {"port": 5710}}, "allow_unfingerprinted_peers"),
    ],
)
def test_a_bad_option_is_named_with_what_is_accepted(given: dict[str, Any], named: str) -> None:
    with pytest.raises(TierConfigError, match=named):
        TierOptions.load(given)


def test_in_tree_peers_are_accepted_with_permission() -> None:
    assert TierOptions.load({"p2p": {"port": 1}, "allow_unfingerprinted_peers": True}).p2p == {"port": 1}


def test_metric_names_are_ours_and_distinct_and_histograms_have_buckets() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(name.startswith("vllm:pointsman_") for name in names)
    assert all(bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM) for metric in METRICS)


def test_a_tally_starts_again_after_it_was_taken() -> None:
    tally = Tally()
    tally.count(LOOKUPS, "found", by=2)
    tally.count(LOOKUPS, "found")
    tally.count(LOOKUPS, "absent", by=0)
    tally.observe(PULL_SECONDS, 0.5, "p2p")
    taken = tally.take()
    assert taken.counts == {(LOOKUPS, ("found",)): 3}
    assert taken.samples == {(PULL_SECONDS, ("p2p",)): [0.5]}
    assert tally.take() == Tally()
