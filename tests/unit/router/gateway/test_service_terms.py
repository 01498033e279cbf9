# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import HashKey
from router.config_tenants import TenantEntry, TenantsConfig
from router.errors import HeaderRefused, InvalidApiKey
from router.gateway.body import insert_keys
from router.gateway.parse import parse_object, parse_request
from router.gateway.service_terms import ServiceTerms, without_key
from router.plan.tenants import ANONYMOUS, Tenant, Tenants
from router.request import InferenceRequest
from router.salting import with_salt

Pairs = list[tuple[bytes, bytes]]
ENTRIES = (
    TenantEntry("a", ("key-of-a",), priority=5),
    TenantEntry("open", ("key-of-open",), shared_prefix=True),
)


def terms(*, require: bool = False, slo_ttft_s: float | None = None) -> ServiceTerms:
    tenants = Tenants(TenantsConfig(require, ENTRIES), HashKey(bytes(16)))
    return ServiceTerms(tenants, slo_ttft_s)


def request(
    *headers: tuple[bytes, bytes],
    tenant: str = "anonymous",
    body: bytes = b'{"prompt":"x"}',
    path: str = "/v1/completions",
    method: str = "POST",
    slo_ttft_s: float | None = None,
) -> InferenceRequest:
    pairs, reader = list(headers), terms(slo_ttft_s=slo_ttft_s)
    known = reader.named(tenant)
    assert known is not None
    return reader.apply(parse_request(method, path, pairs, body, "r1"), pairs, known)


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ([(b"authorization", b"Bearer key-of-a")], "a"),
        ([(b"authorization", b"bearer  key-of-a ")], "a"),
        ([(b"x-api-key", b"key-of-a")], "a"),
        ([(b"authorization", b"Basic key-of-a")], "anonymous"),
        ([(b"authorization", b"key-of-a")], "anonymous"),
        ([(b"authorization", b"Bearer ")], "anonymous"),
        ([(b"authorization", b"Bearer other-key"), (b"x-api-key", b"key-of-a")], "anonymous"),
        ([(b"authorization", b"Basic zzz"), (b"x-api-key", b"key-of-a")], "a"),
        ([], "anonymous"),
    ],
)
def test_the_key_names_the_tenant(headers: Pairs, name: str) -> None:
    assert terms().tenant(headers).name == name
    if name == "anonymous":
        with pytest.raises(InvalidApiKey):
            terms(require=True).tenant(headers)


def test_a_known_key_ends_here_and_an_unknown_one_may_be_the_worker_s() -> None:
    headers = [(b"authorization", b"Bearer key-of-a"), (b"x-api-key", b"k"), (b"accept", b"*/*")]
    assert without_key(headers, terms().tenant(headers)) == [(b"accept", b"*/*")]
    assert without_key(headers, ANONYMOUS) is headers


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"250", 0.25), (b" 1.5 ", 0.0015), (b".5", 0.0005), (b"2e3", 2.0), (b"1.", 0.001)]
)
def test_milliseconds_become_seconds(value: bytes, seconds: float) -> None:
    one = request((b"x-slo-ttft-ms", value), (b"x-slo-tpot-ms", value))
    assert (one.slo_ttft_s, one.slo_tpot_s) == pytest.approx((seconds, seconds))


def test_the_configured_time_holds_where_a_request_says_nothing() -> None:
    assert request(slo_ttft_s=2.0).slo_ttft_s == 2.0
    assert request((b"x-slo-ttft-ms", b"100"), slo_ttft_s=2.0).slo_ttft_s == 0.1
    assert request().slo_ttft_s is None


@pytest.mark.parametrize("name", [b"x-slo-ttft-ms", b"x-slo-tpot-ms"])
@pytest.mark.parametrize(
    "value", [b"0", b"-1", b"fast", b"", b"inf", b"nan", b"1_0", b"1e999", b"0x1", b"1,5", b"\xff"]
)
def test_what_is_no_time_is_refused_by_the_name_of_its_header(name: bytes, value: bytes) -> None:
    with pytest.raises(HeaderRefused, match=name.decode()):
        request((name, value))


@pytest.mark.parametrize(
    ("value", "priority"),
    [(None, 5), (b"3", 3), (b"5", 5), (b"6", 5), (b"-7", -7), (b"+2", 2), (b"-999999999", -100)],
)
def test_a_request_asks_for_no_more_than_its_tenant_s_priority(value: bytes | None, priority: int) -> None:
    headers = [] if value is None else [(b"x-pointsman-priority", value)]
    assert request(*headers, tenant="a").priority == priority


@pytest.mark.parametrize("value", [b"high", b"1.5", b"", b"1e3", b"9" * 10])
def test_what_is_no_priority_is_refused(value: bytes) -> None:
    with pytest.raises(HeaderRefused, match="x-pointsman-priority"):
        request((b"x-pointsman-priority", value))


@given(st.binary(max_size=12), st.sampled_from([b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"x-pointsman-priority"]))
def test_any_bytes_are_either_taken_or_refused(value: bytes, name: bytes) -> None:
    try:
        one = request((name, value))
    except HeaderRefused:
        return
    assert all(time is None or 0 < time < float("inf") for time in (one.slo_ttft_s, one.slo_tpot_s))


def salted(body: bytes, tenant: str = "a", path: str = "/v1/completions", method: str = "POST") -> bytes:
    one = request(tenant=tenant, body=body, path=path, method=method)
    return insert_keys(one.body, with_salt(one, {}))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("body", [b"{}", b'{"cache_salt":"own"}', b'{"cache_salt":7}', b'{"cache_salt":""}'])
def test_the_salt_that_a_worker_reads_is_the_tenant_s(path: str, body: bytes) -> None:
    document = parse_object(salted(body, path=path))
    assert document is not None
    known = terms().named("a")
    assert isinstance(known, Tenant)
    own = "own" if b"own" in body else None
    assert document["cache_salt"] == known.cache_salt(own)
    assert salted(body, path=path).startswith(body[:-1])


@pytest.mark.parametrize("tenant", ["anonymous", "open"])
def test_who_shares_prefixes_has_its_body_left_as_it_is(tenant: str) -> None:
    body = b'{"cache_salt":"own"}'
    assert salted(body, tenant) is body
    assert request(tenant=tenant, body=body).cache_salt == "own"


def test_an_object_that_only_the_worker_can_read_gets_the_salt_too() -> None:
    deep = b'\xef\xbb\xbf {"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert request(body=deep, path="/v1/responses").document is None
    assert b'"cache_salt":"' in salted(deep, path="/v1/responses")
    assert b'"cache_salt":"' in salted(deep)


def test_bodies_that_take_no_key_and_other_methods_are_left_alone() -> None:
    for body in (b"", b"--boundary\r\n", b"[1]"):
        assert salted(body, path="/v1/audio/transcriptions") is body
    assert salted(b"{}", path="/v1/responses/1", method="DELETE") == b"{}"


def test_the_salt_joins_other_keys() -> None:
    one = request(tenant="a")
    assert with_salt(one, {"kv_transfer_params": {}}) == {
        "kv_transfer_params": {},
        "cache_salt": one.cache_salt,
    }
