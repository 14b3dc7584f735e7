"""Lightning Fabric with ShardwrightStrategy: unchanged Fabric code has the numbers of one device.

On ranks of the pool, which Fabric takes for those of torchrun; how Fabric launches processes itself is in
test_fabric_launch.py. Lightning is imported by the ranks alone.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright._torch import memory_can_be_swapped
from tests.support import WorkerPools, multirank

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs the extra lightning"
)

#: Importing Lightning on the first case of a rank can take longer than a case may.
TIMEOUT = 180


@contextmanager
def refused(kind: type[BaseException], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert all(word in text for word in words), text


# -- numbers -----------------------------------------------------------------------------------------------------------


@multirank(2, timeout=TIMEOUT)
def test_parameter_groups_can_be_added(rank: int, world_size: int) -> None:
    from tests.integrations.fabrics import fabric_of

    fabric = fabric_of(auto_wrap_policy={nn.Linear})
    fabric.seed_everything(0, verbose=False)
    model = fabric.setup_module(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5)))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.module[0].parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(model.module[1].parameters()), "lr": 0.2})
    before = [p.full_tensor().clone() for p in model.parameters()]
    fabric.backward(model(torch.ones(2, 6)).square().mean())
    optimizer.step()
    assert not any(
        torch.equal(old, p.full_tensor()) for old, p in zip(before, model.parameters(), strict=True)
    )


@multirank(2, timeout=TIMEOUT)
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("32-true", {}),
        ("32-true", {"layout": "ragged", "memory": "arena", "prefetch": 2}),
        ("64-true", {"strategy": "ddp"}),
        ("bf16-true", {"strategy": "zero1", "layout": "ragged"}),
        ("bf16-mixed", {"device_mesh": (2, 1), "reshard_after_forward": False}),
        ("bf16-mixed", {"strategy": "hfsdp", "device_mesh": (1, 2), "memory": "max_pool"}),
    ],
)
def test_training_has_the_numbers_of_one_device(
    rank: int, world_size: int, precision: str, options: dict[str, Any]
) -> None:
    """Every bit: two ranks add two gradients and halve the sum, which is exact in any order."""
    from tests.integrations.fabrics import (
        assert_same_model,
        fabric_of,
        plain_gradients,
        plain_model,
        set_up,
        train,
    )

    if not memory_can_be_swapped:
        options.pop("memory", None)
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    plain = plain_model(dtype=dtype)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01)

    def loss(model: nn.Module, data_rank: int, step: int) -> torch.Tensor:
        from tests.integrations.fabrics import data

        inputs, targets = data(data_rank, step)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            outputs = model(inputs.to(dtype))
        return nn.functional.mse_loss(outputs.float(), targets)

    fabric = fabric_of(precision, **options)
    model, optimizer = set_up(fabric)
    assert_same_model(model, plain)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(torch.ones(2, 6)).dtype == torch.float32  # whatever the precision, says Fabric
    train(fabric, model, optimizer, range(3))
    for step in range(3):
        plain_gradients(plain, range(step, step + 1), loss)
        expected.step()
        expected.zero_grad()
    assert_same_model(model, plain)


@multirank(2, timeout=TIMEOUT)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize(
    "clip", [{"clip_val": 0.02}, {"max_norm": 0.1}, {"max_norm": 0.05, "norm_type": "inf"}]
)
def test_clipping_is_that_of_the_whole_gradients(
    rank: int, world_size: int, layout: str, clip: dict[str, Any]
) -> None:
    from tests.integrations.fabrics import fabric_of, full, loss_of, plain_gradients, plain_model, set_up

    plain = plain_model()
    plain_gradients(plain, range(2))
    fabric = fabric_of(layout=layout)
    model, optimizer = set_up(fabric)
    with fabric.no_backward_sync(model):  # what is held is clipped, too
        for step in range(2):
            fabric.backward(loss_of(model, rank, step))
    norm = fabric.clip_gradients(model, optimizer, **clip)
    if "clip_val" in clip:
        assert norm is None
        nn.utils.clip_grad_value_(plain.parameters(), clip["clip_val"])
    else:
        kind = float(clip.get("norm_type", 2.0))
        expected = nn.utils.clip_grad_norm_(plain.parameters(), clip["max_norm"], norm_type=kind)
        torch.testing.assert_close(norm, expected)
    for (name, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, msg=name)
        assert q.grad.abs().max() <= 0.1


@multirank(2, timeout=TIMEOUT)
def test_clipping_refuses_what_it_cannot_clip(rank: int, world_size: int) -> None:
    from tests.integrations.fabrics import fabric_of, loss_of, set_up

    fabric = fabric_of()
    model, optimizer = set_up(fabric)
    scale = float("nan") if rank == 1 else 1.0
    fabric.backward(loss_of(model, rank, 0) * scale)
    with refused(RuntimeError, "nan"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isnan()
    with refused(TypeError, "Linear", "not sharded", "fabric.setup"):
        fabric.clip_gradients(nn.Linear(2, 2), optimizer, max_norm=1.0)


@multirank(2, timeout=TIMEOUT)
def test_accumulation_without_communication(rank: int, world_size: int) -> None:
    from tests.integrations.fabrics import (
        assert_same_model,
        fabric_of,
        loss_of,
        plain_gradients,
        plain_model,
        set_up,
    )

    plain = plain_model()
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01)
    fabric = fabric_of()
    model, optimizer = set_up(fabric)
    for start in (0, 3):
        for step in range(start, start + 3):
            with fabric.no_backward_sync(model, enabled=step < start + 2):
                fabric.backward(loss_of(model, rank, step))
            held = all(p.grad is None for p in model.parameters())
            assert held == (step < start + 2)
        optimizer.step()
        optimizer.zero_grad()
        plain_gradients(plain, range(start, start + 3))
        expected.step()
        expected.zero_grad()
    assert_same_model(model, plain, close=True)  # sums of three in another order

    # Leaving the context leaves what was before: a backward after it communicates.
    with fabric.no_backward_sync(model, enabled=False):
        pass
    fabric.backward(loss_of(model, rank, 9))
    assert all(p.grad is not None for p in model.parameters())
    with fabric.no_backward_sync(model), fabric.no_backward_sync(model, enabled=False):
        pass
    optimizer.zero_grad()
    fabric.backward(loss_of(model, rank, 9))
    assert all(p.grad is not None for p in model.parameters())


@multirank(2, timeout=TIMEOUT)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_float16_is_scaled_and_infinities_skip_the_step_on_every_rank(
    rank: int, world_size: int, fused: bool, layout: str
) -> None:
    """Against torch's scaler around the plain model. On the CPU Fabric takes 16-mixed as a plugin only."""
    from lightning.fabric.plugins import MixedPrecision

    from tests.integrations.fabrics import (
        Model,
        assert_same_model,
        data,
        fabric_of,
        plain_model,
    )

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    fabric = fabric_of(plugins=[MixedPrecision("16-mixed", "cpu", scaler())], layout=layout)
    fabric.seed_everything(3, verbose=False)
    with fabric.init_module(empty_init=True):
        model = Model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))
    plain, plain_scaler = plain_model(), scaler()
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=fused)
    for step in range(4):
        for data_rank in range(world_size):
            inputs, targets = data(data_rank, step)
            with torch.autocast("cpu", torch.float16):
                outputs = plain(inputs)
            loss = nn.functional.mse_loss(outputs.float(), targets)
            plain_scaler.scale(loss / world_size).backward()
            if data_rank == rank:
                with fabric.no_backward_sync(model, enabled=step == 3):  # reduced when they are unscaled
                    fabric.backward(nn.functional.mse_loss(model(inputs), targets))
        if step == 1:  # as an overflow in a part of the gradients that one rank has
            plain.stem.weight.grad.view(-1)[-1] = torch.inf
            if rank == 1:
                mine = next(g for p in model.parameters() if (g := p.grad.to_local()).numel())
                mine.view(-1)[-1] = torch.inf
        clip = step != 1 and not fused
        if clip:
            plain_scaler.unscale_(expected)
            nn.utils.clip_grad_value_(plain.parameters(), 0.05)
            fabric.clip_gradients(model, optimizer, clip_val=0.05)
        before = [p.to_local().clone() for p in model.parameters()]
        plain_scaler.step(expected)
        plain_scaler.update()
        optimizer.step()
        changed = any(
            not torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True)
        )
        assert changed == (step != 1)
        expected.zero_grad()
        optimizer.zero_grad()
        assert fabric.strategy.precision.scaler.get_scale() == plain_scaler.get_scale()
    assert plain_scaler.get_scale() == 1024.0  # once halved, once doubled
    assert_same_model(model, plain, close=True)


# -- construction ------------------------------------------------------------------------------------------------------


class _Loud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))


@multirank(2, timeout=TIMEOUT)
def test_empty_init_is_the_plain_build(rank: int, world_size: int) -> None:
    """Values, buffers and generators; nothing is allocated before set-up, and no module needs reset_parameters."""
    from shardwright.init.recorder import DeferredTensor
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
        UserWarning, match=r"names LSTM, and this model has only Block, Linear, Model.* one unit"
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
    with pytest.raises(RuntimeError, match="DTensor"):
        model.score(inputs)
    model.mark_forward_method("score")
    assert torch.equal(model.score(inputs), plain_model().score(inputs))
    assert torch.equal(model(inputs), plain_model()(inputs))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _others() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"step": 2, "generator": generator.get_state(), "names": ["a", "b"]}


@multirank(2, timeout=TIMEOUT)
@pytest.mark.parametrize(("kind", "layout"), [("sharded", "per_parameter"), ("full", "ragged")])
def test_resumed_training_goes_on_bit_by_bit(
    rank: int, world_size: int, kind: str, layout: str, tmp_path: Path
) -> None:
    """Model, optimizer, scheduler and values come back, in place of an earlier checkpoint, into a model of other
    values and another layout."""
    from tests.integrations.fabrics import fabric_of, full, set_up, train

    path = tmp_path / "deep" / "checkpoint"
    fabric = fabric_of(state_dict_type=kind, layout=layout, strategy="zero1" if kind == "full" else None)
    model, optimizer = set_up(fabric)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **_others()}
    fabric.save(path, state)  # before the first step: an optimizer without state
    train(fabric, model, optimizer, range(2))
    scheduler.step()
    model.module.seen = {"batches": 2, "last": torch.ones(2)}
    fabric.save(path, state)
    assert path.is_dir() == (kind == "sharded")
    assert [each.name for each in path.parent.iterdir()] == ["checkpoint"]
    losses = train(fabric, model, optimizer, range(2, 4))

    other = fabric_of(layout="ragged" if layout == "per_parameter" else "per_parameter")
    again, its_optimizer = set_up(other, seed=99, rate=0.5)
    its_scheduler = torch.optim.lr_scheduler.StepLR(its_optimizer, 1, gamma=0.5)
    new: dict[str, Any] = {"model": again, "optimizer": its_optimizer, "scheduler": its_scheduler, "step": 0}
    rest = other.load(path, new)
    assert new["step"] == 2 and set(rest) == {"generator", "names"}
    assert rest["names"] == ["a", "b"] and torch.equal(rest["generator"], _others()["generator"])
    assert its_scheduler.get_last_lr() == [0.005]
    assert again.module.seen["batches"] == 2 and again.module.seen["last"].tolist() == [1, 1]
    assert train(other, again, its_optimizer, range(2, 4)) == losses
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(p), full(q))
        for key, value in optimizer.state[q].items():
            assert torch.equal(full(its_optimizer.state[p][key]), full(value)), key


@multirank(2, timeout=TIMEOUT)
def test_an_optimizer_that_never_stepped_has_no_state_afterwards(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    from tests.integrations.fabrics import fabric_of, set_up

    for kind in ("sharded", "full"):
        fabric = fabric_of(state_dict_type=kind)
        model, optimizer = set_up(fabric)
        fabric.save(tmp_path / kind, {"model": model, "optimizer": optimizer})
        again, its_optimizer = set_up(fabric, rate=0.5)
        fabric.load(tmp_path / kind, {"model": again, "optimizer": its_optimizer})
        assert not its_optimizer.state and its_optimizer.param_groups[0]["lr"] == 0.01


@multirank(2, timeout=TIMEOUT)
def test_optimizer_state_goes_by_names(rank: int, world_size: int, tmp_path: Path) -> None:
    """In a sharded checkpoint: an optimizer that has its parameters in another order gets each its own."""
    from tests.integrations.fabrics import Block, fabric_of, full, train

    fabric = fabric_of(auto_wrap_policy=None)

    def start(reverse: bool) -> tuple[Any, Any]:
        fabric.seed_everything(0, verbose=False)
        model = nn.Sequential(nn.Linear(6, 12), Block(), Block(), nn.Linear(12, 5))
        parameters = list(model.parameters())
        return fabric.setup(model, torch.optim.AdamW(parameters[::-1] if reverse else parameters))  # type: ignore[no-any-return]

    model, optimizer = start(reverse=False)
    train(fabric, model, optimizer, range(2))
    fabric.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
    other, its_optimizer = start(reverse=True)
    fabric.load(tmp_path / "checkpoint", {"model": other, "optimizer": its_optimizer})
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[q].items():
            assert torch.equal(full(its_optimizer.state[p][key]), full(value)), key


@multirank(2, timeout=TIMEOUT)
def test_full_checkpoints_are_those_of_one_device(rank: int, world_size: int, tmp_path: Path) -> None:
    """An unsharded run goes on from ours, and we from its file; torch consolidates the sharded one to the same."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from tests.integrations.fabrics import (
        assert_same_model,
        fabric_of,
        full,
        plain_gradients,
        plain_model,
        set_up,
        train,
    )

    full_file, folder = tmp_path / "full.ckpt", tmp_path / "sharded"
    fabric = fabric_of(state_dict_type="full", layout="ragged")
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, range(2))
    state = {"model": model, "optimizer": optimizer, "step": 2}
    fabric.save(full_file, state)
    fabric_of().save(folder, state)
    only_stem = {"model": lambda name, _: name.startswith("stem")}
    replicas = fabric_of(state_dict_type="full", strategy="ddp")
    replicas.save(tmp_path / "filtered", {"model": set_up(replicas)[0]}, filter=only_stem)
    filtered = torch.load(tmp_path / "filtered")["model"]
    assert list(filtered) == ["stem.weight", "stem.bias"]
    assert (tmp_path / "filtered").stat().st_size < full_file.stat().st_size / 3
    fabric_of().save(tmp_path / "stem", {"model": model}, filter=only_stem)
    fresh, _ = set_up(fabric, seed=20)
    with refused(RuntimeError, "missing", "blocks.0.up.weight"):
        fabric.load(tmp_path / "stem", {"model": fresh})
    fabric.load(tmp_path / "stem", {"model": fresh}, strict=False)
    same = [
        torch.equal(full(p), full(q)) for p, q in zip(fresh.parameters(), model.parameters(), strict=True)
    ]
    assert sum(same) == 2

    stored = torch.load(full_file)
    plain = plain_model(seed=1)
    its_optimizer = torch.optim.AdamW(plain.parameters())
    plain.load_state_dict(stored["model"])
    its_optimizer.load_state_dict(stored["optimizer"])
    assert_same_model(model, plain)
    if rank == 0:
        dcp_to_torch_save(folder, tmp_path / "consolidated")
        consolidated = torch.load(tmp_path / "consolidated")
        expected = {n: v for n, v in stored["model"].items() if isinstance(v, torch.Tensor)}
        assert all(torch.equal(consolidated["model"][name], value) for name, value in expected.items())

    train(fabric, model, optimizer, range(2, 4))
    for step in range(2, 4):
        plain_gradients(plain, range(step, step + 1))
        its_optimizer.step()
        its_optimizer.zero_grad()
    assert_same_model(model, plain)

    file = tmp_path / f"plain{rank}.ckpt"
    torch.save({"model": plain.state_dict(), "optimizer": its_optimizer.state_dict(), "step": 4}, file)
    torch.save(plain.state_dict(), tmp_path / f"weights{rank}.ckpt")
    again, optimizer_again = set_up(fabric_of(), seed=50, rate=0.7)
    new = {"model": again, "optimizer": optimizer_again, "step": 0}
    fabric.load(tmp_path / "plain0.ckpt", new)
    assert new["step"] == 4
    train(fabric, again, optimizer_again, range(4, 5))
    plain_gradients(plain, range(4, 5))
    its_optimizer.step()
    assert_same_model(again, plain)

    fabric.load_raw(tmp_path / "weights0.ckpt", again)
    expected = _loaded(plain_model(seed=9), tmp_path / "weights0.ckpt")
    assert_same_model(again, expected)
    if rank == 0:
        sw.save_pretrained(expected, tmp_path / "folder")
    dist.barrier()
    for path in (tmp_path / "weights0.ckpt", tmp_path / "folder"):
        for empty in (True, False):
            with fabric.init_module(empty_init=empty):
                early = plain_model(seed=9)
            fabric.load_raw(path, early)
            assert_same_model(fabric.setup(early), expected)
    with torch.device("meta"):
        early = plain_model(seed=9)
    with refused(TypeError, "meta device", "fabric.setup"):
        fabric.load_raw(path, early)


def _loaded(model: nn.Module, path: Path) -> nn.Module:
    model.load_state_dict(torch.load(path))
    return model


def test_sharded_checkpoints_load_at_another_number_of_ranks(
    worker_pools: WorkerPools, tmp_path: Path
) -> None:
    """Also with state that one rank has whole: of an optimizer that needs matrices whole, and by other owners."""
    worker_pools.run(_save_muon, 2, timeout=TIMEOUT, folder=tmp_path)
    worker_pools.run(_load_muon, 3, timeout=TIMEOUT, folder=tmp_path)


def _with_muon(**options: Any) -> tuple[Any, Any, Any]:
    import shardwright as sw
    from tests.integrations.fabrics import Model, fabric_of

    fabric = fabric_of(**options)
    fabric.seed_everything(4, verbose=False)
    model = Model()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}]
    return (fabric, *fabric.setup(model, sw.Muon(groups, lr=0.01)))


def _save_muon(rank: int, world_size: int, folder: Path) -> None:
    from tests.integrations.fabrics import train

    fabric, model, optimizer = _with_muon()
    train(fabric, model, optimizer, range(2))
    fabric.save(folder / "sharded", {"model": model, "optimizer": optimizer})
    fabric, same, its_optimizer = _with_muon(state_dict_type="full")
    train(fabric, same, its_optimizer, range(2))
    fabric.save(folder / "full", {"model": same, "optimizer": its_optimizer})


def _load_muon(rank: int, world_size: int, folder: Path) -> None:
    from tests.integrations.fabrics import assert_same_model, full, plain_model

    stored = torch.load(folder / "full")
    assert len(stored["optimizer"]["state"]) == 13
    for name in ("sharded", "full"):
        fabric, model, optimizer = _with_muon(layout="ragged")
        fabric.load(folder / name, {"model": model, "optimizer": optimizer})
        plain = plain_model()
        plain.load_state_dict(stored["model"])
        assert_same_model(model, plain)
        optimizer.step()  # no gradients: nothing changes, and state is where the next step needs it
        assert_same_model(model, plain)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, values in stored["optimizer"]["state"].items():
            for key, value in values.items():
                assert torch.equal(full(optimizer.state[parameters[number]][key]), value), (name, key)


@multirank(2, timeout=TIMEOUT)
def test_checkpoints_that_do_not_fit_are_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    from tests.integrations.fabrics import Model, fabric_of, full, set_up

    paths = {}
    for kind in ("sharded", "full"):
        fabric = fabric_of(state_dict_type=kind)
        model, optimizer = set_up(fabric)
        paths[kind] = tmp_path / kind
        fabric.save(paths[kind], {"model": model, "optimizer": optimizer, "step": 2})
    fabric.barrier()

    torch.manual_seed(0)
    odd = nn.Sequential(nn.Linear(3, 3))
    odd = fabric_of(auto_wrap_policy=None).setup(odd)
    wrong = Model()
    wrong.stem = nn.Linear(7, 12)
    sized = fabric_of().setup(wrong)
    before = [full(p).clone() for p in odd.parameters()]
    for path in paths.values():
        with refused(RuntimeError, "0.weight", "stem.weight"):
            fabric.load(path, {"model": odd})
        with refused(RuntimeError, "stem.weight", "6", "7"):
            fabric.load(path, {"model": sized}, strict=False)
        with refused(KeyError, "'epoch'", "strict=False", "'step'"):
            fabric.load(path, {"model": model, "epoch": 0})
        state = {"model": model, "epoch": 7}
        assert fabric.load(path, state, strict=False)["step"] == 2 and state["epoch"] == 7
        fabric.load(path, {"model": odd}, strict=False)
        few = torch.optim.AdamW(list(model.module.parameters())[:2])
        with refused(ValueError, "optimizer", "groups of [2]"):
            fabric.load(path, {"model": model, "optimizer": fabric.setup_optimizers(few)})
        with refused(ValueError, "no model"):
            fabric.load(path, {"step": 0})
        with refused(ValueError, "no model of the state has"):
            fabric.load(path, {"model": odd, "optimizer": optimizer})
    assert all(torch.equal(full(p), old) for p, old in zip(odd.parameters(), before, strict=True))

    with refused(FileNotFoundError, "nothing"):
        fabric.load(tmp_path / "nothing", {"model": model})
    (tmp_path / "empty").mkdir(exist_ok=True)
    with refused(ValueError, "empty", "no checkpoint"):
        fabric.load(tmp_path / "empty", {"model": model})
    (tmp_path / f"text{rank}").write_text("not a checkpoint")
    with refused(ValueError, "text", "torch.save"):
        fabric.load(tmp_path / "text0", {"model": model})
    with refused(ValueError, "remote"):
        fabric.load("s3://bucket/checkpoint", {"model": model})
    with refused(ValueError, "sharded checkpoint", "fabric.load("):
        fabric.load_raw(paths["sharded"], model)
    with refused(ValueError, "sharded checkpoint", "state={"):
        fabric.load(paths["sharded"])
    assert fabric.load(paths["full"])["step"] == 2
    with refused(NotImplementedError, "'optimizer': optimizer"):
        fabric.load_raw(paths["full"], optimizer)
    with refused(TypeError, "Linear", "not sharded", "fabric.setup"):
        fabric.save(tmp_path / "x", {"model": model, "teacher": nn.Linear(2, 2)})


@multirank(2, timeout=TIMEOUT)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_save_that_fails_leaves_what_was_there(
    rank: int, world_size: int, kind: str, tmp_path: Path
) -> None:
    """It fails on one rank, or what is to be replaced is no checkpoint; every rank raises, and nothing is left over."""
    from tests.integrations.fabrics import fabric_of, set_up

    fabric = fabric_of(state_dict_type=kind)
    model, _ = set_up(fabric)
    path = tmp_path / "checkpoint"
    fabric.save(path, {"model": model, "step": 1})
    with pytest.raises((AttributeError, RuntimeError, TypeError), match=r"pickle|lambda|local|Rank 0"):
        fabric.save(path, {"model": model, "step": lambda: None})
    fabric.barrier()
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]
    state = {"model": model, "step": 0}
    fabric.load(path, state)
    assert state["step"] == 1

    taken = tmp_path / "taken"
    if rank == 0:
        taken.mkdir()
        (taken / "notes").write_text("mine")
    fabric.barrier()
    with pytest.raises((OSError, RuntimeError), match=r"taken"):
        fabric.save(taken, {"model": model})
    assert (taken / "notes").read_text() == "mine"


# -- refusals ----------------------------------------------------------------------------------------------------------


@multirank(2, timeout=TIMEOUT)
def test_what_cannot_be_honoured_is_refused_by_name(rank: int, world_size: int) -> None:
    from lightning.fabric.plugins import FSDPPrecision, MixedPrecision, TorchCheckpointIO

    from tests.integrations.fabrics import (
        Fabric,
        Model,
        ShardwrightStrategy,
        fabric_of,
        set_up,
    )

    fabric = fabric_of()
    model, optimizer = set_up(fabric)
    with refused(ValueError, "only once"):
        fabric.setup(model)
    with refused(ValueError, "Model", "set up once"):
        fabric.setup(model.module)
    with refused(ValueError, "only once"):
        fabric.setup_optimizers(optimizer)
    sync = fabric.strategy._backward_sync_control
    with refused(TypeError, "no_backward_sync", "not sharded"), sync.no_backward_sync(nn.Linear(2, 2), True):
        pass
    with refused(TypeError, "DistributedDataParallel", "'0'"):
        fabric.setup(nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))))
    with refused(TypeError, "FSDPPrecision", "bf16-mixed"):
        fabric_of(plugins=[FSDPPrecision("bf16-mixed")])

    class OwnScaler(torch.amp.GradScaler):
        pass

    with refused(TypeError, "OwnScaler", "torch.amp.GradScaler"):
        fabric_of(plugins=[MixedPrecision("16-mixed", "cpu", OwnScaler("cpu"))])
    with refused(NotImplementedError, "TorchCheckpointIO"):
        fabric_of(plugins=[TorchCheckpointIO()])
    with refused(ValueError, "device_mesh=(2, 2)", "4 ranks", "2"):
        fabric_of(device_mesh=(2, 2))
    for wrong in (2, (1, 1, 2), (0, 2)):
        with refused(ValueError, "device_mesh", "(replicas, shards)"):
            fabric_of(device_mesh=wrong)
    with refused(ValueError, "state_dict_type", "'local'"):
        fabric_of(state_dict_type="local")
    with refused(ValueError, "zero9"):
        fabric_of(strategy="zero9").setup(Model())
    idle = Fabric(accelerator="cpu", devices=2, strategy=ShardwrightStrategy())
    with refused(RuntimeError, "launch"):
        _ = idle.strategy.device_mesh


@multirank(2, timeout=TIMEOUT)
def test_the_trainer_says_what_to_use_instead(rank: int, world_size: int) -> None:
    from lightning.pytorch import Trainer

    from tests.integrations.fabrics import ShardwrightStrategy

    with refused(ValueError, "ShardwrightStrategy", "Trainer cannot use it", "Fabric", "shardwright train"):
        Trainer(accelerator="cpu", strategy=ShardwrightStrategy())


@multirank(2, timeout=TIMEOUT)
def test_what_fabric_offers_beside_works(rank: int, world_size: int) -> None:
    """Collectives, samplers that give every rank its own part, and gathering what a rank says."""
    from torch.utils.data import DataLoader, TensorDataset

    from tests.integrations.fabrics import fabric_of

    fabric = fabric_of(device_mesh=(2, 1))
    assert (fabric.world_size, fabric.global_rank, fabric.is_global_zero) == (2, rank, rank == 0)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8)), batch_size=4))
    (batch,) = [each[0] for each in loader]
    assert batch.tolist() == [rank, rank + 2, rank + 4, rank + 6]
    assert fabric.all_reduce(torch.tensor(float(rank)), reduce_op="mean") == 0.5
    assert fabric.all_gather(torch.tensor(rank)).tolist() == [0, 1]
    assert fabric.broadcast(rank, src=1) == 1
    assert dist.get_world_size(fabric.strategy.device_mesh.get_group("replicate")) == 2


@multirank(2, timeout=TIMEOUT)
def test_examples_of_the_fabric_page_run(rank: int, world_size: int) -> None:
    from tests.integrations.fabrics import as_under_torchrun

    as_under_torchrun()
    page = Path(__file__).parents[2] / "docs" / "fabric.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(examples) == 2
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, str(page), "exec"), names)
