# SPDX-License-Identifier: Apache-2.0
"""Running one parsed call on the worker and writing its answer, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http import HTTPStatus

from engine_ext.sim.answers import DONE, Answer, Choice, error_chunk, merged
from engine_ext.sim.api import ApiError, Call
from engine_ext.sim.connection import Connection, ConnectionGoneError
from engine_ext.sim.errors import KvRequestIdInUseError, PromptTooLongError
from engine_ext.sim.output import SimUsage
from engine_ext.sim.request import SimRequest
from engine_ext.sim.worker import SimWorker, Update


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One running sequence of a call."""

    index: int
    request_id: str
    updates: asyncio.Queue[Update]


async def run_call(
    worker: SimWorker,
    decode: Callable[[int], str],
    call: Call,
    connection: Connection,
    loras: tuple[str, ...],
) -> None:
    """Serve one call to its end, or until its client goes."""
    prefix = "chatcmpl" if call.is_chat else "cmpl"
    answer_id = f"{prefix}-{connection.header(b'x-request-id') or connection.number}"
    answer = Answer(answer_id, int(time.time()), call.model, call.is_chat)
    sequences = _submit(worker, call, answer_id, connection, loras)
    try:
        with connection.watched(lambda: _abort(worker, sequences)):
            if call.stream:
                await _stream(worker, decode, call, connection=connection, answer=answer, sequences=sequences)
            else:
                await _whole(decode, call, connection, answer, sequences)
    finally:
        _abort(worker, sequences)


def _submit(
    worker: SimWorker, call: Call, answer_id: str, connection: Connection, loras: tuple[str, ...]
) -> list[_Sequence]:
    sequences: list[_Sequence] = []
    try:
        for prompt in call.prompts:
            most, stop = call.limits(prompt, worker.engine.max_model_len)
            for _ in range(call.sequences_each):
                index = len(sequences)
                request = SimRequest(
                    request_id=f"{answer_id}-{index}-{connection.number}",
                    token_ids=prompt,
                    max_tokens=most,
                    stop_after_tokens=stop,
                    extra_keys=(call.cache_salt,) if call.cache_salt else (),
                    lora_name=call.lora,
                    lora_id=loras.index(call.lora) + 1 if call.lora else None,
                    kv_transfer_params=call.kv_transfer_params,
                    session_id=connection.header(b"x-session-id"),
                )
                sequences.append(_Sequence(index, request.request_id, worker.submit(request)))
    except (KvRequestIdInUseError, PromptTooLongError) as error:
        _abort(worker, sequences)
        if isinstance(error, PromptTooLongError):
            raise ApiError(str(error)) from error
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        raise ApiError(str(error), status, kind="InternalServerError") from error
    return sequences


def _abort(worker: SimWorker, sequences: list[_Sequence]) -> None:
    for sequence in sequences:
        worker.abort(sequence.request_id)
        sequence.updates.put_nowait(Update(None, gone=True))


async def _whole(
    decode: Callable[[int], str],
    call: Call,
    connection: Connection,
    answer: Answer,
    sequences: list[_Sequence],
) -> None:
    choices: list[Choice] = []
    usages: list[SimUsage] = []
    for sequence in sequences:
        texts: list[str] = []
        while True:
            update = await sequence.updates.get()
            if update.gone or update.token_id is None:
                connection.drop()
                raise ConnectionGoneError
            texts.append(decode(update.token_id))
            if update.usage is not None:
                break
        usages.append(update.usage)
        choices.append(Choice(sequence.index, "".join(texts), update.finish_reason or "length"))
    await connection.answer(answer.whole(choices, _usage(call, usages)))


async def _stream(
    worker: SimWorker,
    decode: Callable[[int], str],
    call: Call,
    *,
    connection: Connection,
    answer: Answer,
    sequences: list[_Sequence],
) -> None:
    await connection.start_stream()
    # As vLLM does, the chunk with the role waits for the first output.
    opening = b"".join(answer.opening(sequence.index) for sequence in sequences) if call.is_chat else b""
    usages: list[SimUsage] = []
    sent = 0
    async for index, update in _merge(sequences):
        if update.token_id is None:
            connection.drop()
            raise ConnectionGoneError
        if await _broken(worker, connection, sent):
            return
        running = None
        if update.usage is not None:
            usages.append(update.usage)
            running = update.usage if call.continuous_usage else None
        text = decode(update.token_id)
        await connection.send(opening + answer.piece(index, text, update.finish_reason, running))
        opening = b""
        sent += 1
    if await _broken(worker, connection, sent):
        return
    tail = answer.usage_chunk(_usage(call, usages)) if call.include_usage else b""
    await connection.end_stream(tail + DONE)


async def _merge(sequences: list[_Sequence]) -> AsyncIterator[tuple[int, Update]]:
    """Updates of all sequences in the order in which they come; ends with the last of them."""
    if len(sequences) == 1:
        only = sequences[0]
        while True:
            update = await only.updates.get()
            yield only.index, update
            if update.usage is not None:
                return
    waiting = {asyncio.create_task(one.updates.get()): one for one in sequences}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: waiting[task].index):
                one = waiting.pop(task)
                update = task.result()
                if update.usage is None:
                    waiting[asyncio.create_task(one.updates.get())] = one
                yield one.index, update
    finally:
        for task in waiting:
            task.cancel()


async def _broken(worker: SimWorker, connection: Connection, sent: int) -> bool:
    """Whether a fault has ended the stream after ``sent`` tokens."""
    faults = worker.faults
    if faults.close_stream_after is not None and sent >= faults.close_stream_after:
        await connection.flush()
        connection.drop(reset=faults.close_kind == "reset")
        raise ConnectionGoneError
    if faults.error_event is not None and sent >= faults.error_event:
        await connection.end_stream(error_chunk("EngineCore encountered an issue.") + DONE)
        return True
    return False


def _usage(call: Call, usages: list[SimUsage]) -> SimUsage:
    """Usage of the call: every prompt counts once, however many sequences it has."""
    total = merged(usages)
    prompt_tokens = sum(len(prompt) for prompt in call.prompts)
    return SimUsage(prompt_tokens, total.completion_tokens, total.cached_tokens, total.cached_by_tier)
