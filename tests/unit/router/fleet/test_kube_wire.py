# SPDX-License-Identifier: Apache-2.0
"""Lists and watch lines as the API server writes them."""

from __future__ import annotations

import json

import pytest
from fake_kube import pod

from router.fleet.discovery.objects import Pod
from router.fleet.discovery.watching import ApiError, Lines, What, Wire


def test_a_page_has_its_items_version_and_token() -> None:
    body = {
        "metadata": {"resourceVersion": "7", "continue": "t"},
        "items": [pod("a", "10.0.0.1"), {"metadata": 3}],
    }
    page = Wire(Pod).page(json.dumps(body).encode())
    assert [one.metadata.name for one in page.items] == ["a"]
    assert (page.version, page.more, page.malformed) == ("7", "t", 1)
    assert Wire(Pod).page(b'{"metadata": {}, "items": null}').items == []


def test_bookmarks_have_a_version_and_nothing_else() -> None:
    line = b'{"type":"BOOKMARK","object":{"kind":"Pod","metadata":{"resourceVersion":"9","creationTimestamp":null}}}'
    event = Wire(Pod).event(line)
    assert (event.what, event.version, event.one) == (What.BOOKMARK, "9", None)


def test_an_error_event_is_an_error_with_its_code() -> None:
    with pytest.raises(ApiError) as gone:
        Wire(Pod).event(b'{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old"}}')
    assert gone.value.status == 410


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"<html>", b'{"items": 3, "metadata": {}}'])
def test_what_is_no_list_is_an_error(body: bytes) -> None:
    with pytest.raises(ApiError):
        Wire(Pod).page(body)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_are_the_same_however_they_are_cut(size: int) -> None:
    stream, lines, found = b'{"a":1}\n\n{"b":2}\r\n{"c":3}\n{"d"', Lines(), []
    for start in range(0, len(stream), size):
        found += list(lines.feed(stream[start : start + size]))
    assert [line.strip() for line in found] == [b'{"a":1}', b'{"b":2}', b'{"c":3}']


def test_a_line_without_end_is_not_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.discovery.watching.MAX_LINE_BYTES", 100)
    with pytest.raises(ApiError):
        list(Lines().feed(b"x" * 101))
