# SPDX-License-Identifier: Apache-2.0
"""One call to a router takes no longer than its limit, whatever each step of it took."""

from __future__ import annotations

import http.client
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.vllm.reports import post
from engine_ext.vllm.reports.post import Posted, post_json


class SlowRouter:
    """Stands for an HTTPConnection; each step takes so many seconds of its own clock, or fails at its limit."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.now_s = 100.0
        self.limits_s: list[float] = []
        self.closed = False
        self.sock = SimpleNamespace(settimeout=self.limits_s.append)

    def __call__(self, host: str, port: int | None, timeout: float) -> SlowRouter:
        self.limits_s.append(timeout)
        return self

    def connect(self) -> None:
        self._step()

    def request(self, *_: Any) -> None:
        self._step()

    def getresponse(self) -> Any:
        self._step()
        return SimpleNamespace(status=200, reason="OK", close=lambda: None)

    def close(self) -> None:
        self.closed = True

    def _step(self) -> None:
        took_s = min(self.step_s, self.limits_s[-1])
        self.now_s += took_s
        if took_s < self.step_s:
            raise TimeoutError("timed out")


def called(monkeypatch: pytest.MonkeyPatch, step_s: float) -> tuple[SlowRouter, Posted, float]:
    router = SlowRouter(step_s)
    client = SimpleNamespace(
        HTTPConnection=router, HTTPSConnection=router, HTTPException=http.client.HTTPException
    )
    monkeypatch.setattr(post, "http", SimpleNamespace(client=client))
    monkeypatch.setattr(post, "time", SimpleNamespace(monotonic=lambda: router.now_s))
    began_s = router.now_s
    posted = post_json("http://router:1/reports", b"{}", None, 10.0)
    return router, posted, router.now_s - began_s


def test_what_one_step_took_is_missing_from_the_limit_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    router, posted, took_s = called(monkeypatch, 3.0)
    assert (posted, took_s) == (Posted(200, "OK"), 9.0)
    assert router.limits_s == [10.0, 7.0, 4.0]
    assert router.closed


@pytest.mark.parametrize("step_s", [4.0, 6.0, 11.0])
def test_a_router_that_is_slow_in_every_step_is_given_up_at_the_limit_of_the_call(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    router, posted, took_s = called(monkeypatch, step_s)
    assert posted == Posted(None, "TimeoutError: timed out")
    assert took_s == pytest.approx(10.0)
    assert router.closed
