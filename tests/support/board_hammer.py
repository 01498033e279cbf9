# SPDX-License-Identifier: Apache-2.0
"""Processes that share a load board and are killed while they use it; prints what the others saw, as JSON.

    python tests/support/board_hammer.py FILE KILLS SEED

Two workers promise, read and release all the time. One victim after the other does the same until it is killed at a
moment of chance, or takes the lock and dies with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from random import Random
from typing import NoReturn

from router.plan.native_board import NativeLoadBoard

NAMES = [f"w{number}" for number in range(6)]
OPEN = 20


def use(board: NativeLoadBoard, random: Random, tickets: list[int]) -> None:
    """One thing that a router does."""
    worker, now_s = random.choice(NAMES), time.monotonic()
    board.queue_s(worker, random.randrange(2), now_s)
    if len(tickets) < OPEN:
        others = random.sample(NAMES, random.randrange(4))
        sources = [name for name in others if name != worker]
        tickets.append(board.promise(worker, random.randrange(2), random.random(), 1.0, now_s, sources))
        return
    ticket = random.choice(tickets)
    match random.randrange(4):
        case 0:
            board.first_token(ticket, now_s)
        case 1:
            board.sampled(worker, random.randrange(9), random.randrange(9), now_s)
        case 2 if random.random() < 0.01:
            board.forget(worker)
        case _:
            tickets.remove(ticket)
            board.release(ticket, now_s)


def forked(body: Callable[[int], NoReturn]) -> tuple[int, int]:
    """A child that runs ``body`` with the end of a pipe to write to; its pid and the other end."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        try:
            body(theirs)
        finally:
            os._exit(70)
    os.close(theirs)
    return pid, ours


def worker_until(board: NativeLoadBoard, stop: int, to_stop: int, seed: int) -> Callable[[int], NoReturn]:
    """Uses the board until ``stop`` is readable, then ends as a process does that has no time to clean up."""

    def body(tell: int) -> NoReturn:
        random, tickets, steps = Random(seed), list[int](), 0
        os.close(to_stop)  # or its end would not be seen
        os.set_blocking(stop, False)
        while True:
            use(board, random, tickets)
            steps += 1
            if steps % 64 == 0:
                try:
                    os.read(stop, 1)
                    break
                except BlockingIOError:
                    continue
        os.write(tell, str(steps).encode())
        os._exit(0)

    return body


def victim(board: NativeLoadBoard, seed: int, *, with_lock: bool) -> Callable[[int], NoReturn]:
    def body(tell: int) -> NoReturn:
        random, tickets = Random(seed), list[int]()
        for _ in range(OPEN):
            use(board, random, tickets)
        os.write(tell, b"x")
        while not with_lock:
            use(board, random, tickets)
        board.core.hang()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    return body


def run(path: str, kills: int, seed: int) -> dict[str, object]:
    random, board = Random(seed), NativeLoadBoard(path)
    stop, to_stop = os.pipe()
    workers = [forked(worker_until(board, stop, to_stop, seed + number)) for number in range(2)]
    reaped = 0
    for number in range(kills):
        pid, begun = forked(victim(board, seed + 10 + number, with_lock=number % 4 == 0))
        os.read(begun, 1)
        os.close(begun)
        if number % 4:
            time.sleep(random.random() * 0.003)
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reaped += board.reap(time.monotonic())
    os.close(to_stop)
    steps = [int(os.read(told, 99)) for _, told in workers]
    for pid, _ in workers:
        os.waitpid(pid, 0)
    left = sum(board.in_flight(name) for name in NAMES)
    reaped_last = board.reap(time.monotonic())
    now_s = time.monotonic() + 60  # samples are old by then
    return {
        "steps": steps,
        "reaped": reaped,
        "left": left,
        "reaped_last": reaped_last,
        "repairs": board.core.repairs,
        "consistent": board.core.consistent(),
        "in_flight": [board.in_flight(name) for name in NAMES],
        "pulls": [board.pulls(name) for name in NAMES],
        "queue_s": [board.queue_s(name, rank, now_s) for name in NAMES for rank in range(2)],
        "decodes": [board.decodes(name, rank, now_s) for name in NAMES for rank in range(2)],
        "active_tokens": [board.active_tokens(name, rank) for name in NAMES for rank in range(2)],
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
