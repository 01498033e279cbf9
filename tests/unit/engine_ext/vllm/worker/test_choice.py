# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from engine_ext.vllm.worker.choice import Copier, Platform, PromotionRefused, choose_copier

CUDA = Platform("cuda", is_cuda=True, is_cpu=False, offloads=True)
CPU = Platform("cpu", is_cuda=False, is_cpu=True, offloads=False)
ROCM = Platform("rocm", is_cuda=False, is_cpu=False, offloads=True)
TPU = Platform("tpu", is_cuda=False, is_cpu=False, offloads=False)


@pytest.mark.parametrize(
    ("extra", "platform", "copier"),
    [
        ({}, CUDA, Copier.GPU),
        ({"promotion": "gpu_ops"}, CUDA, Copier.GPU),
        ({"promotion": "vllm"}, CUDA, Copier.VLLM),
        ({}, CPU, Copier.HOST),
        ({"promotion": "gpu_ops"}, CPU, Copier.HOST),
        ({"promotion": "vllm"}, ROCM, Copier.VLLM),
    ],
)
def test_the_copier_is_what_was_asked_for(extra: dict[str, str], platform: Platform, copier: Copier) -> None:
    assert choose_copier(extra, platform) is copier


@pytest.mark.parametrize(
    ("extra", "platform", "words"),
    [
        ({"promotion": "vllm"}, CPU, ("promotion: vllm", "does not run on cpu", "leave the setting out")),
        ({"promotion": "vllm"}, TPU, ("promotion: vllm", "does not run on tpu")),
        ({}, ROCM, ("not on rocm", "promotion: vllm uses vLLM's own copy")),
        ({"promotion": "gpu_ops"}, TPU, ("gpu_ops moves pages on CUDA and on the CPU, not on tpu",)),
        ({"promotion": "GPU_OPS"}, CUDA, ("'GPU_OPS'", "'gpu_ops' or 'vllm'")),
        ({"promotion": None}, CUDA, ("None", "'gpu_ops' or 'vllm'")),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_else_is_tried(
    extra: dict[str, str], platform: Platform, words: tuple[str, ...]
) -> None:
    with pytest.raises(PromotionRefused) as refused:
        choose_copier(extra, platform)
    for word in words:
        assert word in str(refused.value)


def test_no_way_out_is_named_where_there_is_none() -> None:
    with pytest.raises(PromotionRefused) as refused:
        choose_copier({}, TPU)
    assert "vllm uses" not in str(refused.value)
