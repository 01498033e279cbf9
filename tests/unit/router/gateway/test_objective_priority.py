# SPDX-License-Identifier: Apache-2.0
"""A request that names an InferenceObjective has its priority, within what its tenant may ask for."""

from __future__ import annotations

import pytest

from router.gateway.parse import parse_request
from router.gateway.service_terms import ServiceTerms
from router.plan.tenants import ANONYMOUS, Tenant

TERMS = ServiceTerms(objective_priority={"urgent": 50, "batch": -3, "silly": -(2**40)}.get)
CHAT = Tenant("chat", priority=10)


def priority(tenant: Tenant, *headers: tuple[bytes, bytes], terms: ServiceTerms = TERMS) -> int:
    request = parse_request("POST", "/v1/completions", headers, b'{"model": "m", "prompt": "x"}', "r")
    return terms.apply(request, headers, tenant).priority


@pytest.mark.parametrize("name", [b"x-gateway-inference-objective", b"x-llm-d-inference-objective"])
def test_an_objective_stands_for_the_priority_of_who_has_none(name: bytes) -> None:
    assert priority(ANONYMOUS, (name, b"urgent")) == 50
    assert priority(ANONYMOUS, (name, b"batch")) == -3


def test_no_objective_lifts_a_tenant_above_its_own_priority() -> None:
    assert priority(CHAT, (b"x-gateway-inference-objective", b"urgent")) == 10
    assert priority(CHAT, (b"x-gateway-inference-objective", b"batch")) == -3


def test_a_request_may_ask_for_less_than_its_objective_has_but_not_for_more() -> None:
    objective = (b"x-gateway-inference-objective", b"urgent")
    assert priority(ANONYMOUS, objective, (b"x-pointsman-priority", b"7")) == 7
    assert priority(ANONYMOUS, objective, (b"x-pointsman-priority", b"70")) == 50


def test_an_unknown_objective_changes_nothing() -> None:
    assert priority(CHAT, (b"x-gateway-inference-objective", b"\xff")) == 10
    assert priority(CHAT, (b"x-gateway-inference-objective", b"urgent"), terms=ServiceTerms()) == 10


def test_a_priority_beyond_all_bounds_is_the_lowest_there_is() -> None:
    assert -(2**40) < priority(ANONYMOUS, (b"x-gateway-inference-objective", b"silly")) < 0
