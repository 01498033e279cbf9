# SPDX-License-Identifier: Apache-2.0
"""Workers from a file that changes; a bad one changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from eventually import eventually

from router.config import load
from router.config_fleet import FleetConfig
from router.errors import ConfigError
from router.extproc.app import PickerApp
from router.extproc.endpoints import check_endpoints
from router.fleet.discovery.file import FileDiscovery
from router.fleet.fleet import Fleet
from router.fleet.worker import WorkerSpec

ONE = "- url: http://10.0.0.1:8000\n"
TWO = "workers:\n- url: http://10.0.0.1:8000\n- {url: 'http://10.0.0.2:8000', id: second, role: both}\n"
Open = Callable[..., Awaitable[tuple[Fleet, FileDiscovery]]]


@pytest.fixture
async def open_file(tmp_path: Path) -> AsyncIterator[Open]:
    started: list[FileDiscovery] = []

    async def make(text: str, *specs: WorkerSpec) -> tuple[Fleet, FileDiscovery]:
        (tmp_path / "workers.yaml").write_text(text)
        fleet = Fleet(specs, FleetConfig())
        discovery = FileDiscovery(str(tmp_path / "workers.yaml"), fleet, 0.01)
        await discovery.start()
        started.append(discovery)
        return fleet, discovery

    yield make
    for one in started:
        await one.stop()


def names(fleet: Fleet) -> list[str]:
    return [status.spec.id for status in fleet.statuses()]


async def until(condition: Callable[[], object], what: str) -> None:
    async def look() -> bool:
        return bool(condition())

    await eventually(look, what)


async def test_workers_follow_the_file(open_file: Open, tmp_path: Path) -> None:
    fleet, discovery = await open_file(ONE)
    assert names(fleet) == ["10.0.0.1:8000"]
    (tmp_path / "workers.yaml").write_text(TWO)
    await until(lambda: names(fleet) == ["10.0.0.1:8000", "second"], "two workers")
    replacement = tmp_path / "new"
    replacement.write_text("- {url: 'http://10.0.0.3:8000', id: second}\n")
    replacement.rename(tmp_path / "workers.yaml")
    await until(lambda: names(fleet) == ["second"], "one worker")
    assert fleet.statuses()[0].spec.url == "http://10.0.0.3:8000"
    (tmp_path / "workers.yaml").write_text("")
    await until(lambda: not names(fleet), "no worker")
    assert discovery.troubles() == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- url: ftp://10.0.0.1\n", "[0].url"),
        ("- url: http://10.0.0.1\n- {url: 'http://10.0.0.2', rank: 2}\n", "[1]"),
        ("- {url: 'http://10.0.0.1', id: x}\n- {url: 'http://10.0.0.2', id: x}\n", "[1].id"),
        ("a: [", "fleet.file"),
        ("text", "fleet.file"),
    ],
)
async def test_a_bad_file_keeps_the_last_good_list(
    open_file: Open, tmp_path: Path, text: str, named: str
) -> None:
    fleet, discovery = await open_file(TWO)
    (tmp_path / "workers.yaml").write_text(text)
    await until(discovery.troubles, "a trouble")
    assert named in discovery.troubles()[0]
    assert len(names(fleet)) == 2
    assert discovery.counts() == {"workers": 2, "rejected": 0, "lists": 1, "failures": 1}
    (tmp_path / "workers.yaml").write_text(ONE)
    await until(lambda: len(names(fleet)) == 1, "one worker")
    assert discovery.troubles() == []


async def test_a_file_that_is_away_for_a_while_changes_nothing(open_file: Open, tmp_path: Path) -> None:
    fleet, discovery = await open_file(ONE)
    file = tmp_path / "workers.yaml"
    file.rename(tmp_path / "elsewhere")
    await until(discovery.troubles, "a trouble")
    assert len(names(fleet)) == 1
    (tmp_path / "elsewhere").rename(file)
    await until(lambda: not discovery.troubles(), "no trouble")


def test_a_service_does_not_start_with_a_bad_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        FileDiscovery(str(tmp_path / "none"), Fleet((), FleetConfig()))


async def test_a_name_from_elsewhere_is_left_alone(open_file: Open, tmp_path: Path) -> None:
    static = WorkerSpec("second", "http://10.9.9.9:8000")
    fleet, discovery = await open_file(TWO, static)
    assert {status.spec.url for status in fleet.statuses()} == {
        "http://10.9.9.9:8000",
        "http://10.0.0.1:8000",
    }
    assert discovery.troubles() == ["worker second is there twice"]
    (tmp_path / "workers.yaml").write_text("[]")
    await until(lambda: names(fleet) == ["second"], "the static worker alone")
    assert fleet.statuses()[0].spec is static


async def test_a_changed_entry_keeps_the_drain_of_its_worker(open_file: Open, tmp_path: Path) -> None:
    fleet, _ = await open_file(TWO)
    fleet.set_drain("second", True)
    (tmp_path / "workers.yaml").write_text(TWO.replace("10.0.0.2", "10.0.0.4"))
    await until(lambda: fleet.get("second").spec.url.startswith("http://10.0.0.4"), "the new address")  # type: ignore[union-attr]
    assert fleet.get("second").health.value == "draining"  # type: ignore[union-attr]


def test_the_endpoint_picker_takes_no_names_of_hosts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(ONE + "- url: http://worker.example:8000\n")
    config = load(
        None, environ={}, overrides={"fleet.file": str(path), "index.hash_key_file": str(tmp_path / "key")}
    )
    with pytest.raises(ConfigError, match=r"workers\.yaml\[1\]\.url.*worker\.example.*IP:PORT"):
        PickerApp(config)


async def test_a_name_that_comes_later_leaves_the_picker_s_workers_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(ONE)
    fleet = Fleet((), FleetConfig())
    discovery = FileDiscovery(str(path), fleet, 0.01, check_endpoints)
    await discovery.start()
    path.write_text("- url: http://worker.example:8000\n")
    await until(discovery.troubles, "a file that is not taken")
    assert names(fleet) == ["10.0.0.1:8000"]
    await discovery.stop()
