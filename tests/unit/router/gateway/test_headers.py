# SPDX-License-Identifier: Apache-2.0
import pytest

from router.gateway.headers import request_id_of, to_client, to_worker


def test_the_worker_gets_end_to_end_headers_only():
    client = [
        (b"host", b"gateway"),
        (b"connection", b"keep-alive, X-Private"),
        (b"x-private", b"1"),
        (b"te", b"trailers"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"3"),
        (b"expect", b"100-continue"),
        (b"accept-encoding", b"gzip, br"),
        (b"x-pointsman-worker", b"spoofed"),
        (b"authorization", b"Bearer k"),
        (b"content-type", b"application/json"),
        (b"x-twice", b"1"),
        (b"x-twice", b"2"),
    ]
    assert to_worker(client, (), "r1") == [
        (b"authorization", b"Bearer k"),
        (b"content-type", b"application/json"),
        (b"x-twice", b"1"),
        (b"x-twice", b"2"),
        (b"accept-encoding", b"identity"),
        (b"x-request-id", b"r1"),
    ]


def test_overrides_replace_the_clients_headers():
    client = [(b"authorization", b"tenant key"), (b"x-data-parallel-rank", b"9")]
    sent = to_worker(client, ((b"X-data-parallel-rank", b"2"), (b"authorization", b"worker key")), "r1")
    assert sorted(name.lower() for name, _ in sent) == [
        b"accept-encoding",
        b"authorization",
        b"x-data-parallel-rank",
        b"x-request-id",
    ]
    assert (b"authorization", b"worker key") in sent


def test_the_client_gets_the_workers_headers_and_ours():
    worker = [
        (b"Content-Type", b"text/event-stream"),
        (b"Connection", b"close"),
        (b"Transfer-Encoding", b"chunked"),
        (b"X-Request-Id", b"theirs"),
        (b"X-Pointsman-Path", b"forged"),
        (b"Content-Length", b"5"),
    ]
    assert to_client(worker, ((b"x-pointsman-worker", b"w1"),), "r1") == [
        (b"content-type", b"text/event-stream"),
        (b"content-length", b"5"),
        (b"x-pointsman-worker", b"w1"),
        (b"x-request-id", b"r1"),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"abc-1", "abc-1"),
        (b"", "new"),
        (b"a b", "new"),
        (b"\xff", "new"),
        (b"x" * 129, "new"),
        (None, "new"),
    ],
)
def test_a_sane_request_id_is_kept(value, expected):
    headers = [] if value is None else [(b"x-request-id", value)]
    assert request_id_of(headers, lambda: "new") == expected
