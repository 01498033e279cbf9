# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import HashKey
from router.config_tenants import TenantEntry, TenantsConfig
from router.errors import InvalidApiKey
from router.plan.tenants import ANONYMOUS, Tenant, Tenants

SECRET = HashKey(bytes(range(16)))
ENTRIES = (
    TenantEntry("a", ("key-of-a", "second-of-a"), weight=2.0, priority=5, max_in_flight=3),
    TenantEntry("b", ("key-of-b",)),
    TenantEntry("open", ("key-of-open",), shared_prefix=True),
)
_SALTS = st.none() | st.text(st.characters(), min_size=1, max_size=8)


def tenants(*, require: bool = False, secret: HashKey = SECRET) -> Tenants:
    return Tenants(TenantsConfig(require, ENTRIES), secret)


def named(name: str, secret: HashKey = SECRET) -> Tenant:
    tenant = tenants(secret=secret).get(name)
    assert tenant is not None
    return tenant


def test_a_tenant_is_known_by_any_of_its_keys() -> None:
    known = tenants()
    assert {known.of_key(key).name for key in (b"key-of-a", b"second-of-a")} == {"a"}
    tenant = known.of_key(b"key-of-a")
    assert (tenant.weight, tenant.priority, tenant.max_in_flight) == (2.0, 5, 3)


@pytest.mark.parametrize("key", [None, b"", b"key-of-c", b"a", b"key-of-a\x00", b"KEY-OF-A"])
def test_without_a_known_key_one_is_anonymous_or_refused(key: bytes | None) -> None:
    assert tenants().of_key(key) is ANONYMOUS
    with pytest.raises(InvalidApiKey):
        tenants(require=True).of_key(key)


def test_nothing_that_is_kept_shows_a_key() -> None:
    kept = repr(vars(tenants()))
    assert "key-of-a" not in kept
    assert SECRET.secret.hex() not in kept


def test_the_entry_of_the_anonymous_applies_to_whoever_has_no_key() -> None:
    config = TenantsConfig(False, (TenantEntry("anonymous", weight=0.5),))
    tenant = Tenants(config, SECRET).of_key(None)
    assert (tenant.name, tenant.weight) == ("anonymous", 0.5)
    assert tenant.cache_salt(None)


@given(st.sampled_from(["a", "b"]), _SALTS, st.sampled_from(["a", "b", "open"]), _SALTS)
def test_no_two_of_tenant_and_client_salt_share_a_salt(
    one: str, given_one: str | None, other: str, given_other: str | None
) -> None:
    same = named(one).cache_salt(given_one) == named(other).cache_salt(given_other)
    assert same == ((one, given_one) == (other, given_other))


def test_another_tenant_s_salt_as_one_s_own_leads_nowhere() -> None:
    theirs = named("a").cache_salt(None)
    assert named("b").cache_salt(theirs) != theirs
    assert named("a").cache_salt(theirs) != theirs


def test_a_salt_tells_neither_the_name_nor_the_client_s_salt_and_depends_on_the_deployment_s_key() -> None:
    salt = named("a").cache_salt("client")
    assert salt is not None
    assert len(salt) == 32
    # vLLM's validate_cache_salt: at most 128 characters, none of @ / \ NUL.
    assert set(salt) <= set("0123456789abcdef")
    assert salt == named("a").cache_salt("client")
    assert salt != named("a", HashKey(bytes(16))).cache_salt("client")


def test_who_shares_prefixes_keeps_the_client_s_salt_or_none() -> None:
    assert named("open").cache_salt(None) is None
    assert named("open").cache_salt("s") == "s"
    assert ANONYMOUS.cache_salt("s") == "s"
