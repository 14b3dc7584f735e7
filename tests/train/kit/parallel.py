"""Steps of a trainer, and of a plain model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwright.train.config import Config
from shardwright.train.data.dataset import Dataset
from shardwright.train.launch.signals import StopRequest
from shardwright.train.models.build import build_model
from shardwright.train.step.feed import tensors_of
from shardwright.train.step.trainer import Trainer
from tests.train.kit.datasets import byte_dataset
from tests.train.kit.text import Text, batch, random_text


def dataset_of(config: Config, text: Text | None = None) -> Dataset:
    """The samples of a text, or of random bytes."""
    text = text or random_text()
    return byte_dataset(config, bytes(text.train.tolist()), bytes(text.validation.tolist()), text.sha256)


def next_step(job: Trainer) -> list[torch.Tensor]:
    """The arguments of `job.forward_backward` for its next step, which is not taken."""
    data, _ = job.feed.next(job.position)
    job.close()
    counts = job.losses.counts(data.trained)
    return [job.losses.weights(counts), *tensors_of(data.batches)]


def take_steps(job: Trainer, count: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of `count` steps."""
    stop = StopRequest()  # not entered: no handlers in the pool's workers
    results = [job.train_step(stop) for _ in range(count)]
    return [(result.loss, result.agreed.norm) for result in results]


def plain_steps(config: Config, count: int) -> list[tuple[float, float]]:
    """The same steps by plain PyTorch on the whole global batch."""
    torch.manual_seed(config.run.seed)
    model, train = build_model(config.model, 256), config.train
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim >= 2) == wanted] for wanted in (True, False)
    )
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    results = []
    for step in range(count):
        inputs, targets = batch(
            random_text(), 0, step * train.global_batch, train.global_batch, train.seq_len
        )
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results
