"""Lightning Fabric with ShardwrightStrategy: unchanged Fabric code has the numbers of one device.

On ranks of the pool, which Fabric takes for those of torchrun; how Fabric launches processes itself is in
test_fabric_launch.py. Lightning is imported by the ranks alone. Refusals are here, too.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.integrations.kit import TIMEOUT, refused
from tests.support import multirank

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs the extra lightning"
)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.extensive("runs in each setting")
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
    with refused(ValueError, "Model", "already sharded"):
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
