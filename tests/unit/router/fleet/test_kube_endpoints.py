# SPDX-License-Identifier: Apache-2.0
"""From pods to workers, without a server."""

from __future__ import annotations

import json

import msgspec
import pytest
from fake_kube import pod

from router.config_discovery import PodDefaults
from router.fleet.discovery.annotations import PREFIX
from router.fleet.discovery.endpoints import PodRules, endpoints
from router.fleet.discovery.objects import Pod
from router.fleet.discovery.store import ObjectStore
from router.fleet.discovery.targets import Add, Remove, Replace, Restart, SetReady, Target, by_id, steps
from router.fleet.worker import Role, Transfer, WorkerSpec

RULES = PodRules((8000,), PodDefaults())


def made(*args: object, **fields: object) -> Pod:
    return msgspec.json.decode(json.dumps(pod(*args, **fields)), type=Pod)  # type: ignore[arg-type]


def only(one: Pod, rules: PodRules = RULES) -> WorkerSpec:
    found = endpoints([one], rules)
    assert not found.rejected
    (target,) = found.targets
    return target.spec


def test_an_ipv6_address_is_written_in_brackets() -> None:
    spec = only(made("a", "fd00::0:1"), PodRules((8000,), PodDefaults(events_port=5557, p2p_port=5710)))
    assert (spec.url, spec.events, spec.p2p) == (
        "http://[fd00::1]:8000",
        "tcp://[fd00::1]:5557",
        "[fd00::1]:5710",
    )


def test_eight_ports_are_eight_workers_with_one_rank_each() -> None:
    rules = PodRules(tuple(range(8000, 8008)), PodDefaults(events_port=5557, extension_port=7000))
    specs = [target.spec for target in endpoints([made("a", "10.0.0.1", uid="0123456789")], rules).targets]
    assert [spec.id for spec in specs] == [f"a.01234567:{port}" for port in range(8000, 8008)]
    assert [spec.events for spec in specs] == [f"tcp://10.0.0.1:{port}" for port in range(5557, 5565)]
    assert specs[7].extension == "10.0.0.1:7007"
    assert {(spec.ranks, spec.ranks_given) for spec in specs} == {(1, True)}


def test_ranks_behind_one_port_are_found_out_unless_given() -> None:
    assert only(made("a", "10.0.0.1")).ranks_given is False
    spec = only(made("a", "10.0.0.1", annotations={f"{PREFIX}ranks": "4"}))
    assert (spec.ranks, spec.ranks_given) == (4, True)


def test_annotations_go_before_labels_and_labels_before_defaults() -> None:
    labels = {"llm-d.ai/role": "prefill-decode", f"{PREFIX}role": "prefill", f"{PREFIX}transfer": "nixl"}
    assert only(made("a", "10.0.0.1", labels=labels)).role is Role.PREFILL
    spec = only(made("a", "10.0.0.1", labels=labels, annotations={f"{PREFIX}role": "decode"}))
    assert (spec.role, spec.transfer) == (Role.DECODE, Transfer.NIXL)


def test_a_default_port_can_be_switched_off() -> None:
    rules = PodRules((8000,), PodDefaults(events_port=5557))
    assert only(made("a", "10.0.0.1", annotations={f"{PREFIX}events-port": "none"}), rules).events is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("events-port", "0"),
        ("events-port", "65536"),
        ("events-port", "1e3"),
        ("ranks", "none"),
        ("ranks", "-1"),
        ("role", "Prefill"),
        ("role", "decode"),  # no transfer
        ("transfer", "p2p"),  # no port
        ("block-size-tokens", "9" * 5000),
        ("evnts-port", "5557"),
    ],
)
def test_a_value_that_is_not_accepted_leaves_the_pod_out_and_is_named(name: str, value: str) -> None:
    found = endpoints(
        [made("a", "10.0.0.1", annotations={PREFIX + name: value}), made("b", "10.0.0.2")], RULES
    )
    assert [target.spec.url for target in found.targets] == ["http://10.0.0.2:8000"]
    assert list(found.rejected) == ["a"]
    assert name in found.rejected["a"]


@pytest.mark.parametrize(
    "defaults",
    [
        PodDefaults(events_port=5557, replay_port=5558),
        PodDefaults(events_port=5557, p2p_port=5557),
        PodDefaults(extension_port=8001),
        PodDefaults(events_port=65535),
    ],
)
def test_ranks_whose_ports_meet_are_no_workers(defaults: PodDefaults) -> None:
    assert list(endpoints([made("a", "10.0.0.1")], PodRules((8000, 8001), defaults)).rejected) == ["a"]


@pytest.mark.parametrize("ip", ["", "0.0.0.256", "name", None])
def test_a_pod_without_an_address_is_no_worker(ip: str | None) -> None:
    assert endpoints([made("a", ip)], RULES).targets == []


def test_only_containers_that_serve_make_incarnations() -> None:
    one = pod("a", "10.0.0.1")
    one["spec"]["initContainers"] = [{"name": "side"}]
    one["status"]["initContainerStatuses"] = [{"name": "side", "restartCount": 4}]

    def incarnation(rules: PodRules) -> str:
        decoded = msgspec.json.decode(json.dumps(one), type=Pod)
        return endpoints([decoded], rules).targets[0].incarnation

    assert incarnation(RULES) == "vllm:0"
    assert incarnation(PodRules((9000,), PodDefaults())) == "side:4,vllm:0"
    assert incarnation(PodRules((8000,), PodDefaults(), container="side")) == "side:4"


def target(name: str, incarnation: str = "1", ready: bool = True, url: str = "http://10.0.0.1") -> Target:
    return Target(WorkerSpec(name, url), incarnation, ready)


def test_steps_remove_first_and_say_what_changed() -> None:
    known = by_id([target("gone"), target("same"), target("moved"), target("again"), target("tired")])
    wanted = by_id(
        [
            target("new"),
            target("not yet", ready=False),
            target("same"),
            target("moved", url="http://10.0.0.2"),
            target("again", "2"),
            target("tired", ready=False),
        ]
    )
    assert list(steps(known, wanted)) == [
        Remove("gone"),
        Add(target("new")),
        Replace(target("moved", url="http://10.0.0.2")),
        Restart("again"),
        SetReady("tired", ready=False),
    ]


def test_an_incarnation_that_is_not_known_is_no_restart() -> None:
    assert list(steps(by_id([target("a", "")]), by_id([target("a", "1")]))) == []
    assert list(steps(by_id([target("a", "1")]), by_id([target("a", "")]))) == []


def test_news_of_an_older_uid_changes_nothing() -> None:
    store: ObjectStore[Pod] = ObjectStore()
    old = made("a", "10.0.0.1", uid="1", created="2026-01-01T00:00:00Z")
    new = made("a", "10.0.0.2", uid="2", created="2026-01-01T00:00:01Z")
    assert store.put(old)
    assert store.put(new)
    assert not store.put(new)
    assert not store.put(old)
    assert not store.delete(old)
    assert list(store) == [new]
    assert store.delete(new)
    assert len(store) == 0
