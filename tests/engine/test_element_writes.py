"""No Python number is assigned to an element of a tensor: on CUDA the host would wait, and no graph could be captured.

``tests/support/element_writes.py`` has the reason. Source code is searched, and steps are watched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from tests.engine.kit.models import Model, build, loss_of, tokens
from tests.support import multirank
from tests.support.element_writes import in_calls, in_source
from tests.support.stand_in import stand_in_device

PACKAGE = Path(sw.__file__).parent


def test_no_line_of_the_package_assigns_a_number_to_an_element() -> None:
    lines = [
        f"{path.relative_to(PACKAGE)}:{line}: {path.read_text().splitlines()[line - 1].strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"\][^=\n]{0,4}=", path.read_text())  # to parse all of them takes seconds
        for line in in_source(path.read_text())
    ]
    assert not lines, "\n".join(["write tensor[i].fill_(number), or annotate a list as such:", *lines])


SOURCES = {
    "mine[0] = 1": True,
    "mine[-1, 0] = True": True,
    "mine[i] = n": True,
    "mine[i] = -n * 2": True,
    "mine[i] += 1.5": True,
    "mine[i] = n = other": False,
    "self.row[i] = len(x)": True,
    "self.flags[:, [0, 2]] = 0": True,
    "flags[:, [i for i in x]] = 0": True,
    "a, mine[0] = 1, 2": False,  # not searched: nobody writes this
    "mine[:1] = 1": False,
    "mine[0, 1:] = 1": False,
    "mine[0].fill_(1)": False,
    "mine[0] = tensor": False,
    "sizes[0] = 1": False,
    "given[0] = 1": False,
    "table['key'] = 1": False,
    "array[0] = 1": False,
}


@pytest.mark.parametrize("line", SOURCES)
def test_lines_are_told_apart(line: str) -> None:
    source = f"""
import torch
import numpy as np
def function(mine: torch.Tensor, given: list[int], number: int, i: int):
    n = number
    sizes = [1, 2] + list(given)
    array = np.zeros(3)
    {line}
"""
    assert in_source(source) == ([8] if SOURCES[line] else [])
    assert in_source(source.replace("import torch", "")) == []


def test_calls_are_recorded(tmp_path: Path) -> None:
    def run(line: str, package: Path) -> list[str]:
        with in_calls(package) as seen:
            exec(
                compile(line, str(tmp_path / "code.py"), "exec"),
                {"t": torch.zeros(2, 3), "n": torch.ones(())},
            )
        return seen

    for line, found in {
        "t[0, 0] = 1": 1,
        "t[0, [1]] = 1": 1,
        "t[0] = 1": 0,
        "t[0, 0] = n": 0,
        "t[:1, 0] = 1": 0,
    }.items():
        assert len(run(line, tmp_path)) == found, line
    assert run("t[0, 0] = 1", tmp_path / "elsewhere") == []


Make = Callable[[Model], Any]


def adamw(model: Model) -> Any:
    return sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


SETTINGS: dict[str, tuple[dict[str, Any], Make]] = {
    "zero3": ({}, adamw),
    "bfloat16 in an arena": (
        {"mp_policy": sw.MixedPrecisionPolicy(torch.bfloat16), "memory": "arena"},
        adamw,
    ),
    "ragged": ({"layout": "ragged", "memory": "max_pool"}, adamw),
    "zero1": ({"strategy": "zero1"}, adamw),
    "zero2": ({"strategy": "zero2"}, adamw),
    "ddp": ({"strategy": "ddp"}, adamw),
    "offload": ({"offload_policy": sw.CPUOffloadPolicy()}, adamw),
    "offloaded state": ({"offload_policy": sw.Offload(parameters=False, gradients=False)}, adamw),
    "8 bit": ({}, lambda m: sw.fully_shard_optimizer(sw.optim.AdamW8bit(m.parameters(), lr=0.01))),
    "muon": ({}, lambda m: sw.fully_shard_optimizer(sw.optim.Muon(m.named_parameters(), lr=0.01))),
    "in backward": ({}, lambda m: sw.optim.in_backward(torch.optim.AdamW(m.parameters(), lr=0.01))),
}


@multirank(1, 2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_step_assigns_a_number_to_an_element(rank: int, world_size: int, setting: str) -> None:
    """Micro-batches and clipping, on what the engine takes for an accelerator."""
    options, make = SETTINGS[setting]
    root = {key: options[key] for key in ("memory",) if key in options}
    units = {key: value for key, value in options.items() if key not in root}
    with stand_in_device():
        model = build(layers=3)
        for block in model.blocks:
            sw.fully_shard(block, **units)
        sw.fully_shard(model, **units, **root)
        optimizer = make(model)
        for step in range(3):
            with in_calls(PACKAGE) as seen:
                for micro in range(2):
                    batch = tokens(step, micro, rank)
                    model.set_is_last_backward(setting != "in backward" or micro == 1)
                    loss_of(model(batch), batch).backward()
                if setting != "in backward":
                    sw.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            assert not seen, (step, seen)


class Doors(torch.nn.Module):
    """Uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.doors = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.doors[2](x)


@multirank(1, 2)
def test_unused_parameters_assign_none(rank: int, world_size: int) -> None:
    """The flags of unused parameters are set on the device. The gradients are those of the plain model."""
    plain = Doors()
    with stand_in_device():
        model = sw.fully_shard(Doors())
        for p in model.parameters():
            torch.nn.init.constant_(p, 0.5)
        for p in plain.parameters():
            torch.nn.init.constant_(p, 0.5)
        xs = [torch.full((2, 4), 1.0 + each) for each in range(world_size)]
        with in_calls(PACKAGE) as seen:
            model(xs[rank]).square().mean().backward()
        assert not seen, seen
        sum(plain(x).square().mean() / world_size for x in xs).backward()  # type: ignore[union-attr]
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)
