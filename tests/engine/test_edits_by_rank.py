"""A forward that writes its weights: ranks that write different values get an error, all of them, in every layout.

The codebook of a VQ-VAE is such a weight. Equal edits are those of the plain model. A rank may read ``.data`` alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.engine.comm import HostFlag
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh

Edit = Callable[[nn.Parameter, torch.Tensor], Any]

#: Each writes a value of this rank into a weight.
EDITS: dict[str, Edit] = {
    "in place": lambda p, v: p.mul_(0.9).add_(v),
    "data": lambda p, v: p.data.add_(v),
    "copy_": lambda p, v: p.copy_(p + v),
    "data copy_": lambda p, v: p.data.copy_(p.detach() + v),
    "one row": lambda p, v: p[1].add_(v[1]),
    "one element": lambda p, v: p.view(-1)[-1:].add_(v.view(-1)[-1:]),
    "exchanged rows": lambda p, v: p.copy_(p[torch.argsort(v[:, 0])]),
    "out": lambda p, v: torch.add(p, v, out=p),
    "detached": lambda p, v: p.detach().sub_(v),
}
SETTINGS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "default": ({}, (2,)),
    "ragged": ({"layout": "ragged"}, (2,)),
    "element": ({"layout": "element"}, (2,)),
    "ddp": ({"strategy": "ddp"}, (2,)),
    "zero1": ({"strategy": "zero1"}, (2,)),
    "zero2": ({"strategy": "zero2"}, (2,)),
    "kept": ({"reshard_after_forward": False}, (2,)),
    "bfloat16": ({"mp_policy": sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, (2,)),
    "hsdp": ({"strategy": "hsdp"}, (2, 2)),
    "hfsdp": ({"strategy": "hfsdp"}, (2, 2)),
    "ddp of two axes": ({"strategy": "ddp"}, (2, 2)),
}


REFUSED = r"(parameter 'codes' of unit 1|\(not on this rank\)).*was changed in place"


class Quantizer(nn.Module):
    def __init__(self, edit: Edit) -> None:
        super().__init__()
        self.codes, self.out = nn.Parameter(torch.randn(5, 3)), nn.Linear(3, 3)
        self.edit = edit
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
        if value is not None:
            with torch.no_grad():
                self.edit(self.codes, value)
        self.count.add_(x.sum())  # a buffer stays this rank's own
        return self.out(x) @ self.codes.detach().t()


class Model(nn.Module):
    def __init__(self, edit: Edit) -> None:
        super().__init__()
        self.first, self.quantizer = nn.Linear(3, 3), Quantizer(edit)

    def forward(self, x: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
        return self.quantizer(self.first(x), value)


def build(edit: str, options: dict[str, Any], shape: tuple[int, ...]) -> tuple[Any, Model]:
    torch.manual_seed(0)
    plain = Model(EDITS[edit])
    model: Any = copy.deepcopy(plain)
    mesh = world_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    for module in (model.quantizer, model):
        sw.fully_shard(module, mesh=mesh, **options)
    return model, plain


def value_of(number: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(number)) * 2


def check(edit: str, name: str) -> None:
    options, shape = SETTINGS[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    tolerance = 2e-2 if name == "bfloat16" else 1e-6
    # Equal edits.
    model, plain = build(edit, options, shape)
    x = torch.randn(2, 3)
    for step in range(2):
        for each in (model, plain):
            each(x, value_of(step)).sum().backward()
    codes = full(model.quantizer.codes)
    torch.testing.assert_close(codes, plain.quantizer.codes.detach(), rtol=tolerance, atol=tolerance)
    # Different edits, and edits of one rank alone.
    for values in (list(map(value_of, range(world))), [value_of(0)] + [None] * (world - 1)):
        model, _ = build(edit, options, shape)
        model(x, value_of(9)).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"(parameter 'codes' of unit 1|\(not on this rank\)).*was changed in place"
        ):
            model(x, values[rank])
        model.load_state_dict(model.state_dict())  # every rank says that its weights are right
        model(x).sum().backward()


@pytest.mark.extensive("each way of editing")
@multirank(2, timeout=120)
def test_edits_of_different_values_are_refused_on_every_rank(rank: int, world_size: int) -> None:
    for edit, name in itertools.product(EDITS, (n for n, (_, shape) in SETTINGS.items() if len(shape) == 1)):
        try:
            check(edit, name)
        except BaseException as error:
            error.add_note(f"{edit}, {name}")
            raise


@pytest.mark.extensive("each way of editing")
@multirank(4, timeout=120)
def test_replicas_are_compared_too(rank: int, world_size: int) -> None:
    for edit, name in itertools.product(EDITS, (n for n, (_, shape) in SETTINGS.items() if len(shape) == 2)):
        try:
            check(edit, name)
        except BaseException as error:
            error.add_note(f"{edit}, {name}")
            raise


@multirank(2)
def test_an_accelerator_compares_edits_at_the_end_of_backward(rank: int, world_size: int) -> None:
    """Here with the CPU's streams: the host sends no records, and reads one flag before the next forward."""
    for values, differ in (([1, 1], False), ([1, 2], True), ([None, 2], True)):
        model, _ = build("in place", {}, (2,))
        model(torch.randn(2, 3)).sum().backward()
        agreement = model._root().agreement
        streams = copy.copy(agreement.streams)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(streams), "asynchronous", False, raising=False)
            flag = HostFlag(streams, torch.device("cpu"), "gather")
            patch.setattr(agreement, "_differs", flag)
            edits = {comm: torch.zeros(1, dtype=torch.int64) for comm in agreement.model.every}
            patch.setattr(agreement, "_edits", edits)
            patch.setattr(agreement, "_beside", {comm: comm for comm in edits})
            memory = list(edits.values())
            for comm in agreement.model.every:
                patch.setattr(comm, "exchanges", False)
            value = values[rank]
            model(torch.randn(2, 3), None if value is None else value_of(value)).sum().backward()
            if differ:
                with pytest.raises(RuntimeError, match="was changed in place"):
                    model(torch.randn(2, 3))
                model.load_state_dict(model.state_dict())
            model(torch.randn(2, 3)).sum().backward()
            model(torch.randn(2, 3))
            assert not agreement._is_edited and not agreement.model.edited
            assert all(value.item() == 0 for value in edits.values())
            # A graph that was captured meanwhile reads this memory.
            assert all(now is before for now, before in zip(edits.values(), memory, strict=True))


@multirank(2)
def test_one_rank_may_look_at_data_alone(rank: int, world_size: int) -> None:
    """As for a log. It changes nothing, so nothing differs."""
    for name in (n for n, (_, shape) in SETTINGS.items() if len(shape) == 1):
        options, shape = SETTINGS[name]
        model, _ = build("data", options, shape)
        model.quantizer.edit = lambda p, v: p.data.norm().item() if dist.get_rank() == 0 else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.randn(2, 3), value_of(step)).sum().backward()
            optimizer.step()


@multirank(2)
def test_a_step_without_edits_makes_no_fingerprint(rank: int, world_size: int) -> None:
    from shardwright.engine.weights import full_edits

    for name in ("default", "ddp", "ragged"):
        options, shape = SETTINGS[name]
        model, _ = build("data", options, shape)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(full_edits, "fingerprint_of", lambda *_: pytest.fail("made a fingerprint"))
            for _ in range(2):
                model(torch.randn(2, 3)).sum().backward()
                optimizer.step()


@multirank(2)
def test_a_fingerprint_shows_every_change(rank: int, world_size: int) -> None:
    from shardwright.engine.weights.full_edits import fingerprint_of

    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64):
        for size in (0, 1, 3, 8, 37):
            t = (torch.randn(size) * 50).to(dtype)
            assert fingerprint_of(t) == fingerprint_of(t.clone()), (dtype, size)
            for i in range(size):
                other = t.clone()
                other[i] = not other[i] if dtype == torch.bool else other[i] + 1
                assert fingerprint_of(t) != fingerprint_of(other), (dtype, size, i)
            if size > 2 and dtype != torch.bool:
                assert fingerprint_of(t) != fingerprint_of(t.flip(0)) or torch.equal(t, t.flip(0)), (
                    dtype,
                    size,
                )
