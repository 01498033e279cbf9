# SPDX-License-Identifier: Apache-2.0
"""The whole service over pods that are simulated engines."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from eventually import eventually
from fake_kube import FakeKube, Object, objective, pod, pool
from service import service, sim_workers

from engine_ext.sim.running import RunningSimWorker

PROMPT = list(range(1, 161))  # ten blocks


def port_of(address: str | None) -> int:
    return urlsplit(address or "").port or 0


def pod_of(worker: RunningSimWorker, name: str, **more: object) -> Object:
    annotations = {
        "pointsman.io/events-port": str(port_of(worker.events)),
        "pointsman.io/replay-port": str(port_of(worker.replay)),
    }
    return pod(name, "127.0.0.1", annotations=annotations, ports=(port_of(worker.url),), **more)  # type: ignore[arg-type]


def settings(kube: FakeKube, folder: Path) -> dict[str, object]:
    return {
        "fleet.kubernetes.kubeconfig": kube.kubeconfig(folder),
        "fleet.kubernetes.pool": "llama",
    }


async def test_requests_go_to_pods_and_a_new_pod_at_an_old_address_begins_with_nothing(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with sim_workers(1) as (worker,):
        port = port_of(worker.url)
        kube.put("inferencepools", pool(ports=(port,)))
        kube.put("pods", pod_of(worker, "a", uid="aaaaaaaa-1"))
        async with service((), tmp_path, settings(kube, tmp_path)) as one:
            await one.connected()
            reply = await one.complete(PROMPT)
            assert (reply.status, reply.worker) == (200, f"a.aaaaaaaa:{port}")

            async def known() -> int:
                return len(one.known(reply.worker))

            await eventually(known, "blocks of the first pod")
            kube.delete("pods", "a")

            async def gone() -> bool:
                return not await one.workers()

            await eventually(gone, "the deleted pod's worker")
            assert (await one.complete(PROMPT)).json["error"]["code"] == "no_workers"
            assert reply.worker not in one.app.brain.holders.workers()

            one_more = pod_of(worker, "b", uid="bbbbbbbb-2")
            # Without replay nothing of the old process is told again, as a new process would not.
            del one_more["metadata"]["annotations"]["pointsman.io/replay-port"]
            kube.put("pods", one_more)
            await one.connected()
            assert not one.known(f"b.bbbbbbbb:{port}")
            assert (await one.complete(PROMPT)).worker == f"b.bbbbbbbb:{port}"


async def test_a_restarted_container_begins_with_what_its_replay_tells(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with sim_workers(1) as (worker,):
        kube.put("inferencepools", pool(ports=(port_of(worker.url),)))
        kube.put("pods", pod_of(worker, "a"))
        async with service((), tmp_path, settings(kube, tmp_path)) as one:
            await one.connected()
            name = (await one.complete(PROMPT)).worker

            async def incarnation() -> int:
                return one.app.brain.holders.workers()[name].incarnation

            async def blocks() -> int:
                return len(one.known(name))

            await eventually(blocks, "blocks")
            before = await incarnation()
            kube.put("pods", pod_of(worker, "a", restarts=1))

            async def renewed() -> bool:
                return await incarnation() == before + 1

            await eventually(renewed, "a new incarnation")
            await eventually(blocks, "blocks that the replay told again")


async def test_a_pod_that_is_not_ready_is_no_candidate_and_says_so(kube: FakeKube, tmp_path: Path) -> None:
    async with sim_workers(1) as (worker,):
        kube.put("inferencepools", pool(ports=(port_of(worker.url),)))
        kube.put("pods", pod_of(worker, "a"))
        async with service((), tmp_path, settings(kube, tmp_path)) as one:
            await one.connected()
            name = (await one.complete(PROMPT)).worker
            kube.put("pods", pod_of(worker, "a", ready=False))

            async def unready() -> bool:
                return bool((await one.workers())[name]["health"] == "not_ready")

            await eventually(unready, "a worker that is not ready")
            assert (await one.complete(PROMPT)).json["error"]["code"] == "none_ready"
            assert await one.metric("pointsman_discovery_workers", source="kubernetes") == 1
            assert one.known(name)
            kube.put("pods", pod_of(worker, "a"))

            async def served() -> bool:
                return (await one.complete(PROMPT)).status == 200

            await eventually(served, "a worker that is ready again")


async def test_a_request_has_the_priority_of_the_objective_that_it_names(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with sim_workers(1) as (worker,):
        kube.put("inferencepools", pool(ports=(port_of(worker.url),)))
        kube.put("pods", pod_of(worker, "a"))
        kube.put("inferenceobjectives", objective("batch", -5))
        async with service((), tmp_path, settings(kube, tmp_path)) as one:
            find = one.app.brain.discovery.priority_of

            async def known() -> bool:
                return find("batch") is not None

            await eventually(known, "the objective")
            assert one.app.brain.terms.objective_priority == find
            assert find("batch") == -5


async def test_what_discovery_cannot_do_is_shown_by_ready_and_metrics(kube: FakeKube, tmp_path: Path) -> None:
    async with service((), tmp_path, settings(kube, tmp_path)) as one:

        async def told() -> bool:
            async with one.session.get(one.url + "/ready") as answer:
                degraded = (await answer.json())["degraded"]
                return bool(degraded["discovery"] == ["kubernetes: there is no InferencePool llama"])

        await eventually(told, "a pool that is missing")
        assert await one.metric("pointsman_discovery_degraded", source="kubernetes") == 1
