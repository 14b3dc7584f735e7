"""Models of transformers on two ranks: losses and gradients of the plain model, and files that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwright as sw
from shardwright.train.models.hf import transformers_model
from shardwright.train.step.trainer import Trainer
from tests.engine.kit.models import full
from tests.support import multirank
from tests.train.kit.parallel import next_step
from tests.train.kit.text import batch, random_text
from tests.train.models.kit.architectures import ARCHITECTURES, folder_with, reloaded
from tests.train.models.kit.foreign import job_of

pytest.importorskip("transformers", reason="needs transformers")

FULL = {"activations": {"checkpoint": "full"}}
#: What each architecture runs with, beside zero3 with the defaults: a sample of what the trainer offers.
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"layout": "ragged", "memory": "arena"},
    "qwen2": {"strategy": "zero1", "layout": "element"},
    "qwen3": {"strategy": "ddp"},
    "mistral": {"memory": "double_buffer"},
    "gemma2": {"strategy": "zero2", "layout": 8},
    "gemma3_text": {"offload": "cpu"},
    "gpt2": {"layout": "ragged", **FULL},
    "gpt_neox": {"reshard_after_forward": "always", "prefetch": 0},
    "phi3": {"activations": {"checkpoint": "ops"}},
    "olmo2": {"memory": "max_pool"},
    "mixtral": {"layout": "ragged", **FULL},
    "qwen3_moe": {"strategy": "zero1"},
    "deepseek_v3": {"layout": 4, "memory": "arena"},
    "mamba": {"reshard_after_forward": "never", **FULL},
    "mamba2": {"strategy": "zero2"},
    "jamba": {"layout": "element"},
    "bamba": {"offload": "optimizer"},
    "nemotron_h": {"layout": "ragged", "activations": {"checkpoint": "layers"}},
    "falcon": {"memory": "arena", "prefetch": 2},
    "ernie4_5_moe": {"layout": "ragged"},
    "opt": {"layout": "ragged", "strategy": "zero2"},
}


def expected(path: Path, job: Trainer, ranks: int) -> Expected:
    """The values of the plain model: the mean over the ranks' batches, as one device computes them."""
    model = reloaded(path).train()
    tokens, losses, sums = 4 * 16, 0.0, {}
    for rank in range(ranks):
        count = 4 // ranks
        inputs, targets = batch(random_text(), job.config.run.seed, rank * count, count, 16)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").sum()
        model.zero_grad()
        (loss * (ranks / tokens)).backward()
        losses += float(loss.detach().double())
        for name, p in model.named_parameters():
            if p.grad is None:  # a bias that only chooses experts
                continue
            sums[name] = p.grad.clone() if rank == 0 else sums[name] + p.grad
    with torch.no_grad():
        logits = model.eval()(input_ids=TOKENS).logits
    return Expected(losses / tokens, {name: total / ranks for name, total in sums.items()}, logits)


class Expected(NamedTuple):
    loss: float
    gradients: dict[str, torch.Tensor]
    logits: torch.Tensor  #: of TOKENS, before the step


TOKENS = torch.arange(40).view(2, 20) * 3 % 256


def _has_gradient(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and bool(full(parameter.grad).any())


def check(
    job: Trainer, kind: str, folder: Path, world_size: int, plain: Expected, options: dict[str, Any]
) -> None:
    found = job.forward_backward(*next_step(job)) / (4 * 16)
    dist.all_reduce(found)
    assert float(found) == plain.loss, (kind, options)
    parameters = dict(job.model.named_parameters())
    own_names = {name.removeprefix(transformers_model.PREFIX) for name in parameters}
    assert own_names >= plain.gradients.keys()
    for name in own_names - plain.gradients.keys():
        assert "bias" in name and not _has_gradient(parameters[transformers_model.PREFIX + name]), (
            kind,
            options,
            name,
        )
    for name, gradient in plain.gradients.items():
        own = parameters[transformers_model.PREFIX + name].grad
        assert own is not None, (kind, options, name)
        assert torch.equal(full(own).cpu(), gradient), (kind, options, name)
    job.optimizer.step()
    job.model.eval()
    with torch.no_grad():
        logits = job.model(TOKENS)
    job.engine.free_gathered(job.model)
    shape = job.config.model.shape()
    out = folder / f"{kind}-saved-{len(options)}"
    sw.save_pretrained(
        job.model,
        out,
        key_map=transformers_model.key_map(shape),
        config=transformers_model.config_json(shape),
    )
    dist.barrier()
    with torch.no_grad():
        again = reloaded(out).eval()(input_ids=TOKENS).logits
    assert torch.equal(again, logits) and not torch.equal(again, plain.logits), kind


KINDS = list(ARCHITECTURES)


@pytest.mark.extensive("architectures of transformers", but=("3-*",))
@multirank(2, timeout=120)
@pytest.mark.parametrize("part", range(5))
def test_losses_gradients_and_files_are_those_of_transformers(
    rank: int, world_size: int, part: int, tmp_path: Path
) -> None:
    for kind in KINDS[part::5]:
        if rank == 0:
            folder_with(kind, tmp_path / kind)
        dist.barrier()
        plain = None
        # Every architecture runs with zero3, in one layout and kind of memory or another.
        for options in ({}, OPTIONS[kind]) if "strategy" in OPTIONS[kind] else (OPTIONS[kind],):
            job = job_of(tmp_path / kind, rank, world_size, **options)
            plain = plain or expected(tmp_path / kind, job, world_size)
            check(job, kind, tmp_path, world_size, plain, options)
