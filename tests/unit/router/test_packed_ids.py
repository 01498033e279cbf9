# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from router.gateway.parse import parse_request
from router.packed_ids import packed_ids


@pytest.mark.parametrize("items", [[1, True], [1, 2.5], [1, "2"], [1, None], [-1], [2**32], [2**70], [[1]]])
def test_what_is_not_all_token_ids_is_not_packed(items: list[object]) -> None:
    assert packed_ids(items) is None


def test_token_ids_are_packed_as_they_are() -> None:
    ids = packed_ids([0, 1, 2**32 - 1])
    assert ids is not None
    assert (list(ids), ids.typecode, ids.itemsize) == ([0, 1, 2**32 - 1], "I", 4)


def test_a_prompt_of_mixed_types_stays_as_the_client_wrote_it() -> None:
    request = parse_request("POST", "/v1/completions", (), b'{"prompt": [1, true]}', "id")
    assert request.document == {"prompt": [1, True]}
