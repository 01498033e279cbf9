# SPDX-License-Identifier: Apache-2.0
"""Names that the Endpoint Picker Protocol and its users agree on.

Protocol 1.0.0: kubernetes-sigs/gateway-api-inference-extension, ``docs/proposals/004-endpoint-picker-protocol``. The
``x-llm-d-*`` and sidecar headers: llm-d/llm-d-router, ``pkg/common``.
"""

from __future__ import annotations

DESTINATION = "x-gateway-destination-endpoint"
"""Header and key: ``ip:port``, or several in order, joined by commas."""
DESTINATION_NAMESPACE = "envoy.lb"
SCORES_KEY = "x-gateway-destination-endpoint-scores"
"""``ip:port`` to a number, larger is better. Not of the protocol, but of llm-d-router, and proposed upstream."""
SERVED_KEY = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"

DROPPED_REASON = b"x-llm-d-request-dropped-reason"

PREFILLER = b"x-prefiller-host-port"
"""A sidecar of the decode worker sends the prefill leg there."""
STEERING = frozenset(
    {
        PREFILLER,
        b"x-encoder-hosts-ports",
        b"x-data-parallel-host-port",
        b"x-kv-cache-source-host-port",
        b"x-gateway-destination-endpoint",
    }
)
"""What sidecars and proxies obey: never taken from a client, who could point them at any host."""

ALIASES = {
    b"x-llm-d-slo-ttft-ms": b"x-slo-ttft-ms",
    b"x-llm-d-slo-tpot-ms": b"x-slo-tpot-ms",
}
"""Newer names of headers that the gateway reads too."""

TEST_SELECTION = b"test-epp-endpoint-selection"
"""Of a request: endpoints to choose among (the conformance tests of gateways send it)."""
TEST_SERVED = b"x-conformance-test-served-endpoint"
"""Of an answer: the endpoint that the proxy says it came from."""

PROCESSOR_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
PROCESS_METHOD = f"/{PROCESSOR_SERVICE}/Process".encode()
LIVENESS_SERVICE = "liveness"
READY_SERVICES = ("readiness", PROCESSOR_SERVICE, "inference-extension", "")
