# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_ext.vllm.storage.catalogue import Catalogue, FileId
from engine_ext.vllm.storage.value import Use

HALF_LIFE_S = 100.0
files = st.builds(FileId, st.sampled_from(["f", "g"]), st.sampled_from(["aa1", "aa2", "bb1", "bb2", "cc1"]))
puts = st.tuples(
    st.just("put"),
    files,
    st.integers(1, 9),
    st.builds(Use, st.integers(0, 500), st.just(1.0), st.integers(0, 3)),
)
steps = st.lists(st.one_of(puts, st.tuples(st.just("remove"), files), st.tuples(st.just("pop"))), max_size=60)


@given(steps)
def test_it_agrees_with_a_dict_and_pops_the_cheapest_and_deepest_first(
    moves: list[tuple[object, ...]],
) -> None:
    catalogue = Catalogue(HALF_LIFE_S)
    oracle: dict[FileId, tuple[int, Use]] = {}
    for move in moves:
        match move:
            case ("put", FileId() as file, int() as size, Use() as use):
                assert catalogue.put(file, size, use, 0.0) is (file not in oracle)
                oracle[file] = size, use
            case ("remove", FileId() as file):
                assert (catalogue.remove(file) is not None) is (oracle.pop(file, None) is not None)
            case _:
                popped = catalogue.pop_cheapest()
                ranks = {
                    file: (use.score(size, HALF_LIFE_S), -use.depth) for file, (size, use) in oracle.items()
                }
                assert (popped is None) is (not oracle)
                if popped is not None:
                    assert ranks[popped[0]] == min(ranks.values())
                    del oracle[popped[0]]
        assert set(catalogue) == set(oracle)
        assert catalogue.total_bytes == sum(size for size, _ in oracle.values())
        assert not catalogue.faults()


def test_many_uses_of_few_files_do_not_grow_the_order() -> None:
    catalogue = Catalogue(HALF_LIFE_S)
    for second in range(10_000):
        catalogue.put(FileId("f", "aa"), 1, Use(second, 1.0, 0), 0.0)
    assert len(catalogue._heap) < 2000
    assert not catalogue.faults()


def test_shelves_list_what_lies_in_one_directory() -> None:
    catalogue = Catalogue(HALF_LIFE_S)
    one, other = FileId("f", "aa1"), FileId("f", "bb1")
    for file in (one, other):
        catalogue.put(file, 1, Use(0, 1.0, 0), 0.0)
    assert catalogue.on_shelf(("f", "aa")) == {one}
    catalogue.remove(one)
    assert catalogue.shelves() == {("f", "bb")}


def test_another_half_life_is_another_order_and_changes_meanwhile_count() -> None:
    catalogue = Catalogue(1000.0)
    often, lately, gone, new = (FileId("f", name) for name in ("aa", "bb", "cc", "dd"))
    catalogue.put(often, 1, Use(0, 8.0, 0), 0.0)
    catalogue.put(lately, 1, Use(100, 1.0, 0), 0.0)
    catalogue.put(gone, 1, Use(50, 1.0, 0), 0.0)
    entries = catalogue.begin_order(10.0)
    rows = [catalogue.rank(file, entry, 10.0) for file, entry in entries]
    catalogue.remove(gone)
    catalogue.put(new, 1, Use(90, 1.0, 0), 0.0)
    catalogue.end_order(rows)
    assert not catalogue.faults()
    popped = [catalogue.pop_cheapest() for _ in range(4)]
    assert [one[0] for one in popped if one] == [often, new, lately]
