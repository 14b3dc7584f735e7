"""Models and optimizers as Fabric builds them: empty and on the meta device, units, methods marked as forward."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.kit import TIMEOUT, refused
from tests.support import multirank

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs the extra lightning"
)


class _Loud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))


@pytest.mark.extensive("each way of building")
@multirank(2, timeout=TIMEOUT)
def test_empty_init_is_the_plain_build(rank: int, world_size: int) -> None:
    """Values, buffers and generators; nothing is allocated before set-up, and no module needs reset_parameters."""
    from shardwright.init import DeferredTensor
    from tests.integrations.fabrics import Model, assert_same_model, fabric_of, plain_model

    plain = plain_model(seed=11)
    after = torch.get_rng_state()
    for empty_init in (True, False, None):
        fabric = fabric_of()
        fabric.seed_everything(11, verbose=False)
        with fabric.init_module(empty_init=empty_init):
            model = Model()
        deferred = {isinstance(t, DeferredTensor) for t in (*model.parameters(), *model.buffers())}
        assert deferred == {bool(empty_init)}
        model = fabric.setup_module(model)
        assert_same_model(model, plain)
        assert torch.equal(model.module.table, plain.table)
        assert torch.equal(torch.get_rng_state(), after)
        assert model.module.stem.weight.to_local().shape == (6, 6)
    fabric.seed_everything(12, verbose=False)
    with fabric.init_module(empty_init=True):
        loaded = Model()
    loaded.load_state_dict(plain.state_dict())  # before set-up, which must not initialise it again
    assert_same_model(fabric.setup_module(loaded), plain)
    half = fabric_of("bf16-true")
    half.seed_everything(11, verbose=False)
    with half.init_module(empty_init=True):
        model = Model()
    assert_same_model(half.setup(model), plain_model(seed=11, dtype=torch.bfloat16))


@multirank(2, timeout=TIMEOUT)
def test_models_on_the_meta_device(rank: int, world_size: int) -> None:
    from tests.integrations.fabrics import fabric_of, full

    torch.manual_seed(5)
    plain = nn.Linear(6, 5)
    fabric = fabric_of(auto_wrap_policy=None)
    fabric.seed_everything(5, verbose=False)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 5))
        loud = nn.Sequential(_Loud())
    model = fabric.setup(model)
    assert torch.equal(full(model.module[0].weight), plain.weight)
    with refused(ValueError, "_Loud", "weight", "reset_parameters"):
        fabric.setup(loud)

    def init(model: Any) -> None:
        nn.init.constant_(model[0].weight, 7.0)

    with torch.device("meta"):
        loud = nn.Sequential(_Loud())
    model = fabric_of(auto_wrap_policy=None, init=init).setup(loud)
    assert full(model.module[0].weight).eq(7).all()


@multirank(2, timeout=TIMEOUT)
@pytest.mark.parametrize(
    ("built", "order"),
    [
        *[(built, order) for built in ("deferred", "real") for order in ("model first", "optimizer first")],
        *[(built, order) for built in ("deferred", "real", "meta") for order in ("jointly", "after")],
    ],  # of parameters on the meta device Fabric itself refuses to set up an optimizer alone
)
def test_optimizers_follow_the_model(rank: int, world_size: int, built: str, order: str) -> None:
    """Made before set-up or after, with a scheduler made before: it steps the shards, and nothing else."""
    from tests.integrations.fabrics import fabric_of, full, loss_of

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
        return torch.optim.SGD(groups, lr=0.2, momentum=0.9)

    torch.manual_seed(2)
    plain = build()
    expected = optimizer_of(plain)
    plain_scheduler = torch.optim.lr_scheduler.ExponentialLR(expected, 0.5)

    fabric = fabric_of(auto_wrap_policy={nn.Linear})
    fabric.seed_everything(2, verbose=False)
    if built == "meta":
        with torch.device("meta"):
            model: Any = build()
    else:
        with fabric.init_module(empty_init=built == "deferred"):
            model = build()
    if order != "after":
        optimizer: Any = optimizer_of(model)
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if order == "jointly":
        model, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)
    elif order == "optimizer first":
        optimizer = fabric.setup_optimizers(optimizer)
        model = fabric.setup_module(model)
    else:
        model = fabric.setup_module(model)
        if order == "after":
            optimizer = optimizer_of(model.module)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer = fabric.setup_optimizers(optimizer)

    seen: list[torch.Tensor] = []
    optimizer.register_step_post_hook(
        lambda stepped, *_: seen.extend(p for group in stepped.param_groups for p in group["params"])
    )
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in mine] == [id(p) for p in model.parameters()]
    assert all(hasattr(p, "to_local") for p in mine)
    for step in range(2):
        fabric.backward(loss_of(model, rank, step))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for each in range(world_size):
            (loss_of(plain, each, step) / world_size).backward()
        expected.step()
        expected.zero_grad()
        plain_scheduler.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(p), q)
        assert torch.equal(full(optimizer.state[p]["momentum_buffer"]), expected.state[q]["momentum_buffer"])
    assert seen and not any(hasattr(p, "to_local") for p in seen)  # the arithmetic was on plain local tensors
    assert scheduler.get_last_lr() == plain_scheduler.get_last_lr() == [0.1 / 4, 0.2 / 4]


@multirank(2, timeout=TIMEOUT)
def test_ranks_that_build_different_models(rank: int, world_size: int) -> None:
    from tests.integrations.fabrics import Model, assert_same_model, fabric_of, plain_model

    fabric = fabric_of()
    for empty_init, words in (
        (True, ("seed_everything", "Rank 1")),
        (False, ("sync_module_states", "rank 1")),
    ):
        torch.manual_seed(rank)
        with fabric.init_module(empty_init=empty_init):
            model = Model()
        with refused(ValueError, *words):
            fabric.setup(model)
    torch.manual_seed(rank)
    with torch.device("meta"):
        quiet, random = nn.LayerNorm(4), nn.Linear(4, 4)
    fabric.setup(quiet)  # draws nothing
    with refused(ValueError, "seed_everything", "Rank 1"):
        fabric.setup(random)
    fabric = fabric_of(sync_module_states=True)
    torch.manual_seed(rank)
    model = fabric.setup(Model())
    assert_same_model(model, plain_model(seed=0))


@multirank(2, timeout=TIMEOUT)
def test_units_are_those_the_policy_chooses(rank: int, world_size: int) -> None:
    from functools import partial

    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    import shardwright as sw
    from tests.integrations.fabrics import Block, Model, fabric_of

    def units(policy: Any, model: nn.Module | None = None) -> list[str]:
        fabric = fabric_of(auto_wrap_policy=policy)
        fabric.seed_everything(0, verbose=False)
        module = fabric.setup(model or Model()).module
        return [name for name, m in module.named_modules() if isinstance(m, sw.FSDPModule)]

    blocks = ["", "blocks.0", "blocks.1"]
    assert units(None) == [""]
    assert units({Block}) == blocks
    assert units([Block, nn.Linear])[:4] == ["", "stem", "blocks.0", "blocks.0.up"]
    assert units(lambda module: isinstance(module, Block)) == blocks
    assert units(ModuleWrapPolicy({Block})) == blocks
    # 500 elements: either block has 512, the stem 84; what is left beside them is less.
    assert (
        units(partial(size_based_auto_wrap_policy, min_num_params=500, exclude_wrap_modules={nn.ModuleList}))
        == blocks
    )
    torch.manual_seed(0)
    mine = Model()
    sw.fully_shard(mine.stem, mesh=fabric_of().strategy.device_mesh, check_module_states=True)
    assert units({Block}, mine) == ["", "stem", "blocks.0", "blocks.1"]
    with pytest.warns(
        UserWarning, match=r"names LSTM, but this model has only Block, Linear, Model.* one unit"
    ):
        assert units({nn.LSTM}) == [""]
    for wrong in ("Block", Block, set(), {"Block"}):
        with refused(TypeError, "auto_wrap_policy", "classes"):
            fabric_of(auto_wrap_policy=wrong)


@multirank(2, timeout=TIMEOUT)
def test_methods_marked_as_forward_gather_the_weights(rank: int, world_size: int) -> None:
    from tests.integrations.fabrics import fabric_of, plain_model, set_up

    model, _ = set_up(fabric_of())
    inputs = torch.ones(3, 6)
    with pytest.raises(RuntimeError, match=r"mark_forward_method|is sharded, but"):
        model.score(inputs)
    model.mark_forward_method("score")
    assert torch.equal(model.score(inputs), plain_model().score(inputs))
    assert torch.equal(model(inputs), plain_model()(inputs))
