# SPDX-License-Identifier: Apache-2.0
"""Watches that break, lie or end: the fleet is right within a second after each."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from eventually import eventually
from fake_kube import FakeKube, pod, pool

from router.fleet.discovery.informer import Pace

from .conftest import Follow, Followed

PAUSES_S = 0.3
"""Less than six pauses that begin at 20 ms, halved at most by chance, and double."""


def seen(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return condition()

    return look


async def following(kube: FakeKube, follow: Follow, **settings: object) -> Followed:
    kube.put("inferencepools", pool())
    kube.put("pods", pod("a", "10.0.0.1"))
    kube.put("pods", pod("b", "10.0.0.2"))
    followed = await follow(**settings)
    await kube.until_watched("pods")
    await kube.until_watched("inferencepools")
    return followed


async def test_a_deletion_lost_while_the_watch_was_broken_leaves_no_ghost(
    kube: FakeKube, follow: Follow
) -> None:
    followed = await following(kube, follow)
    assert kube.break_watches()
    kube.delete("pods", "a")
    kube.compact()
    await followed.promptly("10.0.0.2:8000")
    assert kube.lists_of("pods") == 2


async def test_a_server_that_is_away_changes_nothing_and_is_found_again(
    kube: FakeKube, follow: Follow
) -> None:
    followed = await following(kube, follow)
    port = urlsplit(kube.url).port or 0
    await kube.close()
    await followed.promptly_so(followed.discovery.troubles)
    assert followed.taken() == {"10.0.0.1:8000", "10.0.0.2:8000"}
    kube.delete("pods", "a")
    await kube.listen(port)
    await followed.promptly("10.0.0.2:8000")
    await followed.promptly_so(lambda: not followed.discovery.troubles())


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_a_server_that_refuses_is_asked_again(kube: FakeKube, follow: Follow, status: int) -> None:
    followed = await following(kube, follow)
    kube.refuse = status
    kube.break_watches()
    await followed.promptly_so(lambda: any(f": {status}: " in one for one in followed.discovery.troubles()))
    kube.put("pods", pod("c", "10.0.0.3"))
    kube.refuse = None
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")


async def test_a_token_that_expired_is_read_again(kube: FakeKube, follow: Follow, tmp_path: Path) -> None:
    followed = await following(kube, follow)
    kube.token = "another"  # noqa: S105
    kube.kubeconfig(tmp_path)
    kube.break_watches()
    kube.put("pods", pod("c", "10.0.0.3"))
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")


async def test_410_within_a_watch_leads_to_a_new_list(kube: FakeKube, follow: Follow) -> None:
    followed = await following(kube, follow)
    kube.compact()
    kube.say_gone("pods")
    await followed.promptly_so(lambda: kube.lists_of("pods") == 2)
    kube.delete("pods", "b")
    await followed.promptly("10.0.0.1:8000")
    assert followed.discovery.counts()["failures"] == 0


async def test_410_for_a_watch_that_is_taken_up_leads_to_a_new_list(kube: FakeKube, follow: Follow) -> None:
    followed = await following(kube, follow)
    kube.end_watches()
    kube.delete("pods", "b")
    kube.compact()
    await followed.promptly("10.0.0.1:8000")


async def test_a_watch_that_ends_in_order_is_taken_up_where_it_ended(kube: FakeKube, follow: Follow) -> None:
    followed = await following(kube, follow)
    kube.put("pods", pod("c", "10.0.0.3"))
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
    version = kube.get("pods", "c")["metadata"]["resourceVersion"]
    kube.end_watches()
    kube.delete("pods", "a")
    await followed.promptly("10.0.0.2:8000", "10.0.0.3:8000")
    assert kube.lists_of("pods") == 1
    assert int(kube.watched_from("pods")[1]) >= int(version)


async def test_a_bookmark_moves_the_version_on(kube: FakeKube, follow: Follow) -> None:
    followed = await following(kube, follow)
    kube.bookmark()
    kube.put("pods", pod("c", "10.0.0.3"))
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
    kube.put("inferencepools", pool())
    kube.bookmark()
    kube.compact()  # the version of the last pod is gone; that of the bookmark is not
    kube.end_watches()
    kube.put("pods", pod("d", "10.0.0.4"))
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000")
    assert kube.lists_of("pods") == 1


async def test_a_quiet_watch_is_kept_alive_by_bookmarks_alone(kube: FakeKube, follow: Follow) -> None:
    followed = await following(kube, follow)
    for _ in range(3):
        kube.bookmark()
    kube.end_watches()
    await followed.promptly_so(lambda: len(kube.watched_from("pods")) == 2)
    assert int(kube.watched_from("pods")[1]) > int(kube.watched_from("pods")[0])
    assert kube.lists_of("pods") == 1


async def test_what_is_added_twice_is_there_once(kube: FakeKube, follow: Follow) -> None:
    followed = await following(kube, follow)
    for _ in range(3):
        kube.say("pods", "ADDED", kube.get("pods", "a"))
    kube.put("pods", pod("c", "10.0.0.3"))
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
    assert followed.told == []


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"type": "ADDED"}',
        '{"type": "HELLO", "object": {}}',
        '{"type": "ADDED", "object": {"metadata": 1}}',
    ],
)
async def test_nonsense_on_a_watch_is_survived(kube: FakeKube, follow: Follow, line: str) -> None:
    followed = await following(kube, follow)
    kube.say_raw("pods", line)
    kube.delete("pods", "b")
    await followed.promptly("10.0.0.1:8000")


async def test_an_object_that_cannot_be_read_is_left_out_of_its_list(kube: FakeKube, follow: Follow) -> None:
    broken = pod("broken", "10.0.0.9")
    broken["status"]["containerStatuses"] = "none"
    kube.put("pods", broken)
    followed = await following(kube, follow)
    assert followed.taken() == {"10.0.0.1:8000", "10.0.0.2:8000"}
    assert followed.discovery.counts()["rejected"] == 1


async def test_a_server_that_ends_every_watch_at_once_is_not_asked_in_a_tight_circle(
    kube: FakeKube, follow: Follow
) -> None:
    followed = await following(kube, follow, pace=Pace(60.0, 0.02, 1.0))
    kube.hasty = True
    began_s = time.monotonic()
    kube.end_watches()
    kube.put("pods", pod("c", "10.0.0.3"))
    await followed.promptly("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
    await eventually(seen(lambda: len(kube.watched_from("pods")) >= 8), "watches")
    assert time.monotonic() - began_s > PAUSES_S
    assert kube.lists_of("pods") == 1


async def test_versions_that_are_gone_as_soon_as_they_are_told_are_not_asked_for_in_a_tight_circle(
    kube: FakeKube, follow: Follow
) -> None:
    kube.stale = True
    kube.put("inferencepools", pool())
    kube.put("pods", pod("a", "10.0.0.1"))
    followed = await follow(pace=Pace(60.0, 0.02, 1.0))
    began_s, lists = time.monotonic(), kube.lists_of("pods")
    await eventually(seen(lambda: kube.lists_of("pods") >= lists + 6), "lists")
    assert time.monotonic() - began_s > PAUSES_S
    kube.put("pods", pod("b", "10.0.0.2"))
    kube.stale = False
    await eventually(seen(lambda: len(followed.taken()) == 2), "both pods")


async def test_a_start_does_not_wait_for_a_server_for_good(kube: FakeKube, follow: Follow) -> None:
    kube.put("inferencepools", pool())
    kube.put("pods", pod("a", "10.0.0.1"))
    kube.refuse = 503
    followed = await follow(start_timeout_s=0.1)
    assert followed.taken() == set()
    assert followed.discovery.troubles()
    kube.refuse = None
    await followed.promptly("10.0.0.1:8000")


async def test_long_lists_come_in_pages(kube: FakeKube, follow: Follow) -> None:
    kube.page_limit = 7
    kube.put("inferencepools", pool())
    for number in range(50):
        kube.put("pods", pod(f"p{number}", f"10.0.1.{number}"))
    followed = await follow()
    assert len(followed.taken()) == 50
    assert kube.lists_of("pods") == 8
