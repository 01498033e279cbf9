# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from engine_ext.vllm.storage.announcements import CHANGES_PER_REPORT_KEY, Announcements, Change
from engine_ext.vllm.storage.catalogue import FileId


def file(number: int, folder: str = "mine") -> FileId:
    return FileId(folder, f"{number:08x}")


def key(number: int) -> bytes:
    return bytes.fromhex(f"{number:08x}")


def drained(announcements: Announcements) -> list[Change]:
    changes = []
    while announcements.pending:
        changes += announcements.take()
    return changes


def test_changes_come_in_their_order_and_alike_ones_together() -> None:
    announcements = Announcements(10, "mine", lambda _: True)
    for number, removed in ((1, False), (2, False), (1, True), (3, False)):
        announcements.changed(file(number), removed=removed)
    assert announcements.take() == [
        Change((key(1), key(2)), removed=False),
        Change((key(1),), removed=True),
        Change((key(3),), removed=False),
    ]
    assert not announcements.pending


def test_a_step_says_no_more_than_its_share() -> None:
    announcements = Announcements(3, "mine", lambda _: True)
    files = [file(number) for number in range(1000)]
    for one in files:
        announcements.changed(one, removed=False)
    announcements.begin_report(files)
    said = []
    while announcements.pending:
        step = announcements.take()
        assert sum(len(change.keys) for change in step) <= 3 * CHANGES_PER_REPORT_KEY + 3
        said += [key for change in step for key in change.keys]
    assert said == [key(number) for number in range(1000)] * 2


def test_a_report_leaves_out_what_has_left() -> None:
    there = {file(number) for number in range(10)}
    announcements = Announcements(4, "mine", lambda one: one in there)
    announcements.begin_report(sorted(there))
    first = announcements.take()
    there -= {file(5), file(9)}
    assert [k for change in [*first, *drained(announcements)] for k in change.keys] == [
        key(number) for number in range(10) if number not in (5, 9)
    ]


def test_nothing_is_said_of_files_of_another_fingerprint() -> None:
    announcements = Announcements(4, "mine", lambda _: True)
    announcements.changed(file(1, "other"), removed=False)
    announcements.begin_report([file(2, "other"), file(3)])
    assert drained(announcements) == [Change((key(3),), removed=False)]
