"""transformers' ``from_pretrained(distributed_config=DistributedConfig(...))`` with ``sw.replace_torch()``.

Every mesh that transformers offers, with tied and untied weights: gradients and steps of a plain model. The models are
saved and loaded again.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank

if not all(importlib.util.find_spec(name) for name in ("transformers", "transformers.distributed")):
    pytest.skip("needs a transformers with DistributedConfig", allow_module_level=True)

TIMEOUT = 300  #: the first case of a rank imports transformers
DENSE = {
    "vocab_size": 63, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": 8,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
DISPATCH = {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
#: For each number of ranks: the arguments of DistributedConfig, whether the model has experts, and the ranks with
#: different data.
ROWS: dict[int, list[tuple[dict[str, Any], bool, int]]] = {
    2: [
        ({"fsdp_size": 2}, False, 2),
        ({"fsdp_size": 2, "fsdp_cpu_offload": True}, False, 2),
        ({"fsdp_size": 2}, True, 2),
        ({"tp_size": 2}, False, 1),
        ({"fsdp_size": 2, "ep_size": 2, "ep_plan": DISPATCH}, True, 2),
    ],
    4: [
        ({"fsdp_size": 2, "dp_replicate_size": 2}, False, 4),
        ({"fsdp_size": 2, "tp_size": 2}, False, 2),
        ({"fsdp_size": 4, "ep_size": 2, "ep_plan": DISPATCH}, True, 4),
        ({"fsdp_size": 2, "tp_size": 2, "ep_size": 4, "ep_plan": DISPATCH}, True, 2),
    ],
}


@contextmanager
def replaced() -> Iterator[Any]:
    """transformers, with this engine in the place of torch's. It may have been imported before."""
    transformers = importlib.import_module("transformers")
    home = importlib.import_module("transformers.distributed.fsdp")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with sw.replace_torch():
        importlib.reload(home)
    try:
        yield transformers
    finally:
        importlib.reload(home)


def build(transformers: Any, experts: bool, tie: bool) -> Any:
    torch.manual_seed(0)
    if experts:
        return transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**DENSE, **EXPERTS, tie_word_embeddings=tie)
        )
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DENSE, tie_word_embeddings=tie))


def tokens(step: int, group: int) -> torch.Tensor:
    return torch.randint(0, 63, (1, 8), generator=torch.Generator().manual_seed(100 * step + group))


def logits(model: Any, x: torch.Tensor) -> torch.Tensor:
    return full(model(input_ids=x, use_cache=False).logits)


def close(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    def message(text: str) -> str:
        return f"{name}: {text}"

    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=message)


def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    shown = model(input_ids=x, use_cache=False).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(shown, x[:, 1:].flatten())


def check(
    transformers: Any, folder: Path, config: dict[str, Any], experts: bool, groups: int, tie: bool
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = rank // (world // groups)
    plain = build(transformers, experts, tie)
    if rank == 0:
        plain.save_pretrained(folder / "first")
    dist.barrier()

    def load(name: str) -> Any:
        how = transformers.distributed.DistributedConfig(**config)
        return type(plain).from_pretrained(folder / name, distributed_config=how, dtype=torch.float32)

    model = load("first")
    assert isinstance(model, sw.FSDPModule) == ("fsdp_size" in config)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, foreach=False) for m in (model, plain)]
    for step in range(2):
        loss(model, tokens(step, group)).backward()
        for each in range(groups):
            (loss(plain, tokens(step, each)) / groups).backward()
        pairs = zip(model.named_parameters(), plain.named_parameters(), strict=True)
        for (name, p), (expected, q) in pairs:
            assert name == expected
            close(full(p.grad), q.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder / "second")
    dist.barrier()
    back = type(plain).from_pretrained(folder / "second", dtype=torch.float32)
    torch.testing.assert_close(back.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    names = ["second"]
    if not tie:  # safetensors refuses one memory under two names, which only the CPU has here; FSDP2's, too
        model.save_pretrained(folder / "third", distributed_checkpoint=True)
        names.append("third")
    x = tokens(9, group)
    with torch.no_grad():
        for name in names:
            torch.testing.assert_close(logits(load(name), x), logits(model, x))


@pytest.mark.extensive("transformers on every mesh")
@multirank(2, 4, timeout=TIMEOUT)
def test_a_model_of_every_mesh_trains_and_comes_back(rank: int, world_size: int, tmp_path: Path) -> None:
    with replaced() as transformers:
        for i, ((config, experts, groups), tie) in enumerate(
            itertools.product(ROWS[world_size], (True, False))
        ):
            try:
                check(transformers, tmp_path / str(i), config, experts, groups, tie)
            except Exception as error:
                error.add_note(f"DistributedConfig({config}), experts {experts}, tied {tie}")
                raise
