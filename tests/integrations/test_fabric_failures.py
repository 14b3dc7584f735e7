"""Saves of Fabric that fail, on one rank or all: one error on every rank, nothing lost, nothing left over."""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.kit import TIMEOUT
from tests.support import multirank
from tests.train.kit.damage import on_first_rank

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs the extra lightning"
)


@contextmanager
def one_error(kind: type[Exception], *words: str) -> Iterator[None]:
    """The body raises the same error on every rank, which has these words."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert all(word in text for word in words), text
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, (type(caught.value).__name__, text))
    assert len(set(texts)) == 1, texts


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """This process cannot write more into a file, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.extensive("each form")
@multirank(2, timeout=TIMEOUT)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_save_that_fails_leaves_what_was_there(
    rank: int, world_size: int, kind: str, tmp_path: Path
) -> None:
    from tests.integrations.fabrics import fabric_of, full, set_up

    fabric = fabric_of(state_dict_type=kind)
    model, optimizer = set_up(fabric)
    path = tmp_path / "checkpoint"
    fabric.save(path, {"model": model, "step": 1})
    before = [full(p).clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    writer, file = (1, "__1_0.distcp") if kind == "sharded" else (0, "checkpoint")
    with (
        files_of_at_most(1000 if rank == writer else 1 << 40),
        one_error(OSError, f"rank {writer}", file, "File too large"),
    ):
        fabric.save(path, {"model": model, "step": 2})
    if kind == "sharded":
        with one_error(ValueError, "args.path is a types.SimpleNamespace", "state_dict"):
            fabric.save(path, {"model": model, "args": {"path": SimpleNamespace()}})
    else:
        with one_error(RuntimeError, "rank 0", "AttributeError", "local object"):
            fabric.save(path, {"model": model, "step": lambda: None})
    with one_error(ValueError, "state['epoch'] is missing on rank 1 and a value on rank 0", "same keys"):
        fabric.save(path, {"model": model} | ({} if rank else {"epoch": 1}))
    with one_error(ValueError, "state['optimizer'] is a value on rank 1 and an optimizer on rank 0"):
        fabric.save(path, {"model": model, "optimizer": None if rank else optimizer})
    with one_error(ValueError, "rank 1: state['optimizer'] is", "that no model in the state has"):
        stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
        fabric.save(path, {"model": model, "optimizer": stranger if rank else optimizer})
    dist.barrier()
    assert os.listdir(tmp_path) == ["checkpoint"]
    state = {"model": model, "step": 0}
    fabric.load(path, state)
    assert state["step"] == 1
    assert all(torch.equal(full(p), old) for p, old in zip(model.parameters(), before, strict=True))


@multirank(2, timeout=TIMEOUT)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_only_checkpoints_are_replaced(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    """Each kind replaces the other kind, as Lightning's strategies do; folders of users stay."""
    from tests.integrations.fabrics import fabric_of, set_up

    fabric = fabric_of(state_dict_type=kind)
    model, _ = set_up(fabric)
    (tmp_path / "taken").mkdir(exist_ok=True)
    (tmp_path / "taken" / "notes").write_text("mine")
    dist.barrier()
    with one_error(OSError, "taken", "Choose another path"):
        fabric.save(tmp_path / "taken", {"model": model})
    assert (tmp_path / "taken" / "notes").read_text() == "mine"
    if kind == "sharded":
        on_first_rank(lambda: (tmp_path / "notes").write_text("mine"))
        with one_error(OSError, "notes is no checkpoint"):
            fabric.save(tmp_path / "notes", {"model": model})
        assert (tmp_path / "notes").read_text() == "mine"
    other = fabric_of(state_dict_type="full" if kind == "sharded" else "sharded")
    path = tmp_path / "checkpoint"
    for step, saver in enumerate((fabric, other, fabric)):
        saver.save(path, {"model": model, "step": step})
        assert path.is_dir() == (saver.strategy._state_dict_type == "sharded")
        state = {"model": model, "step": -1}
        fabric.load(path, state)
        assert state["step"] == step
    dist.barrier()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@multirank(2, timeout=TIMEOUT)
def test_a_replacement_that_a_crash_interrupted_is_found(rank: int, world_size: int, tmp_path: Path) -> None:
    """Where names cannot be exchanged, the old checkpoint has another name for a moment. Its leftovers disappear."""
    from tests.integrations.fabrics import fabric_of, set_up

    for kind in ("sharded", "full"):
        fabric = fabric_of(state_dict_type=kind)
        model, _ = set_up(fabric)
        folder = tmp_path / kind
        path, old, left = folder / "c", folder / ".c.old", folder / f".c.{'0a' * 8}.partial"
        fabric.save(path, {"model": model, "step": 1})

        def crash(path: Path = path, old: Path = old, left: Path = left) -> None:
            path.rename(old)
            left.mkdir()
            (left / "__0_0.distcp").touch()

        on_first_rank(crash)
        state = {"model": model, "step": 0}
        fabric.load(path, state)
        assert state["step"] == 1
        fabric.save(path, {"model": model, "step": 2})
        dist.barrier()
        assert os.listdir(folder) == ["c"]
