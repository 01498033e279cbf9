# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from prometheus_client import CollectorRegistry

from indexer.hashing import HashKey
from router.config_tenants import TenantEntry, TenantsConfig
from router.errors import InvalidApiKey, NoWorkerAvailable
from router.extproc.endpoints import Endpoints
from router.extproc.metrics import PickerMetrics
from router.extproc.picked import Picked, Tally, Wanted
from router.extproc.picker import Picker, PickerSettings
from router.fleet.snapshot import Snapshot
from router.fleet.worker import WorkerSpec, WorkerStatus
from router.gateway.headers import Headers
from router.gateway.routing import PrefillLeg
from router.gateway.service_terms import ServiceTerms
from router.plan.tenants import Tenants
from router.request import InferenceRequest, Outcome, RequestKind, Usage

from .conftest import POST, Told

FLEET = Snapshot([WorkerStatus(WorkerSpec(f"w{i}", f"http://10.0.0.{i}:8000")) for i in range(1, 5)])


@dataclass
class Dispatching:
    """Gives one attempt, at once unless it ``waits``, and remembers what it was asked."""

    attempt: Told = field(default_factory=Told)
    request: InferenceRequest | None = None
    allowed: frozenset[str] | None = None
    waits: bool = False

    def dispatch_now(
        self, request: InferenceRequest, tried: frozenset[str], allowed: frozenset[str] | None = None
    ) -> Told | None:
        self.request, self.allowed = request, allowed
        return None if self.waits else self.attempt

    async def dispatch(
        self, request: InferenceRequest, tried: frozenset[str], allowed: frozenset[str] | None = None
    ) -> Told:
        self.request, self.allowed = request, allowed
        return self.attempt


@dataclass
class AtAddress(Told):
    """An attempt whose worker has an address."""

    @property
    def route(self):  # type: ignore[no-untyped-def]
        return replace(super().route, base_url=f"http://10.0.0.{self.worker[1:]}:8000")


def picker(dispatching: Dispatching, terms: ServiceTerms | None = None, **settings: object) -> Picker:
    endpoints = Endpoints(lambda: FLEET)
    chosen = PickerSettings(**settings)  # type: ignore[arg-type]
    return Picker(dispatching, endpoints, terms or ServiceTerms(), chosen, lambda: "made")  # type: ignore[arg-type]


def wanted(
    headers: Headers = POST, body: bytes = b'{"model":"m","prompt":"p"}', subset: object = None
) -> Wanted:
    return Wanted(headers, body, subset)  # type: ignore[arg-type]


async def chosen_by(chooser: Picker, one: Wanted) -> Picked:
    found = chooser.pick_now(one)
    return found if isinstance(found, Picked) else await chooser.pick(found)


async def pick(dispatching: Dispatching, one: Wanted, **settings: object) -> Picked:
    return await chosen_by(picker(dispatching, **settings), one)


async def test_the_request_is_read_as_the_gateway_reads_it() -> None:
    dispatching = Dispatching(AtAddress())
    headers = ((b":method", b"POST"), (b":path", b"/v1/completions?a=b"), (b"x-slo-ttft-ms", b"250"))
    picked = await pick(dispatching, wanted(headers))
    request = dispatching.request
    assert request is not None
    assert (request.kind, request.path, request.model) == (RequestKind.COMPLETION, "/v1/completions", "m")
    assert (request.request_id, request.slo_ttft_s) == ("made", 0.25)
    assert picked.destination == "10.0.0.1:8000"
    assert dispatching.allowed is None


async def test_what_must_be_waited_for_comes_out_the_same() -> None:
    subset = ["10.0.0.1:8000", "10.0.0.3:8000"]
    found = []
    for waits in (False, True):
        dispatching = Dispatching(AtAddress(elsewhere=("w3",)), waits=waits)
        now = picker(dispatching).pick_now(wanted(subset=subset))
        assert isinstance(now, Picked) != waits
        picked = await pick(dispatching, wanted(subset=subset))
        found.append((picked.destination, picked.request, dispatching.allowed))
    assert found[0] == found[1]
    assert found[0][0] == "10.0.0.1:8000,10.0.0.3:8000"


async def test_fallbacks_follow_in_order_as_many_as_are_wanted() -> None:
    for most, named in ((0, ""), (1, ",10.0.0.3:8000"), (9, ",10.0.0.3:8000,10.0.0.2:8000")):
        picked = await pick(Dispatching(AtAddress(elsewhere=("w3", "w2"))), wanted(), fallbacks=most)
        assert picked.destination == "10.0.0.1:8000" + named


async def test_a_subset_becomes_the_workers_that_are_allowed() -> None:
    dispatching = Dispatching(AtAddress())
    await pick(dispatching, wanted(subset=["10.0.0.1:8000", "10.0.0.3", "10.9.9.9:1"]))
    assert dispatching.allowed == {"w1", "w3"}
    for subset in ([], ["10.9.9.9:1"], ["10.0.0.1:8001"]):
        with pytest.raises(NoWorkerAvailable):
            await pick(dispatching, wanted(subset=subset))


async def test_a_request_s_own_choice_counts_only_where_gateways_are_tested() -> None:
    chosen = (*POST, (b"test-epp-endpoint-selection", b"10.0.0.2, 10.0.0.3:8000"))
    dispatching = Dispatching(AtAddress())
    await pick(dispatching, wanted(chosen))
    assert dispatching.allowed is None
    await pick(dispatching, wanted(chosen), obeys_test_selection=True)
    assert dispatching.allowed == {"w2", "w3"}
    await pick(dispatching, wanted(chosen, subset=["10.0.0.3:8000"]), obeys_test_selection=True)
    assert dispatching.allowed == {"w3"}


async def test_an_objective_gives_its_priority_and_newer_names_mean_the_same() -> None:
    one, objectives = Dispatching(AtAddress()), {"batch": -5}
    endpoints = Endpoints(lambda: FLEET)
    chooser = Picker(one, endpoints, ServiceTerms(objective_priority=objectives.get), PickerSettings())  # type: ignore[arg-type]
    for name, priority in (("batch", -5), ("unknown", 0)):
        for header in (b"x-gateway-inference-objective", b"x-llm-d-inference-objective"):
            await chosen_by(
                chooser, wanted((*POST, (header, name.encode()), (b"x-llm-d-slo-ttft-ms", b"100")))
            )
            assert one.request is not None
            assert (one.request.priority, one.request.slo_ttft_s) == (priority, 0.1)
            assert one.request.sheddable == (priority < 0)


async def test_the_prefill_worker_is_named_for_the_sidecar() -> None:
    leg = PrefillLeg("w4", "http://10.0.0.4:8000", {}, (), True)
    client_s = (*POST, (b"x-prefiller-host-port", b"192.0.2.1:1"))
    picked = await pick(Dispatching(AtAddress(prefill=leg)), wanted(client_s))
    assert (b"x-prefiller-host-port", b"10.0.0.4:8000") in picked.set_headers
    assert b"x-prefiller-host-port" not in picked.remove_headers
    picked = await pick(Dispatching(AtAddress()), wanted(client_s))
    assert picked.remove_headers == [b"x-prefiller-host-port"]


async def test_a_tenant_s_key_ends_here_and_is_asked_for() -> None:
    tenants = Tenants(
        TenantsConfig(require=True, entries=(TenantEntry(name="a", api_keys=("key-of-a",)),)),
        HashKey(bytes(16)),
    )
    one, terms = Dispatching(AtAddress()), ServiceTerms(tenants)
    with pytest.raises(InvalidApiKey):
        await chosen_by(picker(one, terms), wanted())
    picked = await chosen_by(picker(one, terms), wanted((*POST, (b"authorization", b"Bearer key-of-a"))))
    assert picked.remove_headers == [b"authorization"]
    assert one.request is not None
    assert one.request.tenant.name == "a"


async def test_an_attempt_whose_worker_has_no_address_is_finished() -> None:
    attempt = AtAddress(worker="w1:x")
    with pytest.raises(ValueError, match="Port"):
        await pick(Dispatching(attempt), wanted())
    assert attempt.ends == [(Outcome.CANCELLED, None)]


# Metrics


def tally(**more: object) -> Tally:
    request = InferenceRequest(
        "r", "POST", "/v1/completions", RequestKind.COMPLETION, b"", {}, "m", True, 1, None, None,
        slo_ttft_s=0.5, slo_tpot_s=0.01,
    )  # fmt: skip
    return Tally(
        100.0, 300, 5000, wanted_s=100.1, routed_s=100.2, first_token_s=101.0, ended_s=103.0,
        request=request, usage=Usage(64, 21, 32), outcome=Outcome.OK, status=200, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_standard_metrics_of_a_good_exchange() -> None:
    registry = CollectorRegistry()
    metrics, one = PickerMetrics(registry), tally()
    labels = {"model_name": "m", "target_model_name": "m"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"inference_objective_{name}", {**labels, **more})

    metrics.routed(one)
    assert registry.get_sample_value("inference_objective_running_requests", {"model_name": "m"}) == 1
    metrics.ended(one)
    assert registry.get_sample_value("inference_objective_running_requests", {"model_name": "m"}) == 0
    assert value("request_total") == 1
    assert value("request_error_total", error_code="200") is None
    assert value("request_duration_seconds_sum") == pytest.approx(3.0)
    assert value("request_ttft_seconds_sum") == pytest.approx(1.0)
    assert value("request_tpot_seconds_sum") == pytest.approx(0.1)
    assert value("normalized_time_per_output_token_seconds_sum") == pytest.approx(3 / 21)
    assert (value("request_sizes_sum"), value("response_sizes_sum")) == (300, 5000)
    assert (value("input_tokens_sum"), value("output_tokens_sum"), value("prompt_cached_tokens_sum")) == (
        64,
        21,
        32,
    )
    assert value("request_slo_violation_total", type="ttft") == 1
    assert value("request_slo_violation_total", type="tpot") == 1
    assert registry.get_sample_value(
        "inference_extension_scheduler_e2e_duration_seconds_sum"
    ) == pytest.approx(0.1)


def test_refusals_and_errors_count_by_their_code() -> None:
    registry = CollectorRegistry()
    metrics = PickerMetrics(registry)
    for one, code in (
        (Tally(1.0, wanted_s=1.0, refused_status=503), "503"),
        (Tally(1.0, refused_status=413), "413"),
        (Tally(1.0, routed_s=1.0, status=404, outcome=Outcome.CLIENT_ERROR), "404"),
        (Tally(1.0, routed_s=1.0, outcome=Outcome.CLIENT_GONE), "client_gone"),
    ):
        if one.routed_s is not None:
            metrics.routed(one)
        metrics.ended(one)
        labels = {"model_name": "", "target_model_name": "", "error_code": code}
        assert registry.get_sample_value("inference_objective_request_error_total", labels) == 1
    attempts = "inference_extension_scheduler_attempts_total"
    assert registry.get_sample_value(attempts, {"status": "failure"}) == 1
    assert registry.get_sample_value(attempts, {"status": "success"}) == 2


def test_names_of_models_that_clients_make_up_do_not_grow_without_bound() -> None:
    registry = CollectorRegistry()
    metrics = PickerMetrics(registry)
    for number in range(1100):
        one = tally()
        assert one.request is not None
        one.request = replace(one.request, model=f"model-{number}")
        metrics.routed(one)
        metrics.ended(one)
    labels = {"model_name": "other", "target_model_name": "other"}
    assert registry.get_sample_value("inference_objective_request_total", labels) == 100
