# SPDX-License-Identifier: Apache-2.0
"""What tells two engines' blocks apart, and what must not."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from engine_ext.transfer.errors import RefusalReason
from engine_ext.transfer.fingerprint import Fingerprint
from engine_ext.vllm.peers import fingerprints
from engine_ext.vllm.peers.fingerprints import (
    SAMPLE_BYTES,
    fingerprint_of,
    model_name,
    weights_digest,
    weights_of,
)


@dataclass(frozen=True)
class Group:
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("layer0", "layer1")
    group_id: int = 0


@dataclass(frozen=True)
class Model:
    name: str = "org/model"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Cache:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 2


@dataclass(frozen=True)
class Parallel:
    world_size: int = 2
    tp_size: int = 2
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    is_parallelism_agnostic: bool = False


@dataclass(frozen=True)
class Config:
    """The fields of vLLM's OffloadingConfig that count."""

    groups: tuple[Group, ...] = (Group(),)
    worker_kv_bytes_per_block: int = 4096
    model: Model = field(default_factory=Model)
    cache: Cache = field(default_factory=Cache)
    parallel: Parallel = field(default_factory=Parallel)
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = "NHD"


BASE = Config()


def of(config: Config = BASE, **options: str) -> Fingerprint:
    given = {"platform": "cuda", "weights_revision": "r1", **options}
    return fingerprint_of(config, block_bytes=8192, hash_root=given.pop("root", "root").encode(), **given)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (of(replace(BASE, model=Model(name="org/other"))), RefusalReason.MODEL),
        (of(weights_revision="r2"), RefusalReason.WEIGHTS_REVISION),
        (of(replace(BASE, model=Model(dtype="fp8"))), RefusalReason.DTYPE),
        (of(replace(BASE, kv_cache_layout="HND")), RefusalReason.LAYOUT),
        (of(replace(BASE, cache=Cache(blocks_per_chunk=1))), RefusalReason.LAYOUT),
        (of(replace(BASE, groups=(Group(layer_names=("layer0",)),))), RefusalReason.LAYOUT),
        (of(replace(BASE, groups=(Group(layer_names=("layer1", "layer0")),))), RefusalReason.LAYOUT),
        (of(platform="cpu"), RefusalReason.LAYOUT),
        (of(replace(BASE, parallel=Parallel(tp_size=1, pp_size=2))), RefusalReason.TP_MAP),
        (of(replace(BASE, replicated_layout=True)), RefusalReason.TP_MAP),
        (of(root="another root"), RefusalReason.HASH_SEED),
        (of(tenant="blue"), RefusalReason.TENANT),
    ],
)
def test_each_difference_has_its_name(other: Fingerprint, reason: RefusalReason) -> None:
    assert of().differences(other) == (reason,)


def test_equal_engines_agree_and_the_root_of_the_hashes_is_not_shown() -> None:
    assert of().differences(of()) == ()
    assert "root" not in of().hash_seed


def test_canonical_pages_lie_the_same_way_under_every_topology() -> None:
    def canonical(tp: int) -> Fingerprint:
        parallel = Parallel(world_size=tp, tp_size=tp, is_parallelism_agnostic=True)
        return of(replace(BASE, canonical_layout=True, parallel=parallel))

    assert canonical(1).differences(canonical(4)) == ()


def write_model(folder: Path, weights: bytes = b"w" * 300_000) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_copies_of_a_model_agree_whatever_their_times_and_other_files(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "a/model"), write_model(tmp_path / "b/model")
    os.utime(two / "model.safetensors", (1, 1))
    (two / "README.md").write_text("notes")
    assert weights_digest(one) == weights_digest(two)
    assert model_name(str(one)) == model_name(str(two)) == "model"


@pytest.mark.parametrize("place", [0, 150_000, 299_999])
def test_other_weights_differ_at_the_head_in_the_middle_and_at_the_end(tmp_path: Path, place: int) -> None:
    other = bytearray(b"w" * 300_000)
    other[place] = 0
    assert weights_of(str(write_model(tmp_path / "a"))) != weights_of(
        str(write_model(tmp_path / "b", bytes(other)))
    )


def test_only_samples_of_large_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "a")
    with (folder / "model.safetensors").open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert weights_digest(folder)
    monkeypatch.setattr(fingerprints, "SAMPLE_BYTES", SAMPLE_BYTES // 2)
    assert weights_digest(folder)


def test_a_hub_snapshot_is_known_by_its_commit_and_its_repository(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = write_model(tmp_path / "models--org--model/snapshots" / commit)
    assert weights_of(str(folder)) == commit
    assert model_name(str(folder)) == "org/model"


def test_a_hub_id_is_known_by_the_snapshots_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert weights_of("org/model") == "unnamed"
    (tmp_path / "models--org--model/snapshots/abc").mkdir(parents=True)
    assert weights_of("org/model") == "snapshots:abc"
