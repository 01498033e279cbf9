# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from router.config_fleet import WorkerEntry
from router.errors import ConfigError
from router.extproc.endpoints import Endpoints, check_endpoints, endpoint_of
from router.extproc.subset import entries_of
from router.fleet.snapshot import Snapshot
from router.fleet.worker import WorkerSpec, WorkerStatus


def snapshot(*urls: str) -> Snapshot:
    return Snapshot([WorkerStatus(WorkerSpec(f"w{i}", url)) for i, url in enumerate(urls)])


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("https://10.0.0.1", "10.0.0.1:443"),
        ("http://[fd00:0:0::1]:8000", "[fd00::1]:8000"),
    ],
)
def test_an_endpoint_is_the_address_of_a_url(url: str, endpoint: str) -> None:
    assert endpoint_of(url) == endpoint


def test_ports_of_one_pod_are_endpoints_of_their_own() -> None:
    urls = [f"http://10.0.0.{pod}:{8000 + rank}" for pod in (1, 2) for rank in range(8)]
    endpoints = Endpoints(lambda: everybody)
    everybody = snapshot(*urls)
    assert endpoints.worker_at("10.0.0.1:8003") == "w3"
    assert endpoints.endpoint("w3") == "10.0.0.1:8003"
    assert endpoints.workers_at(["10.0.0.1:8003", "10.0.0.2:8000", "10.0.0.3:8000"]) == {"w3", "w8"}
    assert endpoints.workers_at(["10.0.0.2"]) == {f"w{i}" for i in range(8, 16)}
    assert endpoints.workers_at(["10.0.0.1:9999", "", "x", ":", "[", "10.0.0.1:"]) == frozenset()


def test_ipv6_is_one_address_however_it_is_written() -> None:
    everybody = snapshot("http://[fd00::1]:8000")
    endpoints = Endpoints(lambda: everybody)
    for text in ("[fd00::1]:8000", "[FD00:0:0::1]:8000", "[fd00::1]", "fd00::1", "fd00:0::1"):
        assert endpoints.workers_at([text]) == {"w0"}, text


def test_a_changed_fleet_is_seen_at_once() -> None:
    everybody = snapshot("http://10.0.0.1:8000")
    endpoints = Endpoints(lambda: everybody)
    assert endpoints.worker_at("10.0.0.2:8000") is None
    everybody = snapshot("http://10.0.0.2:8000")
    assert endpoints.worker_at("10.0.0.2:8000") == "w0"
    assert endpoints.worker_at("10.0.0.1:8000") is None


@pytest.mark.parametrize("url", ["http://worker.example:8000", "http://10.0.0.1:8000/prefix"])
def test_a_worker_that_no_proxy_can_be_sent_to_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.workers\[1\]\.url"):
        check_endpoints([WorkerEntry(url="http://10.0.0.1:8000"), WorkerEntry(url=url)])


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        ("a:1, b:2,,", ("a:1", "b:2")),
        (["a:1", " b:2 "], ("a:1", "b:2")),
        (["a:1,b:2"], ("a:1", "b:2")),
        ([], ()),
        ("", ()),
        (None, ()),
        (5.0, ()),
        ([None, 5.0], ()),
    ],
)
def test_subset_hints_come_in_two_encodings(value: object, entries: tuple[str, ...]) -> None:
    assert entries_of(value) == entries
