# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from engine_ext.vllm.reports.aggregate import Aggregator
from engine_ext.vllm.reports.messages import SourceReport
from engine_ext.vllm.storage.account import Account
from engine_ext.vllm.storage.jobs import JobKind, Outcome
from engine_ext.vllm.storage.lookups import Verdict


class Sink(Aggregator):
    """The reports' own aggregation, without its threads."""

    def close(self, timeout_s: float) -> None: ...

    def finished(self, req_id: str, unix_s: float = 0.0) -> None:
        super().finished(req_id, unix_s)

    def storage(self) -> SourceReport:
        self.finished("r")
        (report,) = self.take()
        (source,) = report.sources
        return source


def load(good: tuple[bytes, ...], keys: tuple[bytes, ...], *, late: bool = False) -> Outcome:
    return Outcome(7, JobKind.LOAD, keys, good, 100 * len(good), 0.5, late)


def test_a_block_that_is_asked_for_again_and_again_counts_once() -> None:
    sink = Sink()
    account = Account(sink)
    account.begin("r", "plan")
    for step in range(3):
        for key, last in ((b"a", Verdict.HIT), (b"b", Verdict.HIT), (b"c", Verdict.MISS)):
            account.looked_up("r", key, last if step else Verdict.WAIT, step * 0.1)
        account.step_end(step * 0.1)
    account.loading(7, "r")
    account.ended(load((b"a", b"b"), (b"a", b"b")))
    source = sink.storage()
    assert (source.source, source.kind, source.outcome) == ("storage", "storage", "ok")
    assert (source.asked_blocks, source.hit_blocks, source.missed_blocks) == (3, 2, 1)
    assert (source.moved_blocks, source.bytes, source.transfer_s) == (2, 200, 0.5)
    assert source.lookup_s == 0.1


def test_what_came_of_a_late_load_is_said() -> None:
    sink = Sink()
    account = Account(sink)
    account.begin("r", "plan")
    for key in (b"a", b"b"):
        account.looked_up("r", key, Verdict.HIT, 0.0)
    account.step_end(0.0)
    account.loading(7, "r")
    account.ended(load((b"b",), (b"a", b"b"), late=True))
    source = sink.storage()
    assert (source.moved_blocks, source.outcome) == (1, "deadline")


def test_requests_without_a_plan_are_nobodys_business() -> None:
    sink = Sink()
    account = Account(sink)
    account.looked_up("r", b"a", Verdict.HIT, 0.0)
    account.loading(7, "r")
    account.step_end(0.0)
    account.ended(load((b"a",), (b"a",)))
    account.forget("r")
    sink.finished("r")
    assert sink.take() == []


def test_a_request_that_ends_between_lookup_and_step_leaves_nothing() -> None:
    account = Account(Sink())
    account.begin("r", "plan")
    account.looked_up("r", b"a", Verdict.WAIT, 0.0)
    account.forget("r")
    account.step_end(0.0)
    assert not account._visits
    assert not account._changed
