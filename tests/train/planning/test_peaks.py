"""Plans of the trainer's steps against the allocator's events of real steps, as rank 0 of a group without other ranks.

The real step runs the CPU's kernels. The plan runs none. Both run the same trainer.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from shardwright.planner import Alloc, Kernel
from shardwright.planner.program import Wait
from shardwright.train.planning.programs import program_of
from tests.train.planning.kit import compare, config_of

#: Settings together, each of which is one of `MORE` alone.
LLAMA: dict[str, str] = {
    "bf16, full": "parallel.param_dtype=bfloat16 parallel.reduce_dtype=float32 activations.checkpoint=full",
    "ragged, zero1": "parallel.layout=ragged parallel.strategy=zero1",
    "arena, micro-batches": "parallel.memory=arena train.micro_batch=2",
    "lora, loss in chunks": "finetune.method=lora train.loss_chunks=4",
}
MORE: dict[str, str] = {
    "plain": "",
    "bf16": "parallel.param_dtype=bfloat16 parallel.reduce_dtype=float32",
    "ragged": "parallel.layout=ragged",
    "zero1": "parallel.strategy=zero1",
    "arena": "parallel.memory=arena",
    "full": "activations.checkpoint=full",
    "micro-batches": "train.micro_batch=2",
    "lora": "finetune.method=lora",
    "loss in chunks": "train.loss_chunks=4",
    "ops": "activations.checkpoint=ops",
    "layers": "activations.checkpoint=layers",
    "zero2": "parallel.strategy=zero2",
    "ddp": "parallel.strategy=ddp",
    "element": "parallel.layout=element",
    "double_buffer": "parallel.memory=double_buffer",
    "max_pool": "parallel.memory=max_pool",
    "in backward": "optimizer.in_backward=true train.max_norm=0",
    "communicate": "train.micro_batch=2 train.accumulate=communicate",
    "always": "parallel.reshard_after_forward=always",
    "never": "parallel.reshard_after_forward=never",
    "prefetch": "parallel.prefetch=2",
    "muon": "optimizer.name=muon",
    "adamw8bit": "optimizer.name=adamw8bit",
    "dora": "finetune.method=dora",
    "tensor": "parallel.tensor=2",
    "fsdp2": "parallel.engine=fsdp2",
    "loss in chunks, bf16": "train.loss_chunks=4 parallel.param_dtype=bfloat16 parallel.memory=arena",
    "longer": "train.seq_len=512 train.micro_batch=2",
}
#: Each expert gets as many tokens from the other ranks, in the plan and in the step.
HYBRID: dict[str, str] = {
    "experts": "",
    "spread": "parallel.expert=2",
}
MORE_HYBRID: dict[str, str] = {
    "no experts": "model.pattern=M*M- model.mtp_pattern=",
    "bf16": "parallel.param_dtype=bfloat16 train.micro_batch=2",
    "full": "activations.checkpoint=full",
    "ops": "activations.checkpoint=ops",
    "tensor": "parallel.tensor=2",
    "spread and full": "parallel.expert=2 activations.checkpoint=full",
}
#: Blocks compiled by inductor, whose kernels the real step runs. Without experts: what ranks that are not there send
#: would be indices in kernels that do not check them.
COMPILED: dict[str, tuple[str, str]] = {
    "bf16": ("llama_debug", "model.n_layers=2 parallel.param_dtype=bfloat16"),
    "float32": ("llama_debug", "model.n_layers=8"),
    "full": ("llama_debug", "activations.checkpoint=full"),
    "ops": ("llama_debug", "activations.checkpoint=ops"),
    "layers": ("llama_debug", "activations.checkpoint=layers model.n_layers=6"),
    "budget": ("llama_debug", "activations.checkpoint=budget activations.budget=0.4"),
    "tensor": ("llama_debug", "parallel.tensor=2"),
    "micro-batches": ("llama_debug", "train.micro_batch=2"),
    "in backward": ("llama_debug", "optimizer.in_backward=true train.max_norm=0"),
    "ragged": ("llama_debug", "parallel.strategy=zero1 parallel.layout=ragged"),
    "fsdp2": ("llama_debug", "parallel.engine=fsdp2"),
    "lora": ("llama_debug", "finetune.method=lora"),
    "hybrid": ("hybrid_debug", "model.pattern=M*M- model.mtp_pattern="),
    "eager": ("llama_debug", "train.compile=eager"),
    "aot_eager": ("llama_debug", "train.compile=aot_eager"),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("words", LLAMA.values(), ids=LLAMA)
def test_a_plan_has_the_peak_of_the_step(words: str) -> None:
    compare(config_of(words), words, 0.001)


def test_a_plan_names_the_gradient_that_a_loss_in_chunks_holds() -> None:
    program = program_of(config_of("train.loss_chunks=4"), 2, "cpu")
    assert [owner.unit for owner in program.owners if "head gradient" in owner.unit] == [
        "head gradient of norm"
    ]


@pytest.mark.extensive("each setting")
@pytest.mark.parametrize("words", MORE.values(), ids=MORE)
def test_a_plan_has_the_peak_of_the_step_with_each_setting(words: str) -> None:
    compare(config_of(words), words, 0.001)


@pytest.mark.extensive("a real step of each", but=("spread",))
@pytest.mark.parametrize("words", HYBRID.values(), ids=HYBRID)
def test_a_plan_of_a_hybrid_has_the_peak_of_the_step(words: str) -> None:
    compare(config_of(words, "hybrid_debug"), words, 0.005)


@pytest.mark.extensive("each setting")
@pytest.mark.parametrize("words", MORE_HYBRID.values(), ids=MORE_HYBRID)
def test_a_plan_of_a_hybrid_has_the_peak_of_the_step_with_each_setting(words: str) -> None:
    compare(config_of(words, "hybrid_debug"), words, 0.005)


@pytest.mark.extensive("kernels of the CPU are compiled", but=("aot_eager",))
@pytest.mark.parametrize("name", COMPILED)
def test_a_plan_of_compiled_blocks_has_the_peak_of_the_step(name: str) -> None:
    example, words = COMPILED[name]
    compare(config_of(f"train.compile=inductor {words}", example), words, 0.005)


FLOAT8 = "parallel.param_dtype=bfloat16 validation.every=0 train.float8="


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("rowwise", marks=pytest.mark.extensive("torchao takes seconds to import")),
        pytest.param("rowwise parallel.engine=fsdp2", marks=pytest.mark.extensive("another engine")),
        pytest.param("tensorwise", marks=pytest.mark.extensive("another recipe")),
        pytest.param("tensorwise parallel.engine=fsdp2", marks=pytest.mark.extensive("another engine")),
        pytest.param("tensorwise activations.checkpoint=full", marks=pytest.mark.extensive("recomputed")),
    ],
)
def test_a_plan_has_the_peak_of_the_step_in_float8(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both with products that the CPU does not compute. They take their results' memory, as on a GPU."""
    pytest.importorskip("torchao.float8", reason="torchao is not installed")

    def product(one: torch.Tensor, other: torch.Tensor, **given: Any) -> torch.Tensor:
        return torch.zeros(one.shape[0], other.shape[1], dtype=given["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", product)
    # Where operands have two dtypes, as with a scale for each row, the CPU casts one of them into memory of its own.
    compare(config_of(FLOAT8 + words), words, 0.04 if "rowwise" in words else 0.005)


@pytest.mark.extensive("torchao takes seconds to import")
@pytest.mark.parametrize("words", ["rowwise", "tensorwise"])
def test_a_plan_for_a_gpu_has_products_in_float8(words: str) -> None:
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    program = program_of(config_of(FLOAT8 + words), 2)
    assert any(isinstance(each, Kernel) and each.name == "_scaled_mm" for each in program.events)


def test_a_plan_for_a_gpu_has_streams_and_its_attention() -> None:
    program = program_of(config_of(MORE["bf16"]), 2)
    assert any("_scaled_dot_product_flash_attention" in owner.what for owner in program.owners)
    assert {"compute", "gather", "reduce"} <= {getattr(each, "stream", "") for each in program.events}
    peak = program.peak(next(i for i, name in program.phase_starts() if name == "forward"))
    assert peak.phase == "backward"
    assert re.fullmatch(r"(token_loss|llama|decoder)\.py:\d+", peak.owner.line)
    assert {"parameters", "optimizer", "slabs", "activations"} <= set(peak.by_group())


def test_a_plan_of_fsdp2_for_a_gpu_has_its_streams() -> None:
    program = program_of(config_of("parallel.engine=fsdp2"), 2)
    kernels = {event.stream for event in program.events if isinstance(event, Kernel)}
    allocations = {event.stream for event in program.events if isinstance(event, Alloc)}
    waiting = {event.stream for event in program.events if isinstance(event, Wait)}
    assert len(kernels) == 4  # computation, copies before gathers, gathers, reductions
    assert len(allocations) >= 3 and waiting == kernels
