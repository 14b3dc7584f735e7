"""The trainer builds its model in shards: values equal those of one process, memory stays below a whole copy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.extend import kinds
from shardwright.train.models.build import build_model
from shardwright.train.parallel import host_memory, recipe
from tests.support.pool import multirank
from tests.train.kit.jobs import HYBRID, tiny, trainer

OF_LLAMA: list[dict[str, Any]] = [
    {},
    {"layout": "ragged", "model": {"tied_embeddings": True}},
    {"strategy": "ddp"},
    {"strategy": "zero1", "layout": "element"},
    {"strategy": "zero2", "layout": 8},
    {"offload": "cpu"},
    {"memory": "arena", "param_dtype": "bfloat16", "keep_float32": ("*norm.weight",)},
    {"tensor": 2},
    {"tensor": 2, "layout": "ragged", "model": {"tied_embeddings": True}},
]
OF_HYBRID: list[dict[str, Any]] = [
    {},
    {"layout": "ragged", "model": {"tied_embeddings": False}},
    {"strategy": "zero1"},
    {"tensor": 2},
    {"expert": 2},
]
FOUR_RANKS: list[dict[str, Any]] = [
    {"strategy": "hsdp", "replicas": 2},
    {"strategy": "hfsdp", "replicas": 2, "layout": "ragged"},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "strategy": "zero2", "layout": "ragged"},
]


def check_values(rank: int, world_size: int, model: dict[str, Any], options: dict[str, Any]) -> None:
    """Every parameter and buffer of the trainer's model, equals bit by bit the one of the model built at once."""
    config = tiny(
        model={**model, **options.get("model", {})},
        train={"micro_batch": 1},
        parallel={
            "engine": "shardwright",
            **{key: value for key, value in options.items() if key != "model"},
        },
    )
    job = trainer(config, rank, world_size)
    after = torch.get_rng_state()
    torch.manual_seed(config.run.seed)
    plain = build_model(config.model, 256)
    assert torch.equal(after, torch.get_rng_state())
    found = get_model_state_dict(job.model, options=StateDictOptions(full_state_dict=True))
    expected = plain.state_dict()
    if rank == 0:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    buffers = dict(job.model.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.extensive("each model", but=("llama-*",))
@multirank(2)
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_values_are_those_of_one_process(rank: int, world_size: int, kind: str) -> None:
    for options in OF_LLAMA if kind == "llama" else OF_HYBRID:
        check_values(rank, world_size, {"n_kv_heads": 2} if kind == "llama" else HYBRID, options)


@pytest.mark.extensive("each mesh")
@multirank(4, timeout=120)
def test_values_over_two_axes(rank: int, world_size: int) -> None:
    for options in FOUR_RANKS:
        check_values(rank, world_size, HYBRID, options)


@multirank(2)
def test_nothing_is_whole_before_it_is_sharded(rank: int, world_size: int) -> None:
    config = tiny(parallel={"engine": "shardwright"})
    torch.manual_seed(0)
    model = recipe.build_for(config.for_building, 256)
    assert all(recipe.has_no_values(parameter) for parameter in model.parameters())
    for engine in ("fsdp2", "fsdp1", "ddp"):  # torch's own engines need values
        whole = recipe.build_for(tiny(parallel={"engine": engine}).for_building, 256)
        assert not any(recipe.has_no_values(parameter) for parameter in whole.parameters())


@pytest.mark.extensive("a model of 8 billion parameters")
def test_8b_parameters_as_one_of_1024_ranks() -> None:
    # In a process of its own: it does not use the pool's process group, and its peak is its own. Large pages save
    # most of the time in which the system clears memory.
    command = [sys.executable, "-m", "tests.train.models.kit.eight_billion"]
    variables = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "THP_MEM_ALLOC_ENABLE": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables)
    assert ended.returncode == 0 and ended.stdout.split()[-1:] == ["passed"], ended.stdout + ended.stderr


def eight_billion(**parallel_section: Any) -> Config:
    sections = {"model": {"preset": "8B"}, "train": {"global_batch": 8, "micro_batch": 1}}
    return Config.model_validate({**sections, "parallel": parallel_section})


def test_the_check_counts_all_ranks_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = namedtuple("memory", "total")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(128 * 10**9))
    whole, ours = eight_billion(engine="fsdp2"), eight_billion()
    weights, tables = 4 * 8_030_261_248, 4 * 131_072 * 128
    assert host_memory.building_bytes(whole.for_building, 8, "cuda").total == weights + tables
    with pytest.raises(
        UserError, match=r"found 8,030,261,248 parameters\. .*the 8 ranks of this machine need"
    ) as e:
        host_memory.check_model_fits(whole.for_building, 8, 8, "cuda")
    assert f"{8 * (weights + tables):,} bytes" in str(e.value)
    assert "parallel.engine = 'fsdp2'; 'shardwright' builds it in shards" in str(e.value)
    host_memory.check_model_fits(whole.for_building, 8, 1, "cuda")  # one rank on each of eight hosts
    # Of ours only the largest matrix, while it is drawn, is in the host's memory beside GPUs.
    drawing = 4 * 128_256 * 4096
    assert host_memory.building_bytes(ours.for_building, 8, "cuda").total == tables + drawing
    host_memory.check_model_fits(ours.for_building, 8, 8, "cuda")
    for options, cuts in (
        ({}, 8),
        ({"strategy": "zero1"}, 8),
        ({"strategy": "ddp"}, 1),
        ({"strategy": "hsdp", "replicas": 2}, 4),
        ({"strategy": "hfsdp", "replicas": 2}, 8),
        ({"tensor": 2}, 8),
        ({"tensor": 2, "strategy": "ddp"}, 2),
    ):
        found = host_memory.building_bytes(eight_billion(**options).for_building, 8, "cpu")
        assert found.weights == weights // cuts and found.drawing == drawing, options
    assert (
        host_memory.building_bytes(eight_billion(offload="cpu").for_building, 8, "cuda").weights
        == weights // 8
    )


def test_the_largest_parameter_of_each_preset_is_known() -> None:
    for about in kinds:
        kind = about.name
        for preset in about.presets:
            config = Config.model_validate({"model": {"kind": kind, "preset": preset}})
            with torch.device("meta"):
                model = build_model(config.model, 256)
            largest = max(parameter.numel() for parameter in model.parameters())
            assert config.model.shape().largest_parameter == largest, (kind, preset)
