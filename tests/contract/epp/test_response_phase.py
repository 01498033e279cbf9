# SPDX-License-Identifier: Apache-2.0
"""Sections 1.4 to 1.6: answers pass unchanged, who served is taken note of, health."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from picker_client import BUFFERED, FULL_DUPLEX, NONE, Conversation

from .conftest import Subject

JSON = {":status": "200", "content-type": "application/json"}
SSE = {":status": "200", "content-type": "text/event-stream"}
ANSWER = b'{"usage":{"prompt_tokens":5,"completion_tokens":4,"total_tokens":9}}'
EVENTS = [
    b'data: {"choices":[{"text":"a"}]}\n\nda',
    b'ta: {"choices":[{"text":"b"}]}\n\n',
    b"data: [DONE]\n\n",
]


async def route(subject: Subject, one: Conversation, **more: object) -> list[str]:
    await one.headers()
    await one.body(subject.completion(**more))
    await one.until_body_ends()
    return await one.destination()


async def test_an_answer_passes_unchanged(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        endpoints = await route(subject, one)
        await one.response(JSON, served=endpoints[0])
        await one.until("response_headers")
        await one.response_body(ANSWER[:10], end=False)
        await one.response_body(ANSWER[10:])
        assert await one.until_body_ends("response_body") == ANSWER
        await one.hang_up()
        assert len(one.of("response_headers")) == 1
        assert not one.of("immediate_response")


async def test_events_pass_one_by_one(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        await route(subject, one, stream=True)
        await one.response(SSE)
        await one.until("response_headers")
        for number, event in enumerate(EVENTS):
            await one.response_body(event, end=event is EVENTS[-1])
            # Each is let go before the next is there.
            await one.until("response_body", number + 1)
        assert one.joined("response_body") == b"".join(EVENTS)


async def test_a_large_answer_comes_back_in_pieces(subject: Subject) -> None:
    big = b'"' + b"x" * 300_000 + b'"'
    async with subject.client.conversation() as one:
        await route(subject, one)
        await one.response(JSON)
        await one.response_body(big)
        assert await one.until_body_ends("response_body") == big


async def test_trailers_end_an_answer(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        await route(subject, one)
        await one.response(JSON)
        await one.response_body(ANSWER, end=False)
        await one.response_trailers()
        await one.until("response_trailers")
        assert one.joined("response_body") == ANSWER


@pytest.mark.parametrize("status", ["204", "404", "503"])
async def test_an_answer_may_be_headers_alone(subject: Subject, status: str) -> None:
    async with subject.client.conversation() as one:
        await route(subject, one)
        await one.response({":status": status}, end=True)
        await one.until("response_headers")
        await one.hang_up()
        assert one.kinds().count("response_headers") == 1


@pytest.mark.parametrize("modes", [(BUFFERED, BUFFERED), (FULL_DUPLEX, NONE)])
async def test_other_modes_are_answered_once_a_message(subject: Subject, modes: tuple[int, int]) -> None:
    async with subject.client.conversation(modes) as one:
        await one.headers()
        await one.body(subject.completion())
        await one.until("request_body")
        await one.response(JSON)
        await one.until("response_headers")
        if modes[1] == BUFFERED:
            await one.response_body(ANSWER)
            answer = await one.until("response_body")
            assert answer.response.body_mutation.body in (b"", ANSWER)
        await one.hang_up()
        assert len(one.of("response_body")) == (modes[1] == BUFFERED)


@pytest.mark.parametrize("served", ["192.0.2.7:80", "", "nonsense"])
async def test_an_endpoint_that_was_not_picked_may_have_served(subject: Subject, served: str) -> None:
    async with subject.client.conversation() as one:
        await route(subject, one)
        await one.response(JSON, served=served)
        await one.response_body(ANSWER)
        assert await one.until_body_ends("response_body") == ANSWER


async def test_the_proxy_may_answer_by_itself_before_the_request_is_whole(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        await one.headers()
        await one.body(b"{", end=False)
        await one.response({":status": "408"}, end=True)
        await one.until("response_headers")
        await one.hang_up()
        assert one.kinds() == ["response_headers"]


@pytest.mark.parametrize("service", ["liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"])
async def test_health_is_served(subject: Subject, service: str) -> None:
    if subject.health is None:
        pytest.skip("no health port was named (--health)")
    async with grpc.aio.insecure_channel(subject.health) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
