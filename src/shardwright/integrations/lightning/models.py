"""Models in Fabric's ``setup``: the mesh, the units, and a check that every rank builds the same model.

Nothing here is about gradients or checkpoints, or imports ``lightning``.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardwright.engine import FSDPModule, RankGroup, as_policy, ranks_in_words
from shardwright.engine.comm import make_mesh

AutoWrapPolicy = Collection[type[nn.Module]] | Callable[..., bool]


class Forward(nn.Module):
    """The module that Fabric calls. It wraps the user's module, so that marked forward methods run through it.

    For one call Fabric replaces ``forward`` by such a method.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def sharded_model(module: nn.Module, doing: str) -> Any:
    """Return the sharded model that Fabric has wrapped. Raises TypeError, for which ``doing`` is the call's name."""
    module = module.module if isinstance(module, Forward) else module
    if not isinstance(module, FSDPModule):
        raise TypeError(
            f"{doing} got a {type(module).__name__} that is not sharded. Set it up first: model = "
            "fabric.setup(model)."
        )
    return module


def refuse_wrapped(module: nn.Module) -> None:
    """Raise if a model is sharded already, or has a wrapper that torch shards or replicates."""
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"This {type(module).__name__} is already sharded, so the strategy's options would not apply to it. Pass "
            "the model before you call fully_shard on it; modules inside it may be sharded."
        )
    for name, inner in module.named_modules():
        torchs = isinstance(inner, TorchFSDPModule) and not isinstance(inner, FSDPModule)
        if torchs or isinstance(inner, (DistributedDataParallel, FullyShardedDataParallel)):
            raise TypeError(
                f"The model has a {type(inner).__name__} at {name!r}, which torch already shards or replicates. Pass "
                "the model without this wrapper."
            )


# -- start and training: meshes and units ------------------------------------------------------------------------------


def checked_sizes(sizes: Any) -> tuple[int, ...] | None:
    """Return the sizes of a mesh as a tuple. Raises ValueError unless they are one or two."""
    if sizes is None:
        return None
    if (
        not isinstance(sizes, (tuple, list))
        or len(sizes) not in (1, 2)
        or not all(isinstance(n, int) and n > 0 for n in sizes)
    ):
        raise ValueError(f"device_mesh must be one or two sizes, such as (replicas, shards), got {sizes!r}")
    return tuple(sizes)


def mesh_of(sizes: tuple[int, ...] | None, device: torch.device) -> DeviceMesh:
    """Return a mesh of all ranks with these sizes, or with one dimension if there are none."""
    world = dist.get_world_size()
    sizes = sizes or (world,)
    if torch.Size(sizes).numel() != world:
        raise ValueError(
            f"device_mesh={sizes} is a mesh of {torch.Size(sizes).numel()} ranks, but the job has {world}. Pass "
            "sizes whose product is devices * num_nodes."
        )
    names = ("replicate", "shard")[-len(sizes) :]
    return make_mesh(device.type, sizes, names)


def checked_policy(policy: Any) -> AutoWrapPolicy | None:
    """Return a policy as a function or a tuple of classes. Raises TypeError for anything else."""
    if policy is None or (callable(policy) and not isinstance(policy, type)):
        return policy  # type: ignore[no-any-return]
    classes = tuple(policy) if isinstance(policy, (set, frozenset, list, tuple)) else ()
    if classes and all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        return classes
    raise TypeError(
        f"auto_wrap_policy must be module classes, such as {{Block}}, or a function of a module, got {policy!r}"
    )


def units_of(model: nn.Module, policy: Any) -> list[nn.Module]:
    """Return the modules below ``model`` that become units, inner ones first."""
    if policy is None:
        return []
    if isinstance(policy, tuple) and not any(isinstance(m, policy) for m in model.modules()):
        class_names = sorted({type(m).__name__ for m in model.modules()})
        warnings.warn(  # right for a small model beside the one that the policy is for
            f"auto_wrap_policy names {', '.join(c.__name__ for c in policy)}, but this model has only "
            f"{', '.join(class_names)}: the whole model becomes one unit, gathered at once.",
            stacklevel=4,
        )
        return []
    return [unit for unit in as_policy(policy)(model) if unit is not model]  # type: ignore[misc]


# -- training: random generators ---------------------------------------------------------------------------------------


class GeneratorStates:
    """The states of the random generators at each moment when this rank began to initialise a model.

    ``setup`` compares them over all ranks, because ranks initialise equal models only from equal states.
    """

    def __init__(self) -> None:
        self._states: list[bytes] = []

    def add(self, state: bytes) -> None:
        self._states.append(state)

    @contextmanager
    def watched(self, device: torch.device) -> Iterator[None]:
        """Record the generators' states at the start of this context if random numbers are drawn in it, and compare."""
        before = state_of_generators(device)
        yield
        drew = state_of_generators(device) != before
        self.add(before if drew else b"")
        self.check()

    def check(self) -> None:
        """Compare the recorded states over all ranks, and forget them.

        Raises:
            ValueError: on every rank: ranks began from different states.
        """
        mine, self._states = b"".join(self._states), []
        ranks = RankGroup()
        ranks.check_equal(
            ranks.all_gather(mine, "states"),
            lambda others, *_: ValueError(
                f"{ranks_in_words(others).capitalize()} began to initialise the model from another state of the random "
                "generators than rank 0, so the ranks build different models. Call fabric.seed_everything(seed), with "
                "one seed for all ranks, before you build the model."
            ),
        )


def state_of_generators(device: torch.device) -> bytes:
    """Return a digest of the states of the random generators of the CPU and of a device."""
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device.type).get_rng_state(device))
    return hashlib.sha256(b"".join(bytes(state.tolist()) for state in states)).digest()
