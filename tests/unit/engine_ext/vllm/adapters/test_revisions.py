# SPDX-License-Identifier: Apache-2.0
"""Words that tell an adapter's weights apart: equal only where the same weights computed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Hashable

import pytest

from engine_ext.vllm.adapters.former import Weights
from engine_ext.vllm.adapters.revisions import SETTLE_S, Adapter, AdapterRevisions, Stamp


class Disk:
    """Folders with one content each. A write changes the state unless `quiet`, as within one tick of the clock."""

    def __init__(self) -> None:
        self.contents: dict[str, str] = {}
        self.writes = itertools.count()
        self.states: dict[str, int] = {}
        self.reads = 0

    def write(self, path: str, content: str, *, quiet: bool = False) -> None:
        self.contents[path] = content
        if not quiet:
            self.states[path] = next(self.writes)

    def state(self, path: str) -> Hashable | None:
        return self.states.get(path)

    def digest(self, path: str) -> str | None:
        self.reads += 1
        content = self.contents.get(path)
        return None if content is None else f"digest of {content}"


class Engine:
    """An engine's calls, in the order in which they happen."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.now_s = 0.0
        nonces = (f"nonce {i}" for i in itertools.count())
        self.revisions = AdapterRevisions(disk, lambda: next(nonces), lambda: self.now_s)
        self.ids = (f"request {i}" for i in itertools.count())

    def load(self, *, in_place: bool = False, adapter_id: int = 1, path: str = "p") -> None:
        before = self.revisions.before_load(path)
        self.revisions.loaded(Adapter(adapter_id, "a", path), before, in_place=in_place)

    def ask(self, adapter_id: int = 1, path: str = "p") -> tuple[str, Stamp]:
        name = next(self.ids)
        return name, self.revisions.stamp(name, Adapter(adapter_id, "a", path))

    def word(self, adapter_id: int = 1, path: str = "p") -> str:
        return self.ask(adapter_id, path)[1].word

    def settle(self) -> None:
        self.now_s += SETTLE_S
        self.word()


@pytest.fixture
def disk() -> Disk:
    one = Disk()
    one.write("p", "old")
    return one


@pytest.fixture
def engine(disk: Disk) -> Engine:
    return Engine(disk)


def test_requests_of_the_same_weights_share_a_word_on_all_hosts(engine: Engine, disk: Disk) -> None:
    engine.load()
    elsewhere = Disk()
    elsewhere.write("p", "stale", quiet=True)
    elsewhere.write("p", "old")
    assert engine.word() == engine.word() == Engine(elsewhere).word()


def test_a_reload_in_place_changes_the_word(engine: Engine, disk: Disk) -> None:
    engine.load()
    before = engine.word()
    disk.write("p", "new")
    engine.load(in_place=True)
    assert engine.word() == engine.word() != before


def test_a_reload_from_another_path_under_the_same_number_changes_the_word(
    engine: Engine, disk: Disk
) -> None:
    engine.load()
    before = engine.word()
    disk.write("q", "new")
    engine.load(in_place=True, path="q")
    assert engine.word(path="q") == engine.word(path="q") != before
    late = [engine.word(path="p") for _ in range(2)]
    assert len({*late, before}) == 3, "the engine has other weights by now than those of path p"


def test_unloaded_and_loaded_again_under_another_number_the_files_decide(engine: Engine, disk: Disk) -> None:
    engine.load()
    before = engine.word()
    engine.load(adapter_id=2)
    assert engine.word(2) == before
    disk.write("p", "new")
    engine.load(adapter_id=3)
    assert engine.word(3) == engine.word(3) != before


def test_files_that_changed_without_a_reload_give_each_request_a_word_of_its_own(
    engine: Engine, disk: Disk
) -> None:
    engine.load()
    before = engine.word()
    disk.write("p", "new")
    between = [engine.word() for _ in range(3)]
    engine.load(in_place=True)
    assert len({before, *between, engine.word()}) == 5


def test_a_load_that_keeps_what_the_engine_has_changes_nothing(engine: Engine, disk: Disk) -> None:
    engine.load()
    before = engine.word()
    engine.load()
    assert engine.word() == before
    disk.write("p", "new")
    engine.load()
    assert len({before, engine.word(), engine.word()}) == 3, "the engine has not read the new files"


def test_a_reload_of_the_same_content_keeps_the_word(engine: Engine, disk: Disk) -> None:
    engine.load()
    before = engine.word()
    disk.write("p", "old")
    engine.load(in_place=True)
    assert engine.word() == before


def test_weights_that_come_back_do_not_get_their_old_word(engine: Engine, disk: Disk) -> None:
    engine.load()
    before = engine.word()
    disk.write("p", "new")
    engine.load(in_place=True)
    disk.write("p", "old")
    engine.load(in_place=True)
    assert engine.word() == engine.word() != before


def test_files_that_change_while_they_are_loaded_belong_to_nobody(engine: Engine, disk: Disk) -> None:
    before = engine.revisions.before_load("p")
    disk.write("p", "new")
    engine.revisions.loaded(Adapter(1, "a", "p"), before, in_place=False)
    assert engine.word() != engine.word()


def test_a_write_within_the_clocks_tick_is_noticed_until_the_files_have_settled(
    engine: Engine, disk: Disk
) -> None:
    engine.load()
    before = engine.word()
    disk.write("p", "new", quiet=True)
    assert len({before, engine.word(), engine.word()}) == 3


def test_settled_files_are_not_read_again(engine: Engine, disk: Disk) -> None:
    engine.load()
    engine.settle()
    reads = disk.reads
    assert len({engine.word() for _ in range(5)}) == 1
    assert disk.reads == reads


def test_files_that_cannot_be_found_give_each_request_a_word_of_its_own(engine: Engine) -> None:
    assert engine.word(path="hub/unknown") != engine.word(path="hub/unknown")


@pytest.mark.parametrize("settled", [False, True])
def test_a_request_may_store_only_while_its_adapter_is_what_it_was(
    engine: Engine, disk: Disk, settled: bool
) -> None:
    engine.load()
    if settled:
        engine.settle()
    early, stamp = engine.ask()
    assert engine.revisions.may_store(early)
    disk.write("p", "new")
    assert not engine.revisions.may_store(early), "a reload may be under way"
    between, other = engine.ask()
    assert not engine.revisions.may_store(between)
    engine.load(in_place=True)
    assert not engine.revisions.may_store(early), "it may have been computed after the reload"
    late, third = engine.ask()
    assert engine.revisions.may_store(late)
    assert len({stamp.word, other.word, third.word}) == 3


def test_a_request_that_was_hashed_before_a_reload_of_another_path_may_not_store(
    engine: Engine, disk: Disk
) -> None:
    engine.load()
    name, stamp = engine.ask()
    disk.write("q", "new")
    engine.load(in_place=True, path="q")
    assert stamp.load is not None
    assert not engine.revisions.may_store(name)


def test_requests_without_an_adapter_may_store_and_stamps_end_with_their_requests(engine: Engine) -> None:
    assert engine.revisions.may_store("no adapter")
    name, stamp = engine.ask()
    assert len(engine.revisions._stamps) == 1
    del stamp
    gc.collect()
    assert len(engine.revisions._stamps) == 0
    assert engine.revisions.may_store(name)


class Listener:
    def __init__(self) -> None:
        self.heard: list[Weights] = []

    def loaded(self, now: Weights) -> None:
        self.heard.append(now)


def test_listeners_hear_of_every_load_what_the_adapter_has_now_and_those_that_are_gone_do_not(
    engine: Engine, disk: Disk
) -> None:
    one, other = Listener(), Listener()
    engine.revisions.listen(one.loaded)
    engine.revisions.listen(other.loaded)
    disk.write("p", "old")
    engine.load()
    del other
    gc.collect()
    request, stamp = engine.ask()
    disk.write("p", "new")
    engine.load()
    engine.load(in_place=True)
    assert [now.word for now in one.heard] == ["digest of old", "digest of old", "digest of new"]
    assert engine.revisions.weights_of(request) == stamp.weights == one.heard[0]
    assert engine.revisions.weights_of("unknown") is None
