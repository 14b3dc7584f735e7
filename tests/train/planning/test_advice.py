"""The table "Choosing settings" of docs/planning.md: plans of each change, and the row that it shrinks."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from shardwright.planner import Device, Verdict, judge, parse_devices, speed_of
from shardwright.train.config import load_config
from shardwright.train.planning import programs

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama_8b.toml"
SMALL = (
    ("model.n_layers", "2"),
    ("train.seq_len", "2048"),
    ("validation.every", "0"),
    ("model.vocab_size", "1024"),
)
DEEP = (("model.n_layers", "6"),)
TINY = (
    *SMALL,
    ("model.dim", "256"),
    ("model.n_heads", "4"),
    ("model.n_kv_heads", "4"),
    ("model.ffn_dim", "512"),
)
Keys = tuple[tuple[str, str], ...]


@functools.cache
def verdict(keys: Keys, ranks: int, folder: Path) -> Verdict:
    slow = folder / "slow.toml"  # eight ranks of a node share one slow network
    slow.write_text('like = "h100"\n[speed]\nacross = 3\n')
    device: Device = parse_devices(str(slow), lambda: pytest.fail())[1]
    batch = ("train.global_batch", str(4 * ranks))
    program = programs.program_of(load_config(EXAMPLE, (batch, *keys), ranks=ranks), ranks)
    return judge(program, device, ranks, speed=speed_of(program, device, ranks, with_range=False))


def seconds(verdict: Verdict, *names: str) -> float:
    assert verdict.speed is not None
    tokens = verdict.speed.tokens
    return sum(loss.seconds for loss in verdict.speed.losses() if loss.name in names) / tokens


MEMORY: dict[str, tuple[tuple[str, ...], Keys, Keys]] = {
    "micro-batch": (("activations",), (("train.micro_batch", "4"),), (("train.micro_batch", "1"),)),
    "ops": (("activations",), (), (("activations.checkpoint", "ops"),)),
    "full": (("activations",), (("activations.checkpoint", "ops"),), (("activations.checkpoint", "full"),)),
    "zero3": ((), (("parallel.strategy", "zero1"),), ()),
    "8 bits": (("optimizer",), (), (("optimizer.name", "adamw8bit"),)),
    "offload": (("optimizer", "parameters", "gradients"), (), (("parallel.offload", "cpu"),)),
    "reshard": (
        ("slabs",),
        (("parallel.reshard_after_forward", "never"), *DEEP),
        (("parallel.reshard_after_forward", "always"), *DEEP),
    ),
    "prefetch": (("slabs",), (("parallel.prefetch", "2"), *DEEP), (("parallel.prefetch", "1"), *DEEP)),
}  # fmt: skip
TIME: dict[str, tuple[tuple[str, ...], int, Keys, Keys]] = {
    "larger micro-batch": (("waits", "beside"), 8, (), (("train.micro_batch", "4"),)),
    "replicas": (("waits", "beside"), 16, (), (("parallel.strategy", "hsdp"), ("parallel.replicas", "2"))),
    "never": (("waits", "beside"), 16, DEEP, (("parallel.reshard_after_forward", "never"), *DEEP)),
    "compiled": (("memory",), 8, (), (("train.compile", "inductor"),)),
    "host, compiled": (("host",), 1, TINY, (*TINY, ("train.compile", "inductor"))),
    "host, micro-batch": (("host",), 1, TINY, (*TINY, ("train.micro_batch", "4"))),
    "graph": (("host",), 1, TINY, (*TINY, ("train.cuda_graph", "true"))),
    "checkpoint": (("recomputed",), 8, (("activations.checkpoint", "full"),), (("activations.checkpoint", "ops"),)),
    "optimizer": (("optimizer",), 8, (), (("train.global_batch", "64"),)),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("devices")


@pytest.mark.extensive("two plans for each", but=("ops",))
@pytest.mark.parametrize("name", MEMORY)
def test_a_change_saves_the_memory_that_it_is_for(folder: Path, name: str) -> None:
    groups, before, after = MEMORY[name]
    large, small = (verdict((*SMALL, *keys), 8, folder) for keys in (before, after))
    of_large, of_small = large.peak.by_group(), small.peak.by_group()
    assert all(of_small.get(group, 0) < of_large[group] for group in groups)
    if not groups:
        assert small.usage.reserved < large.usage.reserved


@pytest.mark.extensive("two plans for each", but=("larger micro-batch",))
@pytest.mark.parametrize("name", TIME)
def test_a_change_shrinks_the_row_that_it_is_for(folder: Path, name: str) -> None:
    losses, ranks, before, after = TIME[name]
    slow, fast = (
        seconds(verdict((*SMALL, *keys) if keys[:1] != TINY[:1] else keys, ranks, folder), *losses)
        for keys in (before, after)
    )
    assert fast < 0.95 * slow
