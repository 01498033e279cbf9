# SPDX-License-Identifier: Apache-2.0
"""What tests of sessions ask a World."""

from __future__ import annotations

from engine_ext.transfer.control.peer import Found, NotFound, NotFoundReason
from engine_ext.transfer.control.wire import Knock
from engine_ext.transfer.events import FailReason, PullFailed

from .world import World

A, B, C = "a" * 32, "b" * 32, "c" * 32


def reasons(world: World, find: int) -> list[NotFoundReason]:
    return [event.reason for event in world.told(find) if isinstance(event, NotFound)]


def failures(world: World, pull: int) -> list[FailReason]:
    return [event.reason for event in world.told(pull) if isinstance(event, PullFailed)]


def knocks(world: World) -> int:
    return sum(isinstance(message, Knock) for _, message in world.sent)


def found(world: World, find: int) -> set[bytes]:
    (event,) = world.told(find)
    assert isinstance(event, Found)
    return set(event.keys)
