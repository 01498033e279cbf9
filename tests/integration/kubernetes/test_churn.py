# SPDX-License-Identifier: Apache-2.0
"""A thousand pods that come, go, fail, move and come back, over watches that break."""

from __future__ import annotations

from random import Random

from fake_kube import FakeKube, Object, pod, pool

from .conftest import Follow

PODS = 1000
ROUNDS = 12
CHANGES = 100


class Cluster:
    """Changes pods at random; ``endpoints`` is what the fleet must come to."""

    def __init__(self, kube: FakeKube, seed: int) -> None:
        self.kube = kube
        self.random = Random(seed)
        self.pods: dict[str, Object] = {}
        self.born = 0
        self.free = [f"10.{a}.{b}.{c}" for a in range(2) for b in range(10) for c in range(1, 101)]

    def endpoints(self) -> set[str]:
        return {
            f"{one['status']['podIP']}:8000"
            for one in self.pods.values()
            if one["status"]["podIP"] and one["status"]["conditions"][0]["status"] == "True"
        }

    def create(self, name: str | None = None) -> None:
        self.born += 1
        name = name or f"vllm-{self.born}"
        created = f"2026-01-01T{self.born // 3600:02}:{self.born // 60 % 60:02}:{self.born % 60:02}Z"
        # The last address given back is the first given out: reuse is the rule.
        self._put(pod(name, self.free.pop(), uid=f"{self.born:08x}-uid", created=created))

    def change(self) -> None:
        name = self.random.choice(list(self.pods))
        one = self.pods[name]
        match self.random.randrange(6):
            case 0:
                self._gone(one)
                del self.pods[name]
                self.kube.delete("pods", name)
            case 1:
                self._gone(one)
                one["status"]["podIP"] = None
                self._put(one)
            case 2:
                condition = one["status"]["conditions"][0]
                condition["status"] = "False" if condition["status"] == "True" else "True"
                self._put(one)
            case 3:
                one["status"]["containerStatuses"][0]["restartCount"] += 1
                self._put(one)
            case 4:  # the pod of a StatefulSet: deleted and made again under its name
                self._gone(one)
                self.kube.delete("pods", name)
                self.create(name)
            case _:
                self.create()

    def _gone(self, one: Object) -> None:
        if one["status"]["podIP"]:
            self.free.append(one["status"]["podIP"])

    def _put(self, one: Object) -> None:
        self.pods[one["metadata"]["name"]] = one
        self.kube.put("pods", one)


async def test_the_fleet_is_right_within_a_second_after_each_of_a_thousand_changes(
    kube: FakeKube, follow: Follow
) -> None:
    kube.put("inferencepools", pool())
    cluster = Cluster(kube, seed=5)
    for _ in range(PODS):
        cluster.create()
    followed = await follow()
    assert followed.taken() == cluster.endpoints()
    assert len(followed.taken()) == PODS
    for number in range(ROUNDS):
        for _ in range(CHANGES):
            cluster.change()
        match number % 4:
            case 1:
                kube.break_watches()
            case 2:
                kube.compact()
                kube.say_gone("pods")
            case 3:
                kube.end_watches()
                kube.bookmark()
        await followed.promptly_so(
            lambda: followed.taken() == cluster.endpoints(),
            lambda: f"{len(followed.taken() ^ cluster.endpoints())} differ",
        )
    ids = {status.spec.id for status in followed.fleet.statuses()}
    uids = {one["metadata"]["uid"][:8] for one in cluster.pods.values()}
    assert {name.rsplit(".", 1)[1].split(":")[0] for name in ids} <= uids


async def test_a_thousand_pods_replaced_at_once_are_a_thousand_others(kube: FakeKube, follow: Follow) -> None:
    kube.put("inferencepools", pool())
    cluster = Cluster(kube, seed=6)
    for _ in range(PODS):
        cluster.create()
    followed = await follow()
    before = {status.spec.id for status in followed.fleet.statuses()}
    for name in list(cluster.pods):
        cluster._gone(cluster.pods[name])
        kube.delete("pods", name)
        cluster.create(name)
    await followed.promptly_so(lambda: len(followed.told) == PODS)
    await followed.promptly_so(lambda: followed.taken() == cluster.endpoints())
    assert not before & {status.spec.id for status in followed.fleet.statuses()}
