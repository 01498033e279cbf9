# SPDX-License-Identifier: Apache-2.0
"""The fleet is what the pods are: readiness, labels, addresses, uids, restarts, ports."""

from __future__ import annotations

import pytest
from fake_kube import FakeKube, objective, pod, pool

from router.errors import ConfigError
from router.fleet.worker import Role

from .conftest import Follow


async def test_the_first_list_is_in_the_fleet_when_start_returns(kube: FakeKube, follow: Follow) -> None:
    kube.put("inferencepools", pool(ports=(8000, 8001)))
    kube.put("pods", pod("a", "10.0.0.1"))
    kube.put("pods", pod("b", "10.0.0.2"))
    kube.put("pods", pod("other", "10.0.0.3", labels={"app": "web"}))
    followed = await follow()
    assert followed.taken() == {"10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "10.0.0.2:8001"}
    assert followed.discovery.troubles() == []


async def test_pods_come_change_and_go(kube: FakeKube, follow: Follow) -> None:
    kube.put("inferencepools", pool())
    followed = await follow()
    assert followed.taken() == set()
    kube.put("pods", pod("a", None, ready=False))
    kube.put("pods", pod("b", "10.0.0.2"))
    await followed.promptly("10.0.0.2:8000")
    kube.put("pods", pod("a", "10.0.0.1"))
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000")
    kube.delete("pods", "b")
    await followed.promptly("10.0.0.1:8000")


async def test_a_pod_that_is_not_ready_takes_no_requests_and_keeps_what_is_known_of_it(
    kube: FakeKube, follow: Follow
) -> None:
    kube.put("inferencepools", pool(ports=tuple(range(8000, 8008))))
    kube.put("pods", pod("a", "10.0.0.1"))
    followed = await follow()
    assert len(followed.taken()) == 8
    kube.put("pods", pod("a", "10.0.0.1", ready=False))
    await followed.promptly()
    assert len(followed.held()) == 8
    kube.put("pods", pod("a", "10.0.0.1"))
    await followed.promptly(*(f"10.0.0.1:{port}" for port in range(8000, 8008)))
    assert followed.told == []


@pytest.mark.parametrize("how", ["null address", "terminating", "failed", "label"])
async def test_a_pod_that_leaves_without_being_deleted_is_removed(
    kube: FakeKube, follow: Follow, how: str
) -> None:
    kube.put("inferencepools", pool())
    kube.put("pods", pod("a", "10.0.0.1"))
    followed = await follow()
    gone = kube.get("pods", "a")
    if how == "null address":
        gone["status"]["podIP"] = None
    elif how == "terminating":
        gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:10:00Z"
    elif how == "failed":
        gone["status"]["phase"] = "Failed"
    else:
        gone["metadata"]["labels"] = {"app": "other"}
    kube.put("pods", gone)
    await followed.promptly_so(lambda: followed.held() == set())
    assert [kind for kind, _ in followed.told] == ["removed"]


async def test_a_pod_whose_address_changes_moves(kube: FakeKube, follow: Follow) -> None:
    kube.put("inferencepools", pool())
    kube.put("pods", pod("a", "10.0.0.1"))
    followed = await follow()
    kube.put("pods", pod("a", "10.0.0.9"))
    await followed.promptly("10.0.0.9:8000")
    assert [kind for kind, _ in followed.told] == ["removed"]


async def test_a_new_pod_at_the_address_of_one_that_lingers_is_another_worker(
    kube: FakeKube, follow: Follow
) -> None:
    kube.put("inferencepools", pool())
    kube.put("pods", pod("old", "10.0.0.1", created="2026-01-01T00:00:00Z"))
    followed = await follow()
    (before,) = [status.spec.id for status in followed.fleet.statuses()]
    kube.put("pods", pod("new", "10.0.0.1", created="2026-01-01T01:00:00Z"))
    await followed.promptly_so(lambda: ("removed", before) in followed.told)
    await followed.promptly("10.0.0.1:8000")
    (after,) = [status.spec.id for status in followed.fleet.statuses()]
    assert after != before
    kube.delete("pods", "old")
    kube.put("pods", pod("sign", "10.0.0.2"))
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000")
    assert followed.fleet.get(after) is not None


async def test_a_late_deletion_of_the_old_uid_does_not_remove_the_new_one(
    kube: FakeKube, follow: Follow
) -> None:
    kube.put("inferencepools", pool())
    old = pod("vllm-0", "10.0.0.1", uid="aaaaaaaa-1", created="2026-01-01T00:00:00Z")
    kube.put("pods", old)
    followed = await follow()
    (before,) = [status.spec.id for status in followed.fleet.statuses()]
    kube.put("pods", pod("vllm-0", "10.0.0.1", uid="bbbbbbbb-2", created="2026-01-01T01:00:00Z"))
    await followed.promptly_so(lambda: ("removed", before) in followed.told)
    (after,) = [status.spec.id for status in followed.fleet.statuses()]
    assert after != before
    old["metadata"]["namespace"] = "models"
    kube.say("pods", "MODIFIED", old)
    kube.say("pods", "DELETED", old)
    kube.put("pods", pod("sign", "10.0.0.2"))
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000")
    assert followed.fleet.get(after) is not None


async def test_a_restarted_container_is_another_incarnation_of_the_same_worker(
    kube: FakeKube, follow: Follow
) -> None:
    kube.put("inferencepools", pool())
    kube.put("pods", pod("a", "10.0.0.1"))
    followed = await follow()
    (name,) = [status.spec.id for status in followed.fleet.statuses()]
    kube.put("pods", pod("a", "10.0.0.1", restarts=1))
    await followed.promptly_so(lambda: followed.told)
    assert followed.told == [("restarted", name)]


async def test_the_restart_of_a_side_car_changes_nothing(kube: FakeKube, follow: Follow) -> None:
    kube.put("inferencepools", pool())
    one = pod("a", "10.0.0.1")
    one["spec"]["containers"].append({"name": "proxy"})
    one["status"]["containerStatuses"].append({"name": "proxy", "restartCount": 0})
    kube.put("pods", one)
    followed = await follow()
    one["status"]["containerStatuses"][1]["restartCount"] = 3
    kube.put("pods", one)
    kube.put("pods", pod("sign", "10.0.0.2"))
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000")
    assert followed.told == []


async def test_a_port_that_leaves_the_pool_leaves_the_fleet(kube: FakeKube, follow: Follow) -> None:
    kube.put("inferencepools", pool(ports=(8000, 8001)))
    kube.put("pods", pod("a", "10.0.0.1"))
    followed = await follow()
    kube.put("inferencepools", pool(ports=(8000,)))
    await followed.promptly("10.0.0.1:8000")


async def test_a_changed_selector_changes_the_fleet_in_one_step(kube: FakeKube, follow: Follow) -> None:
    kube.put("inferencepools", pool())
    kube.put("pods", pod("a", "10.0.0.1"))
    kube.put("pods", pod("b", "10.0.0.2", labels={"app": "vllm2"}))
    followed = await follow()
    assert followed.taken() == {"10.0.0.1:8000"}
    kube.put("inferencepools", pool(labels={"app": "vllm2"}))
    await followed.promptly("10.0.0.2:8000")
    assert kube.watches_of("pods") <= 1


async def test_a_deleted_pool_has_no_workers_until_it_is_back(kube: FakeKube, follow: Follow) -> None:
    kube.put("inferencepools", pool())
    kube.put("pods", pod("a", "10.0.0.1"))
    followed = await follow()
    kube.delete("inferencepools", "llama")
    await followed.promptly()
    assert followed.discovery.troubles() == ["there is no InferencePool llama"]
    kube.put("inferencepools", pool())
    await followed.promptly("10.0.0.1:8000")
    assert followed.discovery.troubles() == []


async def test_selector_and_ports_do_without_a_pool(kube: FakeKube, follow: Follow) -> None:
    kube.resources = {"pods"}
    kube.put("pods", pod("a", "10.0.0.1"))
    followed = await follow(selector={"app": "vllm"}, ports=[8000])
    assert followed.taken() == {"10.0.0.1:8000"}
    assert followed.discovery.troubles() == []


async def test_ranks_by_port_have_ports_of_their_own(kube: FakeKube, follow: Follow) -> None:
    kube.put("inferencepools", pool(ports=(8000, 8001)))
    kube.put("pods", pod("a", "10.0.0.1", annotations={"pointsman.io/p2p-port": "5710"}))
    followed = await follow(defaults={"events_port": 5557, "replay_port": 5657})
    specs = {status.spec.url: status.spec for status in followed.fleet.statuses()}
    second = specs["http://10.0.0.1:8001"]
    assert (second.events, second.replay) == ("tcp://10.0.0.1:5558", "tcp://10.0.0.1:5658")
    assert (second.p2p, second.ranks, second.ranks_given) == ("10.0.0.1:5711", 1, True)


async def test_a_pod_says_of_itself_what_it_is_and_one_that_says_nonsense_is_left_out(
    kube: FakeKube, follow: Follow
) -> None:
    kube.put("inferencepools", pool())
    prefill = {"pointsman.io/role": "prefill", "pointsman.io/transfer": "nixl"}
    kube.put("pods", pod("a", "10.0.0.1", annotations=prefill))
    kube.put("pods", pod("b", "10.0.0.2", annotations={"pointsman.io/role": "cook"}))
    followed = await follow()
    (one,) = followed.fleet.statuses()
    assert (one.spec.url, one.spec.role) == ("http://10.0.0.1:8000", Role.PREFILL)
    assert followed.discovery.counts()["rejected"] == 1
    assert "pointsman.io/role" in followed.discovery.troubles()[0]
    kube.put("pods", pod("b", "10.0.0.2"))
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000")
    assert followed.discovery.troubles() == []


async def test_objectives_of_the_pool_have_priorities(kube: FakeKube, follow: Follow) -> None:
    kube.put("inferencepools", pool())
    kube.put("inferenceobjectives", objective("urgent", 10))
    kube.put("inferenceobjectives", objective("plain", None))
    kube.put("inferenceobjectives", objective("theirs", 5, "another"))
    followed = await follow()
    find = followed.discovery.priority_of
    await followed.promptly_so(lambda: find("urgent") == 10 and find("plain") == 0)
    assert find("theirs") is None
    kube.put("inferenceobjectives", objective("urgent", -1))
    await followed.promptly_so(lambda: find("urgent") == -1)
    kube.delete("inferenceobjectives", "urgent")
    await followed.promptly_so(lambda: find("urgent") is None)


async def test_without_the_objectives_resource_all_is_well(kube: FakeKube, follow: Follow) -> None:
    kube.resources.discard("inferenceobjectives")
    kube.put("inferencepools", pool())
    kube.put("pods", pod("a", "10.0.0.1"))
    followed = await follow()
    await followed.promptly("10.0.0.1:8000")
    assert followed.discovery.troubles() == []


async def test_a_kubeconfig_that_is_none_is_named(kube: FakeKube, follow: Follow, tmp_path) -> None:
    with pytest.raises(ConfigError) as refused:
        await follow(kubeconfig=str(tmp_path / "none"))
    assert refused.value.field == "fleet.kubernetes.kubeconfig"
