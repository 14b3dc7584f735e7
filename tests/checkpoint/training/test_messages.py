"""Wrong arguments of saves and loads: each is one error on every rank, which names the thing and says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.checkpoint import Damaged
from tests.support.pool import multirank, world_mesh


class Case:
    """The arguments of the calls of the table.

    Attributes:
        folder: holds ``ok``, a whole checkpoint; ``bare``, one without optimizer; an empty folder and two files.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder, self.rank, self.mesh = folder, rank, world_mesh(world_size)
        self.model, self.optimizer = self.made(2)
        sw.save_checkpoint(folder / "ok", self.model, self.optimizer, extra={"step": 3})
        sw.save_checkpoint(folder / "bare", self.model)
        if rank == 0:
            (folder / "empty").mkdir()
            (folder / "text").write_text("x")
            torch.save({"x": 1}, folder / "full.ckpt")
            (folder / "lost").mkdir()
            (folder / "lost" / "__0_0.distcp").write_text("x")
        dist.barrier()

    def made(self, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        for each in model:
            sw.fully_shard(each, mesh=self.mesh)
        sw.fully_shard(model, mesh=self.mesh)
        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def save(self, path: Any = None, model: Any = 0, optimizer: Any = None, **options: Any) -> None:
        sw.save_checkpoint(
            self.folder / "new" if path is None else path,
            self.model if model == 0 else model,
            optimizer,
            **options,
        )

    def load(self, name: str, model: Any = 0, optimizer: Any = None, **options: Any) -> None:
        sw.load_checkpoint(self.folder / name, self.model if model == 0 else model, optimizer, **options)

    def save_in_forward(self) -> None:
        hook = self.model[0].register_forward_hook(lambda *_: self.save(optimizer=self.optimizer))  # type: ignore[index]
        try:
            self.model(torch.ones(2, 4))
        finally:
            hook.remove()

    def async_save(self, path: Any) -> None:
        with sw.AsyncCheckpoint() as checkpoints:
            checkpoints.save(path, self.model)


class Broken:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("my own failure")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def cyclic(**content: Any) -> dict[str, Any]:
    content["me"] = content
    return content


def deep() -> dict[str, Any]:
    content: dict[str, Any] = {}
    for _ in range(3000):
        content = {"x": content}
    return content


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


DEEP = r"^extra.* holds itself, or is more than 100 values deep"

TABLE: dict[str, tuple[Callable[[Case], Any], type[Exception], str]] = {
    "load nothing": (
        lambda c: c.load("nothing"),
        FileNotFoundError,
        r"/nothing: there is no checkpoint; beside it is .*/bare$",
    ),
    "load an empty folder": (
        lambda c: c.load("empty"),
        FileNotFoundError,
        r"/empty: the folder has neither index\.json nor \.metadata, so it holds no checkpoint$",
    ),
    "load the folder above": (
        lambda c: c.load("."),
        FileNotFoundError,
        r"holds no checkpoint\. It holds folders with checkpoints: load \S+/(ok|bare), for example$",
    ),
    "load parts without index": (lambda c: c.load("lost"), Damaged, r"/lost: .*neither index\.json nor"),
    "load a file": (lambda c: c.load("text"), FileNotFoundError, r"/text: this is a file, and not the folder"),
    "load a full checkpoint": (
        lambda c: c.load("full.ckpt"),
        FileNotFoundError,
        r"full\.ckpt: this is a file of torch\.save, .*Read it with torch\.load or fabric\.load$",
    ),
    "load an optimizer that was not saved": (
        lambda c: c.load("bare", optimizer=c.optimizer),
        ValueError,
        r"/bare holds no optimizer: it has extra, generators, model\. Leave optimizer out",
    ),
    "load more layers": (
        lambda c: c.load("ok", *c.made(3)),
        ValueError,
        r"/ok: expected 2\.(weight|bias) of shape .*, found no such tensor; this is a checkpoint of another model$",
    ),
    "load at two paths": (
        lambda c: c.load("bare" if c.rank else "ok"),
        ValueError,
        r"^rank 1 loads \S+/bare, and rank 0 \S+/ok, which is another checkpoint\. Pass the same path on",
    ),
    "load into no model": (lambda c: c.load("ok", None), TypeError, r"^model: expected a torch\.nn\.Module, got None"),
    "load a list as extra": (lambda c: c.load("ok", extra=[1]), TypeError, r"^extra: expected a dict.* got list"),
    "save no model": (lambda c: c.save(model=None), TypeError, r"^model: expected a torch\.nn\.Module, got NoneType$"),
    "save a state dict": (
        lambda c: c.save(model=c.model.state_dict()),
        TypeError,
        r"^model: expected a torch\.nn\.Module, got OrderedDict\. Pass the model itself$",
    ),
    "save a schedule as optimizer": (
        lambda c: c.save(optimizer=schedule(c.optimizer)),
        TypeError,
        r'^optimizer: expected .*, got StepLR\. Pass a schedule in extra: extra=\{"schedule": schedule\}$',
    ),
    "save a dict as optimizer": (
        lambda c: c.save(optimizer={"a": c.optimizer}),
        TypeError,
        r"^optimizer: expected a torch\.optim\.Optimizer or several, got dict$",
    ),
    "save to a zero byte": (lambda c: c.save(f"{c.folder}/a\0b"), ValueError, r"^path: '.*a\\x00b' has a zero byte"),
    "save to bytes": (lambda c: c.save(b"/x"), TypeError, r"^path: expected a string or .*, got bytes b'/x'$"),
    "save to None on one rank": (
        lambda c: sw.save_checkpoint(None if c.rank else c.folder / "new", c.model),  # type: ignore[arg-type]
        TypeError,
        r"^rank 1: path: expected a string or a pathlib\.Path, got NoneType None$",
    ),
    "save at two paths": (
        lambda c: c.save(c.folder / f"new{c.rank}"),
        ValueError,
        r"^rank 1: this rank saves to \S+/new1, and rank 0 to \S+/new0\. Pass the same path on every rank$",
    ),
    "save asynchronously to bytes": (lambda c: c.async_save(b"/x"), TypeError, r"^path: expected a string or"),
    "save asynchronously at two paths": (
        lambda c: c.async_save(c.folder / f"new{c.rank}"),
        ValueError,
        r"Pass the same path on every rank$",
    ),
    "extra is a list": (lambda c: c.save(extra=[1]), TypeError, r'^extra: expected a dict, such as .*, got list$'),
    "extra holds itself": (lambda c: c.save(extra=cyclic(a=1)), ValueError, DEEP),
    "extra holds itself beside a tensor": (
        lambda c: c.save(extra=cyclic(t=torch.ones(1))),
        ValueError,
        DEEP,
    ),
    "extra is deep": (lambda c: c.save(extra=deep()), ValueError, DEEP),
    "extra has a long integer": (
        lambda c: c.save(extra={"m": [10**5000]}),
        ValueError,
        r"^extra\.m\[0\] is an integer of 16,610 bits; .* Pass it as a string, such as hex\(value\)$",
    ),
    "extra has objects in a list": (
        lambda c: c.save(extra={"s": [schedule(c.optimizer)]}),
        ValueError,
        r"^extra\.s\[0\] is a \S+StepLR inside another value\. Pass an object with state_dict directly in extra",
    ),
    "extra has a broken object": (
        lambda c: c.save(extra={"m": Broken()}),
        ValueError,
        r"^extra\['m'\]: the state_dict of this Broken has failed \(RuntimeError: my own failure\)$",
    ),
    "save in a forward": (
        lambda c: c.save_in_forward(),
        RuntimeError,
        r"^unit '0?' computes at this moment, .* Save and load between steps",
    ),
}  # fmt: skip


@pytest.mark.extensive("each wrong call", but=("save*", "load a f*"))
@multirank(2)
@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_call_is_one_clear_error_on_every_rank(
    rank: int, world_size: int, name: str, tmp_path: Path
) -> None:
    case = Case(tmp_path, rank, world_size)
    before = [p.full_tensor().clone() for p in case.model.parameters()]  # type: ignore[operator]
    call, kind, message = TABLE[name]
    with pytest.raises(kind) as caught:
        call(case)
    text = str(caught.value)
    assert type(caught.value) is kind and "\n" not in text and re.search(message, text), text
    after = [p.full_tensor() for p in case.model.parameters()]  # type: ignore[operator]
    assert all(map(torch.equal, before, after)) and case.optimizer.state_dict()["state"]
    dist.barrier()
    assert not [each.name for each in tmp_path.iterdir() if "new" in each.name]
