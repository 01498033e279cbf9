# SPDX-License-Identifier: Apache-2.0
"""Errors of the router, and the one place that gives them an HTTP status.

RouterError
├── ConfigError                 bad configuration or arguments (exit code 2)
├── RequestError                the client's request cannot be served as it is (4xx)
│   ├── TransferParamsRefused   kv_transfer_params from a client that is not trusted
│   ├── EncodingRefused         a JSON body in UTF-16 or UTF-32, which cannot be looked into
│   ├── InvalidApiKey           no key of a tenant, where one is required (401)
│   ├── HeaderRefused           a header of ours with a value that is not accepted
│   └── NotFoundError           an unknown decision, worker or path of the admin API
├── TokensUnavailable           no token ids for this request (routing goes on by load)
├── NoWorkerAvailable           nothing can serve the request now (503)
├── Overloaded                  everything is busy and the request was not kept waiting (429)
└── UpstreamError               the worker failed before its first byte (502)
"""

from __future__ import annotations

import enum
from http import HTTPStatus


class FallbackReason(enum.StrEnum):
    """Why a request was not routed by what the workers hold. Shared by header, metric and record."""

    UNKNOWN_PATH = "unknown_path"  # pass-through endpoint: nothing to hash
    UNPARSABLE_BODY = "unparsable_body"  # the worker will answer with its own 4xx
    NO_PROMPT = "no_prompt"  # parsed, but no prompt in a known place
    MULTIMODAL = "multimodal"  # image or audio parts: ids cannot be known here
    TOKENIZER_ERROR = "tokenizer_error"  # neither a local tokenizer nor a worker could tokenise
    NO_INDEX = "no_index"  # no candidate publishes events
    POLICY = "policy"  # the configured policy does not look at the index


class ShedReason(enum.StrEnum):
    """Why a request was answered 429. Shared by message and metric."""

    FULL = "full"  # too many wait; it was the newest of the tenant with the most waiting per weight
    TIMEOUT = "timeout"  # it waited for as long as a request may
    SHEDDABLE = "sheddable"  # its objective's priority is negative, and every worker is busy
    SLO = "slo"  # the time to first token that it asks for cannot be met


class RouterError(Exception):
    """Base of every error raised by the router."""


class ConfigError(RouterError):
    """Bad configuration: names the field, the value and what is accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        super().__init__(f"{field}: {value!r} is not accepted; accepted: {accepted}")


class RequestError(RouterError):
    """The client's request is at fault."""

    status = HTTPStatus.BAD_REQUEST


class TransferParamsRefused(RequestError):
    """``kv_transfer_params`` from a client: they could point a worker at any host."""


class EncodingRefused(RequestError):
    """A JSON body that is not UTF-8: what it asks of the worker cannot be seen."""


class InvalidApiKey(RequestError):
    """No key, or one that no tenant has."""

    status = HTTPStatus.UNAUTHORIZED


class HeaderRefused(RequestError):
    """A header that this router reads has a value that is not accepted."""


class NotFoundError(RequestError):
    """No such decision, worker or path."""

    status = HTTPStatus.NOT_FOUND


class TokensUnavailable(RouterError):
    """The prompt's token ids cannot be known; ``reason`` says why."""

    def __init__(self, reason: FallbackReason, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)


class NoWorkerAvailable(RouterError):
    """No worker can take the request; ``reason`` is one of a small closed set of words."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Overloaded(RouterError):
    """Everything is busy, and the request cannot wait (any longer)."""

    def __init__(self, reason: ShedReason, retry_after_s: int) -> None:
        self.reason = reason
        self.retry_after_s = retry_after_s
        super().__init__(f"{reason.value}: retry after {retry_after_s} s")


class UpstreamError(RouterError):
    """The worker did not answer, or broke off before the first byte."""

    def __init__(self, worker_id: str, detail: str) -> None:
        self.worker_id = worker_id
        super().__init__(f"worker {worker_id}: {detail}")


def http_status(error: RouterError) -> HTTPStatus:
    """The HTTP status of an error that reaches a client."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, NoWorkerAvailable):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, Overloaded):
        return HTTPStatus.TOO_MANY_REQUESTS
    if isinstance(error, UpstreamError):
        return HTTPStatus.BAD_GATEWAY
    return HTTPStatus.INTERNAL_SERVER_ERROR
