# SPDX-License-Identifier: Apache-2.0
"""The metrics that dashboards of inference gateways read: the names of the Gateway API Inference Extension 1.5.

``pkg/epp/metrics/metrics.go`` of kubernetes-sigs/gateway-api-inference-extension. Names of the model come from
clients, so only so many are told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.extproc.endpoints import endpoint_of
from router.extproc.picked import Tally
from router.fleet.fleet import Fleet
from router.fleet.phases import CAN_ANSWER
from router.fleet.worker import Health, WorkerStatus
from router.request import InferenceRequest, Outcome

_SECONDS = (0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600)  # fmt: skip
_BYTES = tuple(float(2**power) for power in range(6, 27, 2))
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)  # fmt: skip
_PER_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_DECISION_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30)
_MODEL = ("model_name", "target_model_name")
_MOST_MODELS = 1000
_OTHER = "other"


@dataclass(frozen=True, slots=True)
class _OfModel:
    """What is counted for each request of a model, looked up once."""

    model: str
    running: Gauge
    requests: Counter
    request_bytes: Histogram
    response_bytes: Histogram
    duration_s: Histogram
    ttft_s: Histogram
    tpot_s: Histogram
    ntpot_s: Histogram
    input: Histogram
    output: Histogram
    cached: Histogram


class PickerMetrics:
    """Counts streams; an ``Observer``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: Sequence[str] = _MODEL) -> Counter:
            return Counter(f"inference_{name}", text, labels, registry=registry)

        def histogram(
            name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = _MODEL
        ) -> Histogram:
            return Histogram(f"inference_{name}", text, labels, buckets=buckets, registry=registry)

        self._requests = counter("objective_request", "Requests, by model.")
        self._errors = counter(
            "objective_request_error",
            "Requests that ended in an error, by its code.",
            (*_MODEL, "error_code"),
        )
        self._violations = counter(
            "objective_request_slo_violation", "Answers slower than asked for: ttft, tpot.", (*_MODEL, "type")
        )
        self._duration_s = histogram("objective_request_duration_seconds", "Whole exchanges.", _SECONDS)
        self._ttft_s = histogram("objective_request_ttft_seconds", "Time to first token.", _SECONDS)
        self._tpot_s = histogram(
            "objective_request_tpot_seconds", "Time per output token after the first.", _PER_TOKEN_S
        )
        self._ntpot_s = histogram(
            "objective_normalized_time_per_output_token_seconds",
            "Duration of an exchange by its output tokens.",
            _PER_TOKEN_S,
        )
        self._request_bytes = histogram("objective_request_sizes", "Bytes of request bodies.", _BYTES)
        self._response_bytes = histogram("objective_response_sizes", "Bytes of answers.", _BYTES)
        self._input = histogram("objective_input_tokens", "Prompt tokens.", _TOKENS)
        self._output = histogram("objective_output_tokens", "Output tokens.", _TOKENS)
        self._cached = histogram("objective_prompt_cached_tokens", "Prompt tokens that were cached.", _TOKENS)
        self._running = Gauge(
            "inference_objective_running_requests", "Routed and not over.", ("model_name",), registry=registry
        )
        attempts = counter(
            "extension_scheduler_attempts", "Decisions, by whether there was an endpoint.", ("status",)
        )
        self._succeeded, self._failed = attempts.labels("success"), attempts.labels("failure")
        self._decision_s = histogram(
            "extension_scheduler_e2e_duration_seconds",
            "From the whole request to its endpoint.",
            _DECISION_S,
            (),
        )
        info = Gauge("inference_extension_info", "Version.", ("commit", "build_ref"), registry=registry)
        info.labels("unknown", f"pointsman-{version('pointsman')}").set(1)
        self._models: dict[str, _OfModel] = {}

    def routed(self, tally: Tally) -> None:
        self._of(tally).running.inc()
        if tally.wanted_s is not None and tally.routed_s is not None:
            self._decision_s.observe(tally.routed_s - tally.wanted_s)
        self._succeeded.inc()

    def ended(self, tally: Tally) -> None:
        of = self._of(tally)
        if tally.routed_s is not None:
            of.running.dec()
        elif tally.refused_status is not None and tally.wanted_s is not None:
            self._failed.inc()
        of.requests.inc()
        of.request_bytes.observe(tally.request_bytes)
        code = _error_code(tally)
        if code is not None:
            self._errors.labels(of.model, of.model, code).inc()
            return
        of.response_bytes.observe(tally.response_bytes)
        if tally.ended_s is not None:
            of.duration_s.observe(tally.ended_s - tally.started_s)
            self._observe_tokens(tally, of, tally.ended_s)

    def _observe_tokens(self, tally: Tally, of: _OfModel, ended_s: float) -> None:
        usage, request = tally.usage, tally.request
        output = usage.completion_tokens if usage is not None else 0
        if usage is not None:
            of.input.observe(usage.prompt_tokens)
            of.output.observe(output)
            if usage.cached_tokens is not None:
                of.cached.observe(usage.cached_tokens)
        if output:
            of.ntpot_s.observe((ended_s - tally.started_s) / output)
        if request is None or not request.stream or tally.first_token_s is None:
            return
        ttft_s = tally.first_token_s - tally.started_s
        of.ttft_s.observe(ttft_s)
        tpot_s = None
        if output > 1:
            tpot_s = (ended_s - tally.first_token_s) / (output - 1)
            of.tpot_s.observe(tpot_s)
        self._count_violations(request, of.model, ttft_s, tpot_s)

    def _count_violations(
        self, request: InferenceRequest, model: str, ttft_s: float, tpot_s: float | None
    ) -> None:
        if request.slo_ttft_s is not None and ttft_s > request.slo_ttft_s:
            self._violations.labels(model, model, "ttft").inc()
        if request.slo_tpot_s is not None and tpot_s is not None and tpot_s > request.slo_tpot_s:
            self._violations.labels(model, model, "tpot").inc()

    def _of(self, tally: Tally) -> _OfModel:
        model = (tally.request.model if tally.request is not None else None) or ""
        of = self._models.get(model)
        if of is None:
            if len(self._models) >= _MOST_MODELS and model != _OTHER:
                model = _OTHER
            of = self._models.get(model) or self._make(model)
            self._models[model] = of
        return of

    def _make(self, model: str) -> _OfModel:
        both = (model, model)
        return _OfModel(
            model,
            self._running.labels(model),
            self._requests.labels(*both),
            *(
                one.labels(*both)
                for one in (
                    self._request_bytes,
                    self._response_bytes,
                    self._duration_s,
                    self._ttft_s,
                    self._tpot_s,
                    self._ntpot_s,
                    self._input,
                    self._output,
                    self._cached,
                )
            ),
        )


def _error_code(tally: Tally) -> str | None:
    if tally.refused_status is not None:
        return str(tally.refused_status)
    if tally.status is not None and tally.status >= 400:
        return str(tally.status)
    if tally.outcome is None or tally.outcome is Outcome.OK:
        return None
    return str(tally.outcome.value)


class PoolCollector(Collector):
    """The state of the pool, read at each scrape."""

    def __init__(self, fleet: Fleet, pool: str) -> None:
        self._fleet = fleet
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        statuses = self._fleet.statuses()
        ready = [one for one in statuses if one.health is Health.HEALTHY and one.spec.role in CAN_ANSWER]
        yield self._gauge("ready_pods", "Endpoints that can be given requests.", float(len(ready)))
        yield self._mean("average_kv_cache_utilization", "Mean use of the KV cache, 0 to 1.", [s.kv_cache_usage for s in ready])  # fmt: skip
        yield self._mean("average_queue_size", "Mean of waiting requests.", [s.waiting for s in ready])
        yield self._mean("average_running_requests", "Mean of running requests.", [s.running for s in ready])
        yield self._queues(ready)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"inference_pool_{name}", text, labels=["name"])
        family.add_metric([self._pool], value)
        return family

    def _mean(self, name: str, text: str, values: Sequence[float]) -> Metric:
        return self._gauge(name, text, sum(values) / len(values) if values else 0.0)

    def _queues(self, ready: Sequence[WorkerStatus]) -> Metric:
        family = GaugeMetricFamily(
            "inference_pool_per_pod_queue_size",
            "Waiting requests of an endpoint.",
            labels=["name", "model_server_pod"],
        )
        for status in ready:
            family.add_metric([self._pool, endpoint_of(status.spec.url)], status.waiting)
        return family
