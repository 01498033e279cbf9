# SPDX-License-Identifier: Apache-2.0
"""What would happen if: each question is answered by a copy of this process, which is thrown away afterwards.

A replay is one process without threads and draws no chance from outside, so ``fork`` copies all of its state and
both continue alike. Copy on write makes a copy cheap; the garbage collector is kept from touching it.
"""

from __future__ import annotations

import gc
import os
import struct
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.errors import RouterError

_ANSWER = struct.Struct("<d")


class ForkError(RouterError):
    """A copy ended without an answer."""


def ask_copies(questions: Sequence[Callable[[], float]], at_once: int) -> list[float]:
    """The answers, in order; ``at_once`` copies live at the same time.

    What a question changes is lost with its copy.

    Raises:
        ForkError: a question raised an exception, or its copy was killed.
    """
    running: list[_Copy] = []
    answers: list[float] = []
    gc.freeze()
    try:
        for question in questions:
            if len(running) == at_once:
                answers.append(running.pop(0).answer())
            running.append(_copy(question, running))
        while running:
            answers.append(running.pop(0).answer())
        return answers
    finally:
        gc.unfreeze()
        for copy in running:
            copy.wait()


class _Copy(NamedTuple):
    """A copy that has yet to answer."""

    process: int
    pipe: int

    def answer(self) -> float:
        data, status = self.wait()
        if len(data) != _ANSWER.size or status:
            raise ForkError(f"a copy of the process ended with status {status}")
        return float(_ANSWER.unpack(data)[0])

    def wait(self) -> tuple[bytes, int]:
        """What it wrote, and its exit status; negative: the signal that killed it."""
        with os.fdopen(self.pipe, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(self.process, 0)
        return data, os.waitstatus_to_exitcode(status)


def _copy(question: Callable[[], float], others: Sequence[_Copy]) -> _Copy:
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return _Copy(process, reading)
    status = 1
    try:
        gc.disable()
        for pipe in (reading, *(other.pipe for other in others)):
            os.close(pipe)
        os.write(writing, _ANSWER.pack(question()))
        status = 0
    except BaseException:  # nothing of the copy may go on in its caller's frames
        os.write(2, traceback.format_exc().encode())
    finally:
        # No clean-up of the original's affairs: no buffers flushed twice, no test report written twice.
        os._exit(status)
