# SPDX-License-Identifier: Apache-2.0
"""Requests in flight by tenant, over several processes."""

from __future__ import annotations

from pathlib import Path

from router.config_tenants import TenantEntry, TenantsConfig
from router.processes.tenant_counts import TenantCounts, TenantTable, tenant_names

NAMES = ["anonymous", "batch", "chat"]


def test_tenants_are_in_one_order_and_the_anonymous_is_always_there() -> None:
    entries = (TenantEntry(name="chat", api_keys=("k",)), TenantEntry(name="batch", api_keys=("j",)))
    assert tenant_names(TenantsConfig(entries=entries)) == NAMES
    assert tenant_names(TenantsConfig()) == ["anonymous"]


def test_each_process_counts_its_own_and_sees_all(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    table = TenantTable(path, len(NAMES), 2)
    one, two = TenantCounts(path, NAMES, 0), TenantCounts(path, NAMES, 1)
    one.add("chat", 1)
    one.add("chat", 1)
    two.add("chat", 1)
    two.add("batch", 1)
    assert (one.here("chat"), one.everywhere("chat"), two.everywhere("chat")) == (2, 3, 3)
    assert list(one.tenants()) == ["chat"]
    one.add("chat", -1)
    assert two.everywhere("chat") == 2
    table.clear(1)  # it died
    assert (one.everywhere("chat"), one.everywhere("batch")) == (1, 0)
    for each in (one, two, table):
        each.close()
