"""Work of a step without a trace: gradients, random generators and buffers are afterwards as if it had not been done.

The reasons for a replay are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwright.checkpoint import generator_states, set_generator_states


@contextmanager
def replay(
    model: nn.Module, optimizer: torch.optim.Optimizer, moving: set[str] | None = None
) -> Iterator[None]:
    """Forward and backward inside the context leave no gradient, and generators and buffers as they were.

    `moving` gets the names of the buffers that they have changed.
    """
    generators = generator_states()
    buffers = [(name, each, each.detach().clone()) for name, each in model.named_buffers()]
    try:
        yield
    finally:
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer, values in buffers:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
                    if moving is not None:
                        moving.add(name)
        set_generator_states(generators)
