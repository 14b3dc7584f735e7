"""Whether all ranks have built the same model: compared once, before it is sharded and any collective depends on it.

Ranks that diverge later are found by the engine, before each collective. What the ranks start with before a model
exists is compared in ``agreement``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.comm.noted import noted
from shardwright.engine.tensors.parameter import has_no_values
from shardwright.train.agreement import difference
from shardwright.train.errors import UserError
from shardwright.train.world import World

GENERATOR = "the random numbers drawn for the model"
"""In messages. Of a model that gets its values later, these are what its values come from."""


def check_same_model(model: nn.Module, world: World, owner: str) -> None:
    """Compare names, shapes, dtypes and values of a plain model over all ranks, each of which calls this.

    ``owner``: the model in messages.

    Raises:
        UserError: they differ; on every rank the same, which names the ranks and the first tensor.
    """
    if world.size == 1:
        return
    facts = facts_of_model(model)
    digests: list[Any] = [None] * world.size
    with noted("all-gather of digests"):
        dist.all_gather_object(digests, _digest(json.dumps(facts).encode()))
    if len({*digests}) == 1:
        return
    everyone: list[Any] = [None] * world.size
    with noted("all-gather of digests"):
        dist.all_gather_object(everyone, facts)  # long, and needed only here
    found = difference(everyone)
    raise UserError(
        f"expected the same model on every rank, found {found}; {owner} must not depend on the rank: its code, its "
        "files and the numbers that it draws must be the same everywhere"
    )


def facts_of_model(model: nn.Module) -> Mapping[str, str]:
    """What must be equal, by its name in messages. Shapes come first: they explain other values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    facts = {f"the shape of {name}": f"{[*each.shape]} {each.dtype}" for name, each in tensors}
    facts[GENERATOR] = f"sha256 {_digest(torch.get_rng_state().numpy().tobytes())}"
    for name, each in tensors:
        if not has_no_values(each) and not each.is_meta:
            flat = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            facts[f"the initial values of {name}"] = f"sha256 {_digest(flat.numpy())}"
    return facts


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
