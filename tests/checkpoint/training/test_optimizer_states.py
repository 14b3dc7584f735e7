"""States beside the weights: every optimizer, schedules, scalers, copies of the model, gradient hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import shardwright as sw
from shardwright.comm_hooks import Cast, Compressed, Int8Blocks, PowerSGD
from tests.checkpoint.kit.resharding import assert_equal, whole
from tests.optim.whole import Whole
from tests.support import multirank, world_mesh
from tests.support.stand_in import stand_in_device


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(6, 33), nn.Linear(33, 5)
        self.unused = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def sharded(seed: int, **options: Any) -> Any:
    model = Net(seed)
    options.setdefault("mesh", world_mesh(dist.get_world_size()))
    for layer in (model.up, model.down):
        sw.fully_shard(layer, **options)
    return sw.fully_shard(model, **options)


def step(model: Any, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(
        100 * number + (dist.get_rank() if dist.is_initialized() else 0)
    )
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Counting(Whole):
    """Without strings in its state: torch's load_state_dict makes generators of them."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state.pop("kind", None)


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.1),
    "Adam amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    "AdamW capturable": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), t0=1),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), decoupled_weight_decay=True),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, dampening=0.1),
    "AdamW8bit": lambda m: sw.AdamW8bit(m.parameters(), block_size=32, min_size=1),
    "Muon": lambda m: sw.Muon(m.named_parameters()),
    "numbers and nests": lambda m: Counting(m.parameters()),
    "groups": lambda m: torch.optim.AdamW(
        [{"params": list(m.up.parameters()), "lr": 0.1}, {"params": [m.unused, *m.down.parameters()]}]
    ),
    "rates that are tensors": lambda m: torch.optim.AdamW(
        [
            {"params": list(m.up.parameters()), "lr": 0.1},
            {"params": [m.unused, *m.down.parameters()], "lr": torch.tensor(0.2)},
        ],
        foreach=False,
    ),
}


@pytest.mark.extensive(
    "every optimizer on each number of ranks",
    but=("Muon-2-*", "AdamW8bit-2-*", "groups-2-*", "numbers and nests-0-*"),
)
@multirank(2)
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on(rank: int, world_size: int, name: str, before: int, tmp_path: Path) -> None:
    """From no state, or the state of some parameters, into an optimizer with none and one with some."""
    layout = sw.Ragged(lambda shape: 32) if name == "AdamW8bit" else "ragged"

    def made(seed: int) -> tuple[Any, Any]:
        model = sharded(seed, layout=layout)
        return model, sw.fully_shard_optimizer(OPTIMIZERS[name](model))

    model, optimizer = made(0)
    for number in range(before):
        step(model, optimizer, number)
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.param_groups[-1]["lr"] = rates[-1] * 0.5
    expected = whole(model, optimizer)
    sw.save_checkpoint(tmp_path / "c", model, optimizer)
    assert_equal(whole(model, optimizer), expected)
    step(model, optimizer, 7)
    for steps in (0, 1):
        other, its = made(1)
        for number in range(steps):
            step(other, its, number)
        sw.load_checkpoint(tmp_path / "c", other, its)
        its.steps = before  # of "numbers and nests", which does not keep it in its state
        assert its.param_groups[-1]["lr"] == rates[-1] * 0.5
        assert_equal(whole(other, its), expected)
        step(other, its, 7)
        assert_equal(whole(other, its), whole(model, optimizer))


@pytest.mark.extensive("each way", but=("two-*", "in backward-*"))
@multirank(2)
@pytest.mark.parametrize("way", ["two", "in backward", "offloaded", "state offloaded"])
def test_ways_to_step_go_on(rank: int, world_size: int, way: str, tmp_path: Path) -> None:
    policies = {
        "offloaded": sw.CPUOffloadPolicy(),
        "state offloaded": sw.Offload(parameters=False, gradients=False),
    }
    options = {"offload_policy": policies[way]} if way in policies else {}

    def made(seed: int) -> tuple[Any, Any]:
        model = sharded(seed, **options)
        if way == "two":
            both = [torch.optim.SGD(model.up.parameters(), lr=0.1, momentum=0.9)]
            both.append(torch.optim.AdamW([model.unused, *model.down.parameters()], lr=0.1))
            return model, [sw.fully_shard_optimizer(each) for each in both]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, [
            (sw.optim.in_backward if way == "in backward" else sw.fully_shard_optimizer)(optimizer)
        ]

    def train(model: Any, optimizers: list[Any], number: int) -> None:
        for each in optimizers[1:]:
            each.zero_grad()
        generator = torch.Generator().manual_seed(100 * number + rank)
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    with stand_in_device() if "offloaded" in way else nullcontext():
        model, optimizers = made(0)
        train(model, optimizers, 0)
        optimizers[-1].param_groups[0]["lr"] = 0.05
        sw.save_checkpoint(tmp_path / "c", model, optimizers)
        train(model, optimizers, 1)
        for steps in (0, 1):
            other, its = made(1)
            for number in range(steps):
                train(other, its, number)
            sw.load_checkpoint(tmp_path / "c", other, its)
            assert [o.param_groups[0]["lr"] for o in its] == [o.param_groups[0]["lr"] for o in optimizers]
            train(other, its, 1)
            assert_equal(whole(other), whole(model))
            for one, two in zip(optimizers, its, strict=True):
                assert_equal(whole(other, two), whole(model, one))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 6),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=9),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on(name: str, tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, Any, Any]:
        model = Net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model, optimizer, SCHEDULES[name](optimizer)

    def train(model: nn.Module, optimizer: Any, schedule: Any, steps: range) -> list[float]:
        rates = []
        for number in steps:
            step(model, optimizer, number)
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    model, optimizer, schedule = made(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of SequentialLR
        train(model, optimizer, schedule, range(3))
        sw.save_checkpoint(tmp_path / "c", model, optimizer, extra={"schedule": schedule})
        other, its, again = made(1)
        sw.load_checkpoint(tmp_path / "c", other, its, extra={"schedule": again})
        expected = train(model, optimizer, schedule, range(3, 7))
        assert train(other, its, again, range(3, 7)) == expected
    assert_equal(whole(other, its), whole(model, optimizer))


class Loader:
    """A loader of data with a position and a buffer that grows."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"epoch": 0, "buffer": torch.zeros(0), "mixed": [1, torch.ones(2), "x"]}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_other_objects_return(rank: int, world_size: int, layout: str, tmp_path: Path) -> None:
    """A scaler, a loader, and averages of a sharded model, which are sharded, too; also between other ranks."""
    model = sharded(0, layout=layout)
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    copies: list[Any] = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))]
    copies.append({name: value.clone() for name, value in model.state_dict().items()})
    scaler, loader = torch.amp.GradScaler("cpu", init_scale=64.0), Loader()
    loader.state = {"epoch": 3, "buffer": torch.arange(5.0), "mixed": [2, torch.zeros(2), "y"]}
    step(model, optimizer, 0)
    copies[0].update_parameters(model)
    first = {"position": torch.tensor([rank, 3]), "n": 4}
    extra = {"average": copies[0], "copy": copies[1], "scaler": scaler, "loader": loader, "first": first}
    sw.save_checkpoint(tmp_path / "c", model, optimizer, extra=extra)
    expected = [whole(copies[0]), {k: v.full_tensor() for k, v in copies[1].items()}]

    other = sharded(1, layout="ragged" if layout == "per_parameter" else "per_parameter")
    average = AveragedModel(other, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    into = {name: value.clone() for name, value in other.state_dict().items()}
    scaler, loader = torch.amp.GradScaler("cpu"), Loader()
    given = {"average": average, "copy": into, "scaler": scaler, "loader": loader}
    result = sw.load_checkpoint(tmp_path / "c", other, extra=given)
    assert_equal(whole(average), expected[0])
    assert_equal({k: v.full_tensor() for k, v in into.items()}, expected[1])
    assert scaler.get_scale() == 64.0
    assert loader.state["epoch"] == 3 and torch.equal(loader.state["buffer"], torch.arange(5.0))
    number, tensor, text = loader.state["mixed"]
    assert number == 2 and torch.equal(tensor, torch.zeros(2)) and text == "y"
    assert_equal(result["first"], {"position": torch.tensor([0, 3]), "n": 4})  # the first rank's
    average.update_parameters(other)
    assert average.n_averaged.item() == 2


@multirank(3)
def test_tensors_made_from_ragged_ones(rank: int, world_size: int, tmp_path: Path) -> None:
    """The parameter itself, its entry in a state dict, and what torch makes of them."""
    model = sharded(0, layout=sw.Ragged("element"))
    expected = whole(model)["model"]["up.weight"]
    entry = model.state_dict()["up.weight"]
    saved = {"a": model.up.weight, "b": entry, "c": entry * 1, "d": torch.zeros_like(entry)}
    sw.save_checkpoint(tmp_path / "c", model, extra=saved)
    into = {key: torch.zeros_like(model.up.weight if key == "a" else entry) for key in "abc"}
    plain = sw.load_checkpoint(tmp_path / "c", model)
    sw.load_checkpoint(tmp_path / "c", model, extra=into)
    for key in "abc":
        assert torch.equal(plain[key], expected), key
        local = into[key] if key == "a" else into[key].to_local()
        assert torch.equal(local.full_tensor(), expected), key
    assert not plain["d"].any()


HOOKS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: Compressed(Int8Blocks(16), error_feedback=True),
    "bfloat16": lambda: Compressed(Cast(torch.bfloat16), error_feedback=True),
    "products": lambda: PowerSGD(1),
}


def with_hook(seed: int, hook: str, **options: Any) -> tuple[Any, Any]:
    model = sharded(seed, **options)
    model.set_gradient_comm_hook(HOOKS[hook]())
    return model, sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.extensive("each hook in each strategy", but=("zero3-products-*", "hsdp-bytes-*"))
@multirank(2, 4)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("strategy", ["zero3", "ddp", "hsdp"])
def test_errors_of_hooks_go_on(rank: int, world_size: int, hook: str, strategy: str, tmp_path: Path) -> None:
    mesh = world_mesh(2, world_size // 2) if strategy == "hsdp" else world_mesh(world_size)
    options = {"mesh": mesh, "strategy": strategy}
    model, optimizer = with_hook(0, hook, **options)
    step(model, optimizer, 0)
    sw.save_checkpoint(tmp_path / "c", model, optimizer)
    step(model, optimizer, 1)
    expected = whole(model, optimizer)
    for steps in (0, 1):
        other, its = with_hook(1, hook, **options)
        for number in range(steps):
            step(other, its, 5 + number)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sw.load_checkpoint(tmp_path / "c", other, its)
        step(other, its, 1)
        assert_equal(whole(other, its), expected)


@pytest.mark.extensive("each change", but=("layout-*", "codec-*"))
@multirank(2)
@pytest.mark.parametrize("change", ["layout", "ranks", "codec", "none saved"])
def test_errors_of_hooks_of_another_layout_are_forgotten(
    rank: int, world_size: int, change: str, tmp_path: Path
) -> None:
    """Training goes on as with a new hook, and one warning says so."""
    first = {"layout": "ragged"} if change == "layout" else {}
    hook = "bytes" if change == "codec" else "products"
    if change == "ranks":
        from torch.distributed.device_mesh import DeviceMesh

        first = {"mesh": DeviceMesh("cpu", [rank])}
    model, optimizer = with_hook(0, hook, **first)
    step(model, optimizer, 0)
    if change == "none saved":
        model.set_gradient_comm_hook(None)
    group = None
    if change == "ranks":
        group = [dist.new_group([r]) for r in range(world_size)][rank]
    if change != "ranks" or rank == 0:
        sw.save_checkpoint(tmp_path / "c", model, optimizer, process_group=group, generators=False)
    dist.barrier()
    results = []
    for steps in (0, 1):
        other, its = with_hook(1, "products")
        for number in range(steps):
            step(other, its, 5 + number)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sw.load_checkpoint(tmp_path / "c", other, its)
        texts = [str(each.message) for each in caught if "gradient hooks" in str(each.message)]
        expected = change in ("layout", "codec") and rank == 0
        assert len(texts) == expected and all("PowerSGD starts without" in text for text in texts), texts
        step(other, its, 1)
        results.append(whole(other, its))
    assert_equal(results[1], results[0])


class NoMemory(torch.optim.AdamW):
    """Its step fails on one rank, after it has made some state."""

    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.fails:
            raise MemoryError("no memory for the state")


@multirank(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_without_memory_for_the_state_stops_all_before_anything_has_changed(
    rank: int, world_size: int, failing: int, tmp_path: Path
) -> None:
    model = sharded(0)
    optimizer = NoMemory(model.parameters())
    step(model, optimizer, 1)
    sw.save_checkpoint(tmp_path / "c", model, optimizer)
    other = sharded(1)
    fresh = NoMemory(other.parameters(), lr=0.5)
    before = [p.to_local().clone() for p in other.parameters()]
    fresh.fails = rank == failing
    with pytest.raises(RuntimeError, match=f"^rank {failing}: MemoryError: no memory for the state$"):
        sw.load_checkpoint(tmp_path / "c", other, fresh)
    assert not fresh.state and [group["lr"] for group in fresh.param_groups] == [0.5]
    assert all(torch.equal(p.to_local(), old) for p, old in zip(other.parameters(), before, strict=True))
    fresh.fails = False
    sw.load_checkpoint(tmp_path / "c", other, fresh)
    for mine, saved in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.to_local(), saved.to_local())
        assert fresh.state[mine].keys() == optimizer.state[saved].keys()
