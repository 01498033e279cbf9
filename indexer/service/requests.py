# SPDX-License-Identifier: Apache-2.0
"""Bodies of the service's calls, and what is wrong with one. Unknown fields are ignored, as by other indexers."""

from __future__ import annotations

from array import array
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

DEFAULT_TENANT = "default"
MAX_RANK = 1023
"""A rank costs a slot in the index, and so do those below it."""
_MAX_U64 = 0xFFFF_FFFF_FFFF_FFFF

# msgspec bounds integers only to 63 bits; the upper half is checked where it is used.
Unsigned = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1)]
Rank = Annotated[int, Meta(ge=0, le=MAX_RANK)]
BlockSize = Annotated[int, Meta(ge=1, le=1 << 20)]


class RequestError(Exception):
    """A request that is refused; ``status`` is an HTTP status from 400 on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Grouped(Struct, frozen=True, kw_only=True):
    """``routing_group`` is a newer name of ``tenant_id``."""

    model_name: Name
    tenant_id: Name | None = None
    routing_group: Name | None = None

    @property
    def named_tenant(self) -> str | None:
        """The tenant, if the body names one.

        Raises:
            RequestError: it names two.
        """
        if self.tenant_id is not None and self.routing_group not in (None, self.tenant_id):
            raise RequestError(
                422, "tenant_id and routing_group are two names of one field, with other values here"
            )
        return self.tenant_id if self.tenant_id is not None else self.routing_group

    @property
    def tenant(self) -> str:
        return self.named_tenant or DEFAULT_TENANT


class Register(_Grouped, frozen=True, kw_only=True):
    """``POST /register``."""

    instance_id: Unsigned
    endpoint: Name
    block_size: BlockSize
    dp_rank: Rank | None = None
    replay_endpoint: Name | None = None
    lora_name: str | None = None


class Unregister(_Grouped, frozen=True, kw_only=True):
    """``POST /unregister``."""

    instance_id: Unsigned
    dp_rank: Rank | None = None


class Query(_Grouped, frozen=True, kw_only=True):
    """``POST /query``."""

    token_ids: list[int]
    lora_name: str | None = None
    cache_salt: str | None = None

    def tokens(self) -> array[int]:
        """The prompt as 32-bit tokens.

        Raises:
            RequestError: a token is out of range.
        """
        try:
            return array("I", self.token_ids)
        except OverflowError:
            where = next(i for i, token in enumerate(self.token_ids) if not 0 <= token <= 0xFFFF_FFFF)
            raise RequestError(
                422, f"token_ids[{where}]: {self.token_ids[where]} is no 32-bit token id"
            ) from None


class QueryByHash(_Grouped, frozen=True, kw_only=True):
    """``POST /query_by_hash``: our keyed hashes, signed or unsigned; ``hash_key_id`` is checked if given."""

    block_hashes: list[int]
    hash_key_id: str | None = None

    def hashes(self) -> bytes:
        """8 bytes each.

        Raises:
            RequestError: a hash has more than 64 bits.
        """
        try:
            return array(
                "Q", [value & _MAX_U64 if -(1 << 63) <= value < 0 else value for value in self.block_hashes]
            ).tobytes()
        except OverflowError:
            raise RequestError(422, "block_hashes: a hash has 64 bits") from None


class Peer(Struct, frozen=True):
    """``POST /register_peer`` and ``/deregister_peer``."""

    url: Name


_T = TypeVar("_T")


def decode(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """The body of a request.

    Raises:
        RequestError: 400 where it is not JSON, 422 where a field is wrong; the message names the field.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(422, str(error).replace("$.", "")) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
