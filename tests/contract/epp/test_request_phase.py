# SPDX-License-Identifier: Apache-2.0
"""Sections 1.1 to 1.3 and 1.6 of the Endpoint Picker Protocol: what a proxy is told of a request."""

from __future__ import annotations

import json
from ipaddress import ip_address
from random import Random

import pytest
from picker_client import BUFFERED, DESTINATION, FULL_DUPLEX, GET, NONE, POST, headers_set

from .conftest import Subject

ODD = b'{ "model" : "%b", "max_tokens":4, "big": 123456789012345678901234567890, "prompt":"\\ud800 \xc3\xa9" ,"max_tokens":4 }\n'


def check_address(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    ip_address(host.strip("[]"))
    assert 1 <= int(port) <= 65_535


async def test_the_destination_is_told_in_header_and_metadata_alike(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        await one.headers()
        await one.body(subject.completion())
        endpoints = await one.destination()
        assert len(set(endpoints)) == len(endpoints) >= 1
        for endpoint in endpoints:
            check_address(endpoint)
        await one.until_body_ends()
        assert one.kinds() == ["request_headers", "request_body"]


async def test_the_client_s_fields_come_back_as_they_were(subject: Subject) -> None:
    sent = ODD % subject.model.encode()
    async with subject.client.conversation() as one:
        await one.headers()
        await one.body(sent)
        got = await one.until_body_ends()
        assert json.loads(sent).items() <= json.loads(got).items()
        told = headers_set(one.of("request_headers")[0].response).get("content-length")
        assert told in (None, str(len(got)))


@pytest.mark.parametrize("size", [0, 1, 62_000, 64 * 1024, 128 * 1024 + 1, 1_000_000, 5_000_000])
async def test_bodies_cut_anywhere_come_back_whole_in_pieces(subject: Subject, size: int) -> None:
    random = Random(size)
    frame = subject.completion(filler="")
    body = frame[:-2] + b"f" * (size - len(frame)) + frame[-2:] if size > len(frame) else b"{}"[:size]
    async with subject.client.conversation() as one:
        await one.headers()
        at = 0
        while at < len(body) or at == 0:
            step = random.choice([1, 1000, 16_384, 65_536, 300_000])
            await one.body(body[at : at + step], end=at + step >= len(body))
            at += step
        got = await one.until_body_ends()
        if one.kinds() == ["immediate_response"]:
            assert size <= 1, "a good body was refused"
            return
        assert one.kinds()[0] == "request_headers", "a body went before its headers"
        if size <= 1:
            assert got == body
        else:
            assert json.loads(got).items() >= json.loads(body).items()


async def test_a_request_without_a_body_has_any_endpoint_at_once(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        await one.headers(GET, end=True)
        check_address((await one.destination())[0])
        await one.hang_up()
        assert one.kinds() == ["request_headers"]


async def test_an_empty_last_chunk_ends_a_request_without_a_body(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        await one.headers(GET)
        await one.body(b"")
        check_address((await one.destination())[0])
        assert await one.until_body_ends() == b""


async def test_an_empty_last_chunk_after_the_end_is_answered_once_at_most(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        await one.headers(GET, end=True)
        await one.destination()
        await one.body(b"")
        await one.hang_up()
        assert one.kinds() in (["request_headers"], ["request_headers", "request_body"])


async def test_trailers_end_a_body_without_an_end_flag(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        await one.headers()
        await one.body(subject.completion(), end=False)
        await one.trailers()
        await one.until("request_trailers")
        await one.destination()
        assert one.kinds() == ["request_headers", "request_body", "request_trailers"]
        assert b"hello" in one.joined("request_body")


async def test_a_client_cannot_choose_the_endpoint(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        await one.headers({**POST, DESTINATION: "192.0.2.1:80"})
        await one.body(subject.completion())
        assert "192.0.2.1:80" not in await one.destination()


async def test_buffered_bodies_are_answered_once_with_the_destination(subject: Subject) -> None:
    async with subject.client.conversation((BUFFERED, BUFFERED)) as one:
        await one.headers()
        first = await one.until("request_headers")
        await one.body(subject.completion())
        answer = (await one.until("request_body")).response
        told = headers_set(first.response) | headers_set(answer)
        check_address(told[DESTINATION].split(",")[0])
        assert one.kinds() == ["request_headers", "request_body"]
        if answer.body_mutation.body:
            assert headers_set(answer).get("content-length") in (None, str(len(answer.body_mutation.body)))


async def test_headers_alone_have_an_endpoint_where_bodies_are_not_sent(subject: Subject) -> None:
    async with subject.client.conversation((NONE, NONE)) as one:
        await one.headers()
        check_address((await one.destination())[0])


# The subset hint


@pytest.mark.parametrize("encode", [list, ",".join], ids=["list", "text"])
async def test_only_endpoints_of_the_subset_are_picked(subject: Subject, encode: type) -> None:
    endpoints = await subject.endpoints()
    for allowed in (endpoints[:1], endpoints[-1:], endpoints[:2]):
        for _ in range(3):
            picked = await subject.client.pick(subject.completion(), encode(allowed))
            assert set(picked) <= set(allowed)


async def test_the_port_of_a_subset_counts(subject: Subject) -> None:
    endpoint = (await subject.endpoints(1))[0]
    host = endpoint.rpartition(":")[0]
    async with subject.client.conversation() as one:
        await one.headers(subset=[f"{host}:1"])
        await one.body(subject.completion())
        assert (await one.refusal()).status.code == 503


@pytest.mark.parametrize("subset", [[], "", ["192.0.2.1:80"], "192.0.2.1:80,192.0.2.2:80"])
async def test_a_subset_without_an_eligible_endpoint_is_answered_503(
    subject: Subject, subset: object
) -> None:
    async with subject.client.conversation() as one:
        await one.headers(subset=subset)
        await one.body(subject.completion())
        assert (await one.refusal()).status.code == 503


# Faults


@pytest.mark.parametrize("body", [b"no json", b"[1]", b'{"model":', b"\xff\xfe", b'{"model":5,"prompt":{}}'])
async def test_a_body_that_cannot_be_read_has_one_answer(subject: Subject, body: bytes) -> None:
    async with subject.client.conversation((FULL_DUPLEX, FULL_DUPLEX)) as one:
        await one.headers()
        await one.body(body)
        await one.until_body_ends()
        await one.hang_up()
        kinds = one.kinds()
        assert kinds in (["request_headers", "request_body"], ["immediate_response"])
        if kinds == ["immediate_response"]:
            assert 400 <= one.of("immediate_response")[0].status.code < 500
        else:
            assert one.joined("request_body") == body


async def test_a_body_before_the_headers_is_answered_once_at_most(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        await one.body(subject.completion())
        await one.body(subject.completion())
        await one.hang_up()
        assert one.kinds() in ([], ["immediate_response"])
    check_address((await subject.client.pick(subject.completion()))[0])


async def test_empty_messages_do_no_harm(subject: Subject) -> None:
    async with subject.client.conversation() as one:
        await one.send()
        await one.send(request_headers={})
        await one.body(subject.completion())
        await one.until_body_ends()
        assert len(one.of("request_headers")) + len(one.of("immediate_response")) == 1
    check_address((await subject.client.pick(subject.completion()))[0])


async def test_streams_that_are_cut_anywhere_do_no_harm(subject: Subject) -> None:
    for steps in range(4):
        async with subject.client.conversation() as one:
            if steps > 0:
                await one.headers()
            if steps > 1:
                await one.body(subject.completion()[:5], end=False)
            if steps > 2:
                await one.body(subject.completion()[5:])
    check_address((await subject.client.pick(subject.completion()))[0])
