# SPDX-License-Identifier: Apache-2.0
"""Keeper and serving processes over a real socket: states one way, observations and answers the other."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from eventually import eventually

from router.processes.feed import Feed
from router.processes.frames import Frames, frame
from router.processes.link import KeeperLink
from router.processes.published import Published
from router.processes.seen import Batch, BlocksMadeSeen, Counted, FamilyTold, Hello
from router.processes.told import Telling

KEY = ("worker", "a")


@dataclass
class Keeper:
    """What a keeper does with what it hears."""

    batches: list[Batch] = field(default_factory=list)
    families: list[FamilyTold] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)

    def take(self, batch: Batch) -> None:
        self.batches.append(batch)

    def counted(self, process: int, told: Counted) -> None:
        self.families += told.families

    def left(self, process: int) -> None:
        self.gone.append(process)


@dataclass
class Hearer:
    """What a serving process hears."""

    heard: list[Telling] = field(default_factory=list)
    connections: int = 0

    def connected(self) -> None:
        self.connections += 1

    def told(self, telling: Telling) -> None:
        self.heard.append(telling)


class Counts:
    def take(self) -> list[FamilyTold]:
        return [FamilyTold("n", "N.", "counter", [])]


async def echo(body: bytes) -> bytes:
    return b"of process: " + body


async def fails(_: bytes) -> bytes:
    raise ValueError("no answer")


def listener_at(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


@contextlib.asynccontextmanager
async def feeding(path: Path, published: Published, keeper: Keeper) -> AsyncIterator[Feed]:
    feed = Feed(published, keeper)
    await feed.start(listener_at(path))
    try:
        yield feed
    finally:
        await feed.stop()


async def test_states_observations_questions_and_metrics_find_their_way(tmp_path: Path) -> None:
    published, keeper, hearer = Published(), Keeper(), Hearer()
    published.tell([(KEY, 1)])
    async with feeding(tmp_path / "s", published, keeper) as feed:
        link = KeeperLink(tmp_path / "s", 3)
        first = await link.start()
        assert (first.whole, [entry.key for entry in first.entries]) == (True, [KEY])
        published.tell([(KEY, 2)])  # told before anybody follows
        feed.publish()
        link.follow(hearer, {"echo": echo, "fails": fails}, Counts())

        async def heard() -> bool:
            return bool(hearer.heard)

        await eventually(heard, "a change that is not heard")
        seen = BlocksMadeSeen("a", 1.0)
        assert [link.tell(seen) for _ in range(3)] == [1, 1, 1]

        async def taken() -> bool:
            return [len(batch.seen) for batch in keeper.batches] == [3]

        await eventually(taken, "observations that do not come")
        # The number comes with the first states that include them.
        feed.publish()

        async def acknowledged() -> bool:
            return hearer.heard[-1].taken == 1

        await eventually(acknowledged, "a batch that is not acknowledged")
        assert link.tell(seen) == 2
        assert await feed.ask("echo", b"x") == {3: b"of process: x"}
        assert await feed.ask("fails") == {}
        assert await feed.ask("nothing") == {}
        await feed.ask("metrics")
        assert [family.name for family in keeper.families] == ["n"]
        assert feed.processes == [3]
        await link.stop()

        async def left() -> bool:
            return keeper.gone == [3]

        await eventually(left, "a process that is gone and not missed")
        assert [len(batch.seen) for batch in keeper.batches] == [3, 1]


async def test_observations_wait_for_the_next_keeper_which_tells_everything_again(tmp_path: Path) -> None:
    published, hearer = Published(), Hearer()
    published.tell([(KEY, 1)])
    async with feeding(tmp_path / "s", published, Keeper()):
        link = KeeperLink(tmp_path / "s", 0)
        await link.start()
        link.follow(hearer, {}, Counts())

    async def alone() -> bool:
        return not link.is_connected

    await eventually(alone, "a keeper that is gone")
    link.tell(BlocksMadeSeen("a", 1.0))
    keeper = Keeper()
    async with feeding(tmp_path / "s", published, keeper):

        async def told() -> bool:
            return bool(keeper.batches) and any(one.whole for one in hearer.heard)

        await eventually(told, "a keeper that hears and tells")
        assert hearer.connections == 1
        await link.stop()


async def test_a_slow_reader_gets_the_last_state_once(tmp_path: Path) -> None:
    published, keeper = Published(), Keeper()
    published.tell([(KEY, "x" * 1000)])
    async with feeding(tmp_path / "s", published, keeper):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s", limit=64)
        writer.write(frame(Hello(0, 1)))
        for i in range(5000):  # far more than the socket holds
            published.tell([(KEY, f"{i:05}" * 2000)])
            if i % 100 == 0:
                await asyncio.sleep(0)
        frames: Frames[Telling] = Frames(reader, Telling)
        count, last = 0, b""
        while b"04999" not in last:
            telling = await frames.next()
            assert telling is not None
            count, last = count + 1, telling.entries[0].value or b""
        assert count < 1000
        writer.close()
