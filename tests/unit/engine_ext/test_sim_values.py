# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from array import array

import msgspec
import pytest

from engine_ext.sim.agenda import Agenda
from engine_ext.sim.chat import ChatTemplate, ChatTemplateError
from engine_ext.sim.config import SimConfig
from engine_ext.sim.errors import SimConfigError
from engine_ext.sim.faults import FaultOrder, Faults
from engine_ext.sim.hashing import chain_hashes, root_hash
from engine_ext.sim.profile import load_profile, profile_names
from engine_ext.sim.request import PeerSource, TransferParams, parse_transfer_params
from engine_ext.sim.text import LETTERS, OutputText
from engine_ext.sim.tokenizer import IM_END, IM_START, ByteTokenizer

PEER = {"kv_request_id": "k", "remote_host": "h", "remote_port": 5710}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, TransferParams()),
        ({"unknown": 1}, TransferParams()),
        ({"remote_kv_source": PEER}, TransferParams(source=PeerSource("k", "h", 5710), kv_request_id="k")),
        (
            {"remote_prefiller": PEER},
            TransferParams(source=PeerSource("k", "h", 5710), waits_for_prefill=True, kv_request_id="k"),
        ),
        ({"remote_kv_source": {"remote_host": "h", "remote_port": 1}}, TransferParams()),
        ({"remote_kv_source": {**PEER, "remote_port": "no"}}, TransferParams()),
        ({"remote_kv_source": "peer"}, TransferParams()),
        (
            {"remote_decoder": {"kv_request_id": "d"}},
            TransferParams(decoder_id="d", keeps_all_blocks=True, kv_request_id="d"),
        ),
        (
            {"max_load_tokens": 0, "max_offload_tokens": 7},
            TransferParams(max_load_tokens=0, max_offload_tokens=7),
        ),
        ({"max_load_tokens": -1, "max_offload_tokens": True}, TransferParams()),
        ({"kv_load_tiers": []}, TransferParams(peer_allowed=False, storage_allowed=False)),
        ({"kv_load_tiers": [{"medium": "cpu"}]}, TransferParams(storage_allowed=False)),
        ({"kv_load_tiers": [{"medium": "storage"}]}, TransferParams()),
        ({"kv_load_tiers": [{"locality": "LOCAL"}]}, TransferParams()),
        ({"kv_load_tiers": ["x", {"medium": "DISK"}]}, TransferParams()),
    ],
)
def test_transfer_parameters_are_read_as_vllm_reads_them(params: object, expected: TransferParams) -> None:
    assert parse_transfer_params(params) == expected


def test_hashes_name_a_block_with_its_whole_prefix() -> None:
    root = root_hash("seed")
    whole = chain_hashes(range(12), 4, root)
    assert chain_hashes(range(11), 4, root) == whole[:2]
    assert chain_hashes(array("I", range(12)), 4, root) == whole
    assert chain_hashes([9, *range(1, 12)], 4, root)[2] != whole[2]
    assert chain_hashes(range(12), 4, root_hash("other"))[0] != whole[0]
    salted = chain_hashes(range(12), 4, root, salt=("s",))
    assert not set(salted) & set(whole)
    assert not set(chain_hashes(range(12), 4, root, lora_name="s")) & set(salted + whole)


def test_output_depends_on_every_prompt_token_and_on_nothing_else() -> None:
    def text(*prompt: int) -> list[int]:
        output = OutputText(array("I", prompt))
        return [output.token(i) for i in range(32)]

    assert text(1, 2, 3) == text(1, 2, 3)
    assert text(1, 2, 3) != text(1, 2, 4)
    assert text(1, 2, 3) != text(4, 2, 3)
    assert set(text(1, 2, 3)) <= set(LETTERS)


def test_output_is_the_same_however_much_of_it_is_asked_for_at_once() -> None:
    prompt = array("I", range(7))
    one_by_one = [OutputText(prompt).token(i) for i in range(100)]
    for start, end in ((0, 100), (0, 0), (5, 6), (15, 17), (16, 32), (31, 100)):
        assert OutputText(prompt).tokens(start, end) == one_by_one[start:end]
    again = OutputText(prompt)
    assert [again.token(i) for i in (40, 3, 40, 41)] == [one_by_one[i] for i in (40, 3, 40, 41)]


@pytest.mark.parametrize("text", ["", "hello", "grüße 你好 🎈", "\ud800", "a<|im_start|>b"])
def test_the_byte_tokenizer_splits_nowhere_but_at_its_marks(text: str) -> None:
    ids = ByteTokenizer().encode(text, add_special_tokens=True)
    names = {IM_START: b"<|im_start|>", IM_END: b"<|im_end|>"}
    back = b"".join(names.get(i) or bytes([i]) for i in ids)
    assert back.decode("utf-8", "surrogatepass") == text


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    template = ChatTemplate()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == (
        "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(ChatTemplateError, match="text only"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(ChatTemplateError, match="no system"):
        ChatTemplate("{{ raise_exception('no system') }}").render([{"role": "system", "content": "x"}])


def test_every_profile_loads_and_fast_is_a_hundred_times_faster() -> None:
    assert {"default", "fast"} <= {*profile_names()}
    slow, fast = load_profile("default"), load_profile("fast")
    assert slow.prefill_s(8192, 0) == pytest.approx(8192 / 16000, rel=0.2)
    assert slow.scaled(100).prefill_s(100, 50) == pytest.approx(fast.prefill_s(100, 50))
    assert slow.scaled(100).peer_bytes_per_s == pytest.approx(fast.peer_bytes_per_s)
    assert slow.scaled(100).kv_bytes_per_token == slow.kv_bytes_per_token


def test_bad_options_name_field_value_and_what_is_accepted() -> None:
    with pytest.raises(SimConfigError, match="profile: 'x' is not accepted; accepted: default or "):
        load_profile("x")
    with pytest.raises(SimConfigError, match="hbm_blocks: 1"):
        SimConfig(hbm_blocks=1)
    with pytest.raises(SimConfigError, match="time_scale: 0"):
        load_profile("fast").scaled(0)


def test_plans_run_in_time_order_and_can_be_taken_back() -> None:
    agenda, done = Agenda(), []
    agenda.at(2.0, lambda now: done.append(("b", now)))
    agenda.at(1.0, lambda now: agenda.at(2.0, lambda later: done.append(("c", later))))
    cancelled = agenda.at(0.5, lambda now: done.append(("x", now)))
    cancelled.cancel()
    assert agenda.next_s == 1.0
    agenda.run(1.5)
    assert done == []
    agenda.run(2.0)
    assert done == [("b", 2.0), ("c", 2.0)]
    assert agenda.next_s is None


def test_an_order_changes_only_what_it_names() -> None:
    faults = FaultOrder(silence=True, drop_batches=3).applied_to(Faults(error500=True))
    assert (faults.silence, faults.drop_batches, faults.error500) == (True, 3, True)
    assert FaultOrder(clear=True, stall=True).applied_to(faults) == Faults(stall=True)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"silense": true}', type=FaultOrder)
