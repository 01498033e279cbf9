# SPDX-License-Identifier: Apache-2.0
"""What a serving process answers the keeper about its requests."""

from __future__ import annotations

import msgspec

from router.admin.served import ServedHere, show_record, without_inputs
from router.deciding import Deciding
from router.decisions.reports_wire import read_batch
from router.errors import NotFoundError
from router.processes.link import Answers
from router.processes.records import (
    DECISION,
    DECISIONS,
    QUEUE,
    REPORTS,
    TRIALS,
    TROUBLES,
    DecisionsWanted,
    ShownRecord,
)

_encode = msgspec.json.encode


def answers_of(deciding: Deciding) -> Answers:
    """By question."""
    here = ServedHere(deciding)

    async def decisions(body: bytes) -> bytes:
        wanted = msgspec.json.decode(body, type=DecisionsWanted)
        records = deciding.log.select(wanted.limit, wanted.model, wanted.worker, wanted.path)
        return _encode(
            [ShownRecord(one.time_unix_s, msgspec.Raw(_encode(without_inputs(one)))) for one in records]
        )

    async def decision(body: bytes) -> bytes:
        try:
            attempts = deciding.log.get(body.decode())
        except NotFoundError:
            return _encode([])
        return _encode(
            [ShownRecord(one.time_unix_s, msgspec.Raw(_encode(show_record(one)))) for one in attempts]
        )

    async def queue(_: bytes) -> bytes:
        return _encode(await here.queue())

    async def reports(body: bytes) -> bytes:
        return _encode(deciding.reports.take_known(read_batch(body)))

    async def trials(_: bytes) -> bytes:
        return _encode(await here.trials())

    async def troubles(_: bytes) -> bytes:
        return _encode(await here.troubles())

    return {
        DECISIONS: decisions,
        DECISION: decision,
        QUEUE: queue,
        REPORTS: reports,
        TRIALS: trials,
        TROUBLES: troubles,
    }
