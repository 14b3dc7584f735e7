"""Parity with a plain model over ranks x reshard_after_forward x precision x accumulation x sharded dimension.

Every rank has its own data. The reference averages every rank's gradients, computed by an unsharded copy. Every pair of
settings is run; tests/support/matrix.py tells how to run every combination.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Shard

import shardwright as sw
from tests.engine.kit.models import Model, Reference, build, full, loss_of, shard, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.engine.kit.training import check_gradients
from tests.support.matrix import select, together

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: (compute, reduce, tolerance): fp32 sums differ in order only; lower reduce dtypes round the sum itself once or twice.
PRECISIONS = {
    "fp32": (FP32, FP32, 1e-5),
    "bf16-fp32": (BF16, FP32, 1e-5),
    "bf16-bf16": (BF16, BF16, 5e-2),
    "fp16-fp16": (FP16, FP16, 1e-2),
}
PLACEMENTS = {
    "dim0": None,
    "last": lambda p: Shard(p.ndim - 1),
    "mixed": lambda p: Shard(1) if p.ndim == 2 and p.shape[0] == 12 else None,
}
CASES = select(
    itertools.product(
        on("zero3", (1,), (2,), (3,), (4,)),
        (None, True, False),
        PRECISIONS,
        ("single", "communicate", "hold"),
        PLACEMENTS,
    ),
    lambda row, strength: together(strength, *row),
)


@on_meshes(CASES)
def test_training_equals_the_plain_model(
    rank: int,
    world_size: int,
    at: On,
    reshard: bool | None,
    precision: str,
    accumulation: str,
    placement: str,
) -> None:
    """On the default mesh, which ``at`` stands for."""
    compute, reduce, tolerance = PRECISIONS[precision]
    plain = build()
    reference = Reference(plain, compute, reduce)
    policy = sw.MixedPrecisionPolicy(
        param_dtype=None if compute is FP32 else compute, reduce_dtype=None if reduce is compute else reduce
    )
    model = shard(
        plain,
        head_unit=True,
        reshard_after_forward=reshard,
        mp_policy=policy,
        shard_placement_fn=PLACEMENTS[placement],
    )
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    expected = torch.optim.SGD(reference.model.parameters(), lr=0.2, momentum=0.9)
    micros = 1 if accumulation == "single" else 3
    for step in range(2):
        batches = [[tokens(step, m, r) for r in range(world_size)] for m in range(micros)]
        losses = train_step(model, [micro[rank] for micro in batches], hold=accumulation == "hold")
        wanted = reference.backward(world_size, batches)
        if rank == 0:
            assert losses == pytest.approx(wanted, rel=tolerance)
        check_gradients(model, [p.grad for p in reference.model.parameters()], tolerance)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    for (name, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(
            full(p), q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def train_step(model: Model, batches: list[torch.Tensor], hold: bool) -> list[float]:
    losses = []
    for i, batch in enumerate(batches):
        model.set_requires_gradient_sync(not hold or i == len(batches) - 1)
        loss = loss_of(model(batch), batch)
        loss.backward()
        losses.append(loss.item())
    return losses
