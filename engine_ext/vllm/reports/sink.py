# SPDX-License-Identifier: Apache-2.0
"""Where the parts of the extension say what happens to a request's blocks.

A request is known by the engine's own id, and tied to a plan by the first `began` or `asked` that names both. What is
said of a request that no plan is known of is ignored. Per source, in this order:

    asked                   the source was asked for so many blocks
    answered | failed       its answer, or why there was none
    moved, any number       blocks that came into the host tier, or did not

`promoted` and `evicted` are of the request as a whole. After `finished` the report goes out; `evicted` may still come.

Every call only appends to a bounded list: it never blocks, never raises and may come from any thread. Blocks are
offloading chunks, of the `block_tokens` that the sink was opened with.
"""

from __future__ import annotations

from typing import Literal, Protocol

SourceKind = Literal["pointsman", "p2p", "ram", "storage"]
"""A peer's extension, a peer's in-tree P2P tier, our own host memory, our own storage."""
OK = "ok"
RAM_SOURCE = "ram"
STORAGE_SOURCE = "storage"


class ReportSink(Protocol):
    """What a tier calls. Seconds are measured, never clock readings."""

    def began(self, req_id: str, plan_id: str) -> None:
        """The engine has a request with a plan. Not needed where `asked` comes first."""
        ...

    def asked(
        self, req_id: str, plan_id: str, source: str, blocks: int, kind: SourceKind | None = None
    ) -> None:
        """Blocks are looked for at `source`: `host:port` as in the plan, `ram` or `storage`.

        `kind` None: that of the source's name, and `pointsman` for an address.
        """
        ...

    def answered(self, req_id: str, source: str, hit_blocks: int, missed_blocks: int, seconds: float) -> None:
        """The source has answered. Blocks that a plan promised at a peer and that it lacks count as stale."""
        ...

    def failed(self, req_id: str, source: str, outcome: str, seconds: float) -> None:
        """The source gave no answer: all blocks asked for are missed, none is stale.

        `outcome` is a short word (`deadline`, `unreachable`), with a detail after a colon (`refused:model`).
        """
        ...

    def moved(
        self, req_id: str, source: str, blocks: int, size_bytes: int, seconds: float, outcome: str = OK
    ) -> None:
        """A transfer is over: `blocks` and `size_bytes` are what arrived, also where `outcome` is not `ok`."""
        ...

    def promoted(self, req_id: str, blocks: int, size_bytes: int, seconds: float) -> None:
        """Blocks went from host memory into the engine's KV cache."""
        ...

    def evicted(self, req_id: str, blocks: int) -> None:
        """Blocks that were brought in for this request are gone before anybody read them."""
        ...

    def finished(self, req_id: str) -> None:
        """The engine is done with the request, however it ended."""
        ...

    def close(self, timeout_s: float) -> None:
        """Sends what there is, for so long at most. What is said afterwards is lost."""
        ...


class NoReports:
    """For an engine without `report_urls`."""

    def began(self, req_id: str, plan_id: str) -> None:
        pass

    def asked(
        self, req_id: str, plan_id: str, source: str, blocks: int, kind: SourceKind | None = None
    ) -> None:
        pass

    def answered(self, req_id: str, source: str, hit_blocks: int, missed_blocks: int, seconds: float) -> None:
        pass

    def failed(self, req_id: str, source: str, outcome: str, seconds: float) -> None:
        pass

    def moved(
        self, req_id: str, source: str, blocks: int, size_bytes: int, seconds: float, outcome: str = OK
    ) -> None:
        pass

    def promoted(self, req_id: str, blocks: int, size_bytes: int, seconds: float) -> None:
        pass

    def evicted(self, req_id: str, blocks: int) -> None:
        pass

    def finished(self, req_id: str) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass
