# SPDX-License-Identifier: Apache-2.0
"""Who may read from whom: every mismatch is refused by its name, on both sides."""

from __future__ import annotations

import msgspec
import pytest

from engine_ext.transfer.agent import PeerOffer
from engine_ext.transfer.errors import HandshakeRefusedError, RefusalReason
from engine_ext.transfer.fingerprint import Fingerprint
from engine_ext.transfer.handshake import Handshake
from engine_ext.transfer.messages import MAX_MESSAGE_BYTES, Refusal, Welcome, decode, encode
from engine_ext.transfer.region import Region

READER, SOURCE, OTHER = "1" * 32, "2" * 32, "3" * 32
FINGERPRINT = Fingerprint(
    model="m",
    weights_revision="r1",
    dtype="bfloat16",
    block_length_bytes=4096,
    layout="nhd",
    tp_map="tp=1:0",
    hash_seed="seed-digest",
    tenant="tenant-digest",
)


def side(
    boot_id: str, fingerprint: Fingerprint = FINGERPRINT, backends: tuple[str, ...] = ("UCX",)
) -> Handshake:
    region = Region(4096, fingerprint.block_length_bytes, 10)
    return Handshake(fingerprint, PeerOffer(boot_id, f"pointsman-{boot_id}", b"\x00meta", region, backends))


def refusal(answer: bytes) -> Refusal:
    message = decode(answer)
    assert isinstance(message, Refusal)
    return message


def test_compatible_sides_end_with_the_source_s_offer() -> None:
    source, reader = side(SOURCE), side(READER)
    answer, refused = source.answer(reader.hello(expected_boot_id=SOURCE))
    assert refused is None
    assert reader.conclude(answer, expected_boot_id=SOURCE) == source.offer


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("model", "other", RefusalReason.MODEL),
        ("weights_revision", "r2", RefusalReason.WEIGHTS_REVISION),
        ("dtype", "float16", RefusalReason.DTYPE),
        ("block_length_bytes", 8192, RefusalReason.BLOCK_LENGTH),
        ("layout", "hnd", RefusalReason.LAYOUT),
        ("tp_map", "tp=2:0", RefusalReason.TP_MAP),
        ("hash_seed", "another", RefusalReason.HASH_SEED),
        ("tenant", "another", RefusalReason.TENANT),
    ],
)
def test_each_mismatch_is_refused_by_its_name_and_offers_nothing(
    field: str, value: object, reason: RefusalReason
) -> None:
    source = side(SOURCE)
    reader = side(READER, msgspec.structs.replace(FINGERPRINT, **{field: value}))
    answer, refused = source.answer(reader.hello())
    assert refused is not None
    assert refused.reason is reason
    assert source.offer.metadata not in answer
    with pytest.raises(HandshakeRefusedError, match=reason.value) as by_peer:
        reader.conclude(answer)
    assert (by_peer.value.reason, by_peer.value.by_peer) == (reason, True)

    welcome = encode(msgspec.structs.replace(side(SOURCE)._welcome(READER)))
    with pytest.raises(HandshakeRefusedError) as by_us:
        reader.conclude(welcome)
    assert (by_us.value.reason, by_us.value.by_peer) == (reason, False)


def test_several_mismatches_are_all_named_and_secrets_are_not_told() -> None:
    other = msgspec.structs.replace(FINGERPRINT, layout="hnd", hash_seed="mine", tenant="me")
    answer, _ = side(SOURCE).answer(side(READER, other).hello())
    detail = refusal(answer).detail
    assert "layout is 'hnd', here 'nhd'" in detail
    assert "hash_seed differs" in detail
    assert "tenant differs" in detail
    assert b"seed-digest" not in answer
    assert b"tenant-digest" not in answer


def test_another_version_is_named_even_when_its_messages_look_different() -> None:
    hello = msgspec.msgpack.encode({"type": "hello", "version": 2, "new_field": 1})
    assert refusal(side(SOURCE).answer(hello)[0]).reason is RefusalReason.VERSION


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1garbage",
        msgspec.msgpack.encode({"type": "hello", "version": 1}),
        msgspec.msgpack.encode({"type": "surprise", "version": 1}),
        msgspec.msgpack.encode([1, 2]),
        bytes(MAX_MESSAGE_BYTES + 1),
        side(READER).hello()[:-1],
    ],
)
def test_rubbish_is_refused_as_malformed(data: bytes) -> None:
    answer, refused = side(SOURCE).answer(data)
    assert refused is not None
    assert refusal(answer).reason is RefusalReason.MALFORMED
    with pytest.raises(HandshakeRefusedError, match="malformed"):
        side(READER).conclude(data)


def test_any_damaged_message_is_refused_rather_than_raising_something_else() -> None:
    hello, answer = side(READER).hello(), side(SOURCE).answer(side(READER).hello())[0]
    for position in range(len(hello)):
        side(SOURCE).answer(hello[:position] + bytes([hello[position] ^ 0xFF]) + hello[position + 1 :])
    for position in range(len(answer)):
        damaged = answer[:position] + bytes([answer[position] ^ 0xFF]) + answer[position + 1 :]
        try:
            offer = side(READER).conclude(damaged)
        except HandshakeRefusedError:
            continue
        assert offer.metadata == side(SOURCE).offer.metadata


def test_damaged_metadata_never_reaches_the_library() -> None:
    welcome = decode(side(SOURCE).answer(side(READER).hello())[0])
    assert isinstance(welcome, Welcome)
    damaged = encode(msgspec.structs.replace(welcome, metadata=b"\x00mexa"))
    with pytest.raises(HandshakeRefusedError) as refused:
        side(READER).conclude(damaged)
    assert refused.value.reason is RefusalReason.DAMAGED_METADATA


def test_a_region_with_other_blocks_than_the_fingerprint_says_is_refused() -> None:
    welcome = decode(side(SOURCE).answer(side(READER).hello())[0])
    assert isinstance(welcome, Welcome)
    odd = encode(msgspec.structs.replace(welcome, region=Region(4096, 512, 10)))
    with pytest.raises(HandshakeRefusedError, match="block_length"):
        side(READER).conclude(odd)


def test_another_incarnation_than_the_promised_one_is_refused_on_both_sides() -> None:
    answer, refused = side(SOURCE).answer(side(READER).hello(expected_boot_id=OTHER))
    assert refused is not None
    assert refused.reason is RefusalReason.STALE_BOOT
    assert refusal(answer).boot_id == SOURCE, "the refusal says who is there now"
    answer, _ = side(SOURCE).answer(side(READER).hello())
    with pytest.raises(HandshakeRefusedError, match="stale_boot"):
        side(READER).conclude(answer, expected_boot_id=OTHER)


def test_an_answer_to_someone_else_is_not_taken() -> None:
    answer, _ = side(SOURCE).answer(side(OTHER).hello())
    with pytest.raises(HandshakeRefusedError, match="not ours"):
        side(READER).conclude(answer)


def test_sides_without_a_common_backend_refuse() -> None:
    answer, _ = side(SOURCE, backends=("LIBFABRIC",)).answer(side(READER).hello())
    assert refusal(answer).reason is RefusalReason.BACKEND


def test_nobody_shakes_hands_with_itself() -> None:
    answer, _ = side(SOURCE).answer(side(SOURCE).hello())
    assert refusal(answer).reason is RefusalReason.SELF
