# SPDX-License-Identifier: Apache-2.0
"""The policy decides as a plain one that walks everything, over random traffic, loads, failures and hints."""

from __future__ import annotations

from random import Random

import pytest

from engine_ext.vllm.eviction.core import EvictionCore
from engine_ext.vllm.eviction.settings import Settings
from engine_ext.vllm.plan import EvictHints

from .plain import PlainEviction, Read

TOKENS = 16


class Traffic:
    """Conversations that share two beginnings, go on after pauses, and end."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.prompts: list[list[str]] = []
        self.number = 0

    def prompt(self) -> list[str]:
        random = self.random
        if self.prompts and random.random() < 0.6:
            place = random.randrange(max(0, len(self.prompts) - 12), len(self.prompts))
            chain = list(self.prompts[place])
        else:
            head = random.choice("ab")
            chain = [f"{head}{i}" for i in range(random.randrange(4))]
            place = len(self.prompts)
            self.prompts.append(chain)
        for _ in range(random.randrange(1, 6)):
            self.number += 1
            chain.append(f"n{self.number}")
        self.prompts[place] = chain
        return chain

    def hints(self) -> EvictHints:
        random = self.random
        if random.random() < 0.7:
            return EvictHints()
        return EvictHints(
            pinned_tokens=random.choice((0, TOKENS, 3 * TOKENS)),
            private_from_token=random.choice((None, 2 * TOKENS, 6 * TOKENS)),
            peer_copies=random.randrange(3),
        )


def chained(keys: list[str]) -> list[tuple[str, int]]:
    return [(key, TOKENS * place) for place, key in enumerate(keys, start=1)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [7, 60])
def test_it_decides_as_a_plain_policy_that_walks_everything(seed: int, capacity: int) -> None:
    settings = Settings(ghosts=2.0, memory=4.0)
    fast: EvictionCore[str] = EvictionCore(capacity, settings)
    plain = PlainEviction(capacity, settings)
    traffic = Traffic(seed)
    random = Random(seed + 100)
    now_s = 0.0
    pinned: list[str] = []
    open_requests: list[tuple[object, Read]] = []
    evictions = refusals = learnt = 0
    for _ in range(250):
        now_s += random.choice((0.0, 0.1, 1.0, 30.0))
        keys, hints = traffic.prompt(), traffic.hints()
        request, read = fast.visit(chained(keys), now_s, hints), plain.visit(chained(keys), now_s, hints)
        for first in range(0, len(keys), 3):
            part = keys[first : first + 3]
            new = [key for key in part if fast.get(key) is None]
            needed = fast.held + len(new) - capacity
            if needed > 0:
                before = (fast.held, fast.evictable, fast.ghosts)
                found, expected = fast.evict(needed, part), plain.evict(needed, part)
                assert (found is None) == (expected is None)
                if found is None or expected is None:
                    refusals += 1
                    assert (fast.held, fast.evictable, fast.ghosts) == before
                    continue
                assert [key for key, _ in found] == expected
                assert all(status == f"of {key}" for key, status in found)
                evictions += len(found)
            for key in new:
                fast.insert(key, f"of {key}")
                plain.insert(key, f"of {key}")
                if random.random() < 0.1:
                    fast.remove(key)
                    plain.known[key].status = None
                    plain.ghosts.append(key)
                else:
                    fast.mark_evictable(key)
                    plain.known[key].evictable = True
        held = [key for key in keys if fast.get(key) is not None and plain.known[key].evictable]
        if held and random.random() < 0.3 and len(pinned) < capacity - 2:
            pinned.append(random.choice(held))
            fast.mark_non_evictable(pinned[-1])
            plain.known[pinned[-1]].evictable = False
        if pinned and random.random() < 0.3:
            free = pinned.pop(0)
            fast.mark_evictable(free)
            plain.known[free].evictable = True
        open_requests.append((request, read))
        if random.random() < 0.5:
            done, also = open_requests.pop(random.randrange(len(open_requests)))
            fast.finish(done, now_s)  # type: ignore[arg-type]
            plain.finish(also, now_s)
        learnt += not fast.by_recency
        assert fast.held == sum(one.status is not None for one in plain.known.values()) <= capacity
        assert fast.evictable == sum(one.evictable for one in plain.known.values())
        assert fast.ghosts == len(plain.ghosts)
    assert evictions > 100, "traffic that evicts little shows little"
    assert learnt, "traffic that never leaves recency shows half of it"
    assert refusals or capacity > 7
