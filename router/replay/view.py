# SPDX-License-Identifier: Apache-2.0
"""What the rules of other routers look at beside index and load board: gauges, and prompts by their blocks.

vLLM sets its gauges when a step ends, so a request that came during a long prefill step does not show before that;
and a poll is up to one interval old. Rules that place by such gauges send everything that comes in between to the
same place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from engine_ext.sim.output import SimMetrics
from router.plan.peers import Gauges
from router.replay.traces import TraceRequest

POLL_INTERVAL_S = 0.05
"""Default of llm-d-router's ``--refresh-metrics-interval``."""
SPECULATION_S = 2.0
"""How long llm-d-router's precise index believes that a worker will have what was sent to it."""

_IDLE = Gauges(0, 0.0)


class VirtualView:
    """Of one fleet. All operations are O(blocks of the prompt) or less."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._gauges: dict[str, Gauges] = {}
        self._polled: dict[str, tuple[float, Gauges]] = {}
        self._in_use: dict[str, Counter[int]] = {}
        self._sent_s: dict[str, dict[int, float]] = {}
        self._asked: tuple[int, ...] = ()
        self._block_size_tokens = 1

    # What happens

    def step_ended(self, worker: str, metrics: SimMetrics) -> None:
        """The engine sets its gauges."""
        self._gauges[worker] = Gauges(metrics.waiting, metrics.kv_cache_usage)

    def asked(self, request: TraceRequest) -> None:
        """A request is decided next."""
        self._asked, self._block_size_tokens = _full(request), request.block_size_tokens

    def begun(self, worker: str, request: TraceRequest) -> None:
        """The request was sent to the worker."""
        self._in_use.setdefault(worker, Counter()).update(_full(request))
        self._sent_s.setdefault(worker, {}).update(dict.fromkeys(_full(request), self._now_s()))

    def ended(self, worker: str, request: TraceRequest) -> None:
        """It is over."""
        blocks = self._in_use[worker]
        blocks.subtract(_full(request))
        for block in _full(request):
            if not blocks[block]:
                del blocks[block]

    # What a rule sees

    def gauges(self, worker: str) -> Gauges:
        """As of the last poll."""
        now_s = self._now_s()
        polled = self._polled.get(worker)
        if polled is None or now_s - polled[0] >= POLL_INTERVAL_S:
            polled = self._polled[worker] = now_s, self._gauges.get(worker, _IDLE)
        return polled[1]

    def tokens_in_use(self, worker: str) -> int:
        """Tokens of full blocks in use at the worker, if it had the request too."""
        blocks = self._in_use.get(worker, Counter())
        more = sum(block not in blocks for block in self._asked)
        return (len(blocks) + more) * self._block_size_tokens

    def tokens_sent_lately(self, worker: str) -> int:
        """Tokens of the leading blocks that were sent to the worker within the last ``SPECULATION_S``."""
        sent_s, now_s = self._sent_s.get(worker, {}), self._now_s()
        leading = 0
        for block in self._asked:
            if now_s - sent_s.get(block, -SPECULATION_S) >= SPECULATION_S:
                break
            leading += 1
        return leading * self._block_size_tokens


def _full(request: TraceRequest) -> tuple[int, ...]:
    return request.block_ids[: request.full_blocks]
