"""Names and signatures of torch's ``fully_shard``, and setters before the first forward."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp

import shardwright as sw
from tests.engine.kit.subclasses import backward, check, gradients
from tests.engine.kit.surface import averaged, both, build, shard
from tests.support import multirank

METHODS = [
    "unshard",
    "reshard",
    "reset_iter_state",
    "set_is_last_backward",
    "set_requires_gradient_sync",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_unshard_in_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_post_optim_event",
]


def parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_torchs_signatures(name: str) -> None:
    theirs = getattr(torch_fsdp.FSDPModule, name, None)
    if theirs is None:
        pytest.skip(f"this torch has no {name}")
    assert parameters_of(getattr(sw.FSDPModule, name)) == parameters_of(theirs)


@pytest.mark.parametrize("name", ["register_fsdp_forward_method", "share_comm_ctx"])
def test_functions_have_torchs_signatures(name: str) -> None:
    assert parameters_of(getattr(sw, name)) == parameters_of(getattr(torch_fsdp, name))
    assert name in sw.__all__


@multirank(2)
@both
def test_setters_return_nothing_and_can_be_called_before_the_first_forward(
    rank: int, world_size: int, library: str
) -> None:
    expected = averaged(build(), world_size)
    model = shard(library, build())
    block = model.blocks[0]
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("set_is_last_backward", (True,)),
        ("set_requires_gradient_sync", (True,)),
        ("set_reshard_after_forward", (True,)),
        ("set_reshard_after_backward", (True,)),
        ("set_unshard_in_backward", (True,)),
        ("set_modules_to_forward_prefetch", ([],)),
        ("set_modules_to_backward_prefetch", ([],)),
        ("set_gradient_divide_factor", (float(world_size),)),
        ("set_force_sum_reduction_for_comms", (False,)),
        ("set_reduce_scatter_unused_params", (False,)),
        ("reshard", ()),
        ("unshard", ()),
    ]
    for name, arguments in calls:
        if library == "torch" and not hasattr(model, name):
            continue  # torch 2.11 has fewer
        for module in (model, block):
            assert getattr(module, name)(*arguments) is None
    model.reshard()
    block.reshard()
    backward(model, rank)
    check(gradients(model), expected)
