# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.sim.network import FleetNetwork, FluidNetwork, Link, max_min_rates

CAPACITY = {("out", "a"): 10.0, ("out", "b"): 10.0, ("in", "c"): 10.0, ("in", "d"): 4.0}


def pull(source: str, destination: str) -> tuple[Link, Link]:
    return ("out", source), ("in", destination)


@pytest.mark.parametrize(
    ("pulls", "rates"),
    [
        ([], []),
        (["ac"], [10.0]),
        (["ac", "bc"], [5.0, 5.0]),  # one destination
        (["ac", "ac", "ad"], [10 / 3, 10 / 3, 10 / 3]),  # one source, and 10/3 is less than what d can take
        (["ac", "ad"], [6.0, 4.0]),  # what d cannot take is left to c
        (["ac", "ad", "bc", "bd"], [5.0, 2.0, 5.0, 2.0]),
        (["ac", "bc", "bc", "ad"], [10 / 3, 10 / 3, 10 / 3, 4.0]),
    ],
)
def test_rates_are_those_computed_by_hand(pulls: list[str], rates: list[float]) -> None:
    assert max_min_rates([pull(*one) for one in pulls], CAPACITY) == pytest.approx(rates)


LINKS = [(way, host) for way in ("out", "in") for host in "abcde"]


@given(
    st.fixed_dictionaries({link: st.floats(0.1, 100) for link in LINKS}),
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde")), min_size=1, max_size=30),
)
def test_no_link_is_over_capacity_and_every_flow_has_a_bottleneck(
    capacity: dict[Link, float], pulls: list[tuple[str, str]]
) -> None:
    paths = [pull(*one) for one in pulls]
    rates = max_min_rates(paths, capacity)
    load = {
        link: sum(rate for path, rate in zip(paths, rates, strict=True) if link in path) for link in LINKS
    }
    for link in LINKS:
        assert load[link] <= capacity[link] * (1 + 1e-9)
    for path, rate in zip(paths, rates, strict=True):
        # Max-min fair: some link of it is full, and nobody there has more.
        assert any(
            load[link] >= capacity[link] * (1 - 1e-9)
            and rate
            >= max(other for its, other in zip(paths, rates, strict=True) if link in its) * (1 - 1e-9)
            for link in path
        )


class Ends(dict[str, float]):
    """When each named flow ended; a failed one is negative."""

    def start(
        self, network: FluidNetwork, name: str, source: str, destination: str, size: float, now_s: float
    ):
        return network.start(
            pull(source, destination),
            size,
            now_s,
            lambda at_s: self.__setitem__(name, at_s),
            lambda at_s: self.__setitem__(name, -at_s),
        )


def test_rates_change_when_a_flow_starts_and_when_one_ends() -> None:
    network, ends = FluidNetwork(CAPACITY), Ends()
    ends.start(network, "first", "a", "c", 100.0, 0.0)
    assert network.next_s == pytest.approx(10.0)
    network.advance(4.0)
    ends.start(network, "second", "b", "c", 20.0, 4.0)  # five each: 20 bytes take four seconds
    assert network.next_s == pytest.approx(8.0)
    network.advance(math.inf)
    # The first had 40 bytes by 4.0 and 60 by 8.0; its last 40 have the link again.
    assert ends == pytest.approx({"second": 8.0, "first": 12.0})
    assert network.next_s is None


def test_a_stopped_flow_gives_its_share_back_and_says_nothing() -> None:
    network, ends = FluidNetwork(CAPACITY), Ends()
    stopped = ends.start(network, "stopped", "a", "c", 100.0, 0.0)
    ends.start(network, "other", "b", "c", 100.0, 0.0)
    network.stop(stopped, 10.0)
    network.stop(stopped, 10.0)
    network.advance(math.inf)
    assert ends == pytest.approx({"other": 15.0})


def test_a_broken_link_fails_its_flows_and_no_others() -> None:
    network, ends = FluidNetwork(CAPACITY), Ends()
    ends.start(network, "ac", "a", "c", 100.0, 0.0)
    ends.start(network, "ad", "a", "d", 100.0, 0.0)
    ends.start(network, "bc", "b", "c", 100.0, 0.0)
    broken = network.fail(("out", "a"), 2.0)
    assert len(broken) == 2
    network.advance(math.inf)
    # Shared until 2.0, alone from then on.
    assert ends == pytest.approx({"ac": -2.0, "ad": -2.0, "bc": 2.0 + 90.0 / 10.0})


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.floats(1, 200), st.sampled_from(["ac", "ad", "bc", "bd"])), max_size=15
    )
)
def test_all_bytes_arrive_and_none_faster_than_its_links(flows: list[tuple[float, float, str]]) -> None:
    network, ends = FluidNetwork(CAPACITY), Ends()
    for number, (start_s, size, ways) in enumerate(sorted(flows)):
        network.advance(start_s)
        ends.start(network, str(number), *ways, size, start_s)
    network.advance(math.inf)
    assert len(ends) == len(flows)
    for number, (start_s, size, ways) in enumerate(sorted(flows)):
        fastest = min(CAPACITY[link] for link in pull(*ways))
        assert ends[str(number)] >= start_s + size / fastest - 1e-6
    for link, capacity in CAPACITY.items():
        over = [(at, size) for at, size, ways in flows if link in pull(*ways)]
        last_s = max(
            (ends[str(i)] for i, one in enumerate(sorted(flows)) if link in pull(*one[2])), default=0.0
        )
        if over:
            assert sum(size for _, size in over) <= capacity * (last_s - min(at for at, _ in over)) + 1e-6


def test_a_host_that_is_cut_off_loses_what_comes_and_what_goes() -> None:
    network, ends = FleetNetwork(["a", "b", "c"], 10.0), Ends()
    for name, source, destination in (("ab", "a", "b"), ("bc", "b", "c"), ("ca", "c", "a")):
        network.port(destination).pull(
            (source, 1),
            100.0,
            0.0,
            lambda at_s, name=name: ends.__setitem__(name, at_s),
            lambda at_s, name=name: ends.__setitem__(name, -at_s),
        )
    assert network.cut("b", 3.0) == {"b", "c"}
    assert network.advance(math.inf) == {"a"}
    assert ends == pytest.approx({"ab": -3.0, "bc": -3.0, "ca": 10.0})
