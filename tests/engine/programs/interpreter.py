"""Runs a program on the sharded model, with this rank's data, and on a plain model with every rank's.

Parameters, gradients, state dicts and outputs are compared after every instruction.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.engine import UNIT, reduce_held
from tests.engine.programs.compare import full
from tests.engine.programs.grammar import (
    ALIASES,
    EPILOGUE,
    WRITES,
    Copy,
    Edit,
    Evaluate,
    Fail,
    Forward,
    Freeze,
    Load,
    Program,
    Read,
    Setting,
    Transform,
    Uneven,
    Update,
    ZeroGrad,
)
from tests.engine.programs.model import Boom, Net, fsdp_modules
from tests.engine.programs.reference import Mismatch, Place
from tests.engine.programs.training import Training


class Interpreter(Training):
    def do_evaluate(self, evaluate: Evaluate) -> None:
        forward = evaluate.forward
        mode = torch.inference_mode if evaluate.inference else torch.no_grad
        for model, cast in ((self.reference.work(), self.reference.x), (self.model, lambda x: x)):
            model.eval()
            outputs = []
            for time_ in range(evaluate.times):
                with mode():
                    outputs += self.call(
                        model, forward, cast(Place(self.step, time_, self.rank).x()), self.rank
                    )[1]
            model.train()
            if model is not self.model:
                expected = outputs
        with torch.no_grad():
            self.expect([t.clone() for t in outputs], [t.clone() for t in expected], "evaluation")

    def write(self, name: str, how: str) -> None:
        """By position: right, or an error on every rank that changes nothing."""
        plain = self.reference.model.get_parameter(name)
        try:
            write_part(plain.detach().clone(memory_format=torch.preserve_format), how)
        except (IndexError, RuntimeError, ValueError):
            return  # nor can torch
        try:
            write_part(self.model.get_parameter(name), how)
        except (NotImplementedError, RuntimeError, TypeError):
            return
        write_part(plain, how)

    def is_tied(self, name: str) -> bool:
        return any(name in names for names in self.tied_names())

    def tied_names(self) -> list[list[str]]:
        """Names of one parameter each, where it has several."""
        names: dict[int, list[str]] = {}
        for name, p in self.reference.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        return [each for each in names.values() if len(each) > 1]

    def do_transform(self, transform: Transform) -> None:
        forward = replace(transform.forward, input_grad=False)
        if self.checkpoints(forward):
            return  # torch has no transforms of reentrant checkpointing
        work, expected = self.reference.work(), []
        try:
            for rank in range(self.world_size):
                x = self.reference.x(Place(self.step, 0, rank).x())
                expected.append(self.transformed(work, transform.how, forward, x, rank))
        except (RuntimeError, NotImplementedError):
            return  # torch cannot either, on some rank
        mine = self.transformed(
            self.model, transform.how, forward, Place(self.step, 0, self.rank).x(), self.rank
        )
        self.expect(mine, expected[self.rank], f"{transform.how} of torch.func", max(self.tolerance, 1e-4))

    def transformed(
        self, model: Net, how: str, forward: Forward, x: torch.Tensor, rank: int
    ) -> list[torch.Tensor]:
        def loss(t: torch.Tensor) -> torch.Tensor:
            return self.call(model, forward, t, rank)[0]

        rows = torch.stack([x, 2 * x])
        try:
            if how == "grad":
                return [torch.func.grad(loss)(x)]
            if how == "jvp":
                return list(torch.func.jvp(loss, (x,), (torch.ones_like(x),)))
            function = torch.func.grad(loss) if how == "grad of rows" else loss
            return [torch.func.vmap(function, randomness="same")(rows)]
        finally:
            for layer in model.every_layer():
                layer.loss = None  # a value of the transform, of which nothing is left

    def do_uneven(self, uneven: Uneven) -> None:
        if not self.sharded or max(self.spec.sharding.shape(self.world_size)) < self.world_size:
            return  # on two axes the ranks of a group raise, and other groups wait for them
        self.clear("model")
        trained = [q for q in self.reference.parameters if q.requires_grad]
        if not any(q is p for q in trained for p in self.reference.model.head.parameters()):
            return  # a backward that reaches nothing, or perhaps nothing

        def train(number: int) -> None:
            x = Place(self.step, number, self.rank).x()
            self.call(self.model, Forward(), x, self.rank)[0].backward()

        train(0)
        if self.rank != uneven.rank % self.world_size:
            self.optimizer.step()
        try:
            train(1)
            self.wrong.append("ranks with different numbers of steps went on")
        except RuntimeError as error:
            if "diverged" not in str(error) or str(error).count("rank") < 2:
                raise
        self.model.load_state_dict(self.reference.model.state_dict())
        self.start_again()

    def do_read(self, reading: Read) -> None:
        number = reading.which % len(self.reference.parameters)
        found = []
        for model in (self.reference.model, self.model):
            p = list(model.parameters())[number]
            tensor = p.grad if reading.gradient and self.reference.parameters[number].grad is not None else p
            assert tensor is not None
            found.append(torch.tensor(read(tensor, reading.how), dtype=torch.float64))
        self.expect([found[1]], [found[0]], f"{reading.how} of parameter {number}", max(self.tolerance, 1e-4))

    def do_freeze(self, freeze: Freeze) -> None:
        def apply(model: Net) -> None:
            if freeze.block:
                for i in freeze.which:
                    model.blocks[i % len(model.blocks)].requires_grad_(freeze.requires_grad)
                return
            parameters = list(model.parameters())
            for i in freeze.which:
                parameters[i % len(parameters)].requires_grad_(freeze.requires_grad)

        self.both(apply)

    def do_edit(self, edit: Edit) -> None:
        names = [n for n, _ in self.reference.model.named_parameters()]
        name = names[edit.which % len(names)]
        if edit.how in ("parameter", "half and back", "to_empty", *ALIASES):
            if edit.how in ALIASES and self.is_tied(name):
                return  # torch's parameter shares memory with the tied one then, and is another
            self.clear("model")
            self.both(lambda model: edit_structure(model, name, edit.how))
            self.start_again()
            return

        if edit.how in WRITES:
            self.write(name, edit.how)
            return

        def apply(model: Net) -> None:
            p = model.get_parameter(name)
            with torch.no_grad():
                if edit.how == "in place":
                    p.mul_(0.9)
                elif edit.how == "copy":
                    p.copy_(p * 0.5)
                elif edit.how == ".data in place":
                    p.data.mul_(0.9)
                elif edit.how == ".data set":
                    p.data = p.data * 0.9
                elif edit.how == ".data whole":
                    p.data = fresh(p)

        self.both(apply)

    def do_fail(self, failure: Fail) -> None:
        forward = Forward(failure.forward.calls, 0, failure.forward.input_grad)
        raised = []
        for model, cast in ((self.reference.work(), self.reference.x), (self.model, lambda x: x)):
            block = model.blocks[failure.block % len(model.blocks)]
            block.bomb = {"evaluation": "forward", "recomputation": ""}.get(failure.where, failure.where)
            try:
                if failure.where == "evaluation":
                    with torch.no_grad():
                        self.call(model, forward, cast(Place(self.step, 0, self.rank).x()), self.rank)
                else:
                    loss, _ = self.call(model, forward, cast(Place(self.step, 0, self.rank).x()), self.rank)
                    if failure.where == "recomputation":
                        block.bomb = "forward"
                    if loss.requires_grad:
                        loss.backward()
                raised.append(False)
            except Boom:
                raised.append(True)
            block.bomb = ""
        self.expect([torch.tensor(float(raised[1]))], [torch.tensor(float(raised[0]))], "whether it failed")
        if failure.where in ("forward", "evaluation") and all(raised):
            return  # nothing to clear, as in plain torch
        self.clear("model")

    def do_zerograd(self, zero: ZeroGrad) -> None:
        self.clear(zero.how, zero.set_to_none)

    def do_update(self, update: Update) -> None:
        held = bool(self.reference.held)
        self.reference.take_held()
        if held and self.spec.zeros and self.sharded:
            # The reduction of what was held gives zeros to unused parameters. So the optimizer steps them, too.
            reduce_held(list(self.model.parameters()))
            self.compare("the reduction of held gradients")
        if update.clip:
            mine = sw.clip_grad_norm_(self.model.parameters(), 0.5)
            theirs = torch.nn.utils.clip_grad_norm_(self.reference.model.parameters(), 0.5)
            self.expect([full(mine)], [theirs], "norm", self.tolerance)
        step = self.optimizer.step
        if update.compiled:
            torch._dynamo.reset()
            # What edits the weights is one graph, without kernels.
            step = torch.compile(step, backend="eager")
        step()
        self.expected.step()
        if update.zero != "no":
            self.clear(update.zero)

    def do_load(self, load: Load) -> None:
        generator = torch.Generator().manual_seed(load.seed)
        values = {
            name: (torch.randn(value.shape, generator=generator) / 3).to(value.dtype)
            for name, value in self.reference.model.state_dict().items()
        }
        tied = self.tied_names() if load.how == "assign" else []
        for first, *others in tied:  # different values for one parameter are refused
            values.update({name: values[first].clone() for name in others})
        if load.how == "part":
            values = {name: v for i, (name, v) in enumerate(values.items()) if i % 2 == load.seed % 2}
        if load.how == "assign own":
            self.clear("model")
            if any(self.is_tied(name) for name, _ in self.reference.model.named_parameters()):
                return  # torch unties them
            self.both(lambda m: m.load_state_dict(m.state_dict(), assign=True))
            self.start_again()
        elif load.how == "own":
            self.both(lambda m: m.load_state_dict({k: v.clone() * 0.9 for k, v in m.state_dict().items()}))
        else:
            self.both(
                lambda m: m.load_state_dict(values, strict=load.how != "part", assign=load.how == "assign")
            )
        if load.how == "assign":
            for model in (self.reference.model, *(() if self.sharded else (self.model,))):
                tie_again(model, tied)  # torch unties them
            self.start_again()

    def do_copy(self, instruction: Copy) -> None:
        self.clear(
            "model"
        )  # a plain parameter's copy has no gradient; what a sharded one's has is its own affair
        for model in (self.model, self.reference.model):
            for layer in model.every_layer():
                layer.loss = None  # torch copies no tensor that has a graph
        twin = copy.deepcopy(self.model)
        if instruction.go_on_with_copy:
            twin, self.model = self.model, twin
            self.reference.model = copy.deepcopy(self.reference.model)
            self.start_again()
        loss, _ = self.call(twin, Forward(), Place(self.step, 0, self.rank).x(), self.rank)
        if loss.requires_grad:
            loss.backward()
        with torch.no_grad():
            for p in twin.parameters():
                p.fill_(float("nan"))

    def do_setting(self, setting: Setting) -> None:
        module: Any = self.model
        if setting.block >= 0:
            module = self.model.blocks[setting.block % len(self.model.blocks)]
        if not isinstance(module, sw.FSDPModule):
            return
        if setting.what == "unshard":
            module.unshard()
            module.reshard()
        elif setting.what == "two buffers":
            module.set_reduce_scatter_max_input_buffers(2)
        elif setting.what.endswith("group"):
            if not self.reference.held:
                module.set_separate_reduce_scatter_group(setting.what.startswith("separate"))
        elif setting.what.endswith("backward"):
            module.set_reshard_after_backward(setting.what.startswith("reshard"))
        else:
            for each in fsdp_modules(module):
                stages = getattr(each, UNIT).ranks.strategy.stages
                if setting.what.startswith("reshard"):
                    legal = 3 in stages or not any(stages)
                else:  # pools are refused if all units keep their parameters
                    legal = self.spec.memory != "max_pool"
                if legal:
                    each.set_reshard_after_forward(setting.what.startswith("reshard"), recurse=False)


def fresh(like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, the same on every rank, of a size that keeps layers well-conditioned."""
    generator = torch.Generator().manual_seed(like.numel())
    return (torch.randn(like.shape, generator=generator) / 3).to(like.dtype)


def tie_again(model: Net, tied: list[list[str]]) -> None:
    for first, *others in tied:
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, model.get_parameter(first))


def edit_structure(model: Net, name: str, how: str) -> None:
    if how == "half and back":
        model.half()
        model.float()
    elif how == "to_empty":
        state = {k: fresh(v) for k, v in model.state_dict().items()}
        model.to_empty(device="cpu")
        model.load_state_dict(state)
    else:
        owner, _, last = name.rpartition(".")
        module, old = model.get_submodule(owner), model.get_parameter(name)
        value = {
            "parameter": fresh,
            "parameter of .data": lambda p: p.data,
            "parameter of detach": lambda p: p.detach(),
            "parameter of state dict": lambda p: model.state_dict()[name],
            "parameter of parameter": lambda p: p,
        }[how](old)
        setattr(module, last, nn.Parameter(value, requires_grad=old.requires_grad))


@torch.no_grad()
def write_part(p: torch.Tensor, how: str) -> None:
    if how == "a row":
        p.data[0].mul_(0.9)
    elif how == "rows":
        p.data[1:3].fill_(0.25)
    elif how == "every second":
        p.data.view(-1)[::2].mul_(0.9)
    elif how == "item":
        p[0:1] = 0.5
    elif how == "index_fill":
        p.index_fill_(0, torch.tensor([0]), 0.3)
    else:
        torch.manual_seed(3)
        nn.init.orthogonal_(p)


@torch.no_grad()
def read(tensor: torch.Tensor, how: str) -> Any:
    if how == "norm":
        return tensor.norm().item()
    if how == "sum":
        return float(tensor.float().abs().sum())
    if how == "mean":
        return tensor.float().square().mean().item()
    if how == "bool":
        return float(bool((tensor.abs() < 1e6).all()))
    if how == "list":
        return tensor.double().square().sum().tolist()
    return float(tensor.abs().max())


def run_program(rank: int, world_size: int, program: Program, sharded: bool = True) -> str | None:
    """The failure, the same on every rank, or None. Other exceptions are the engine's (or the program's)."""
    if sharded:  # in a worker, where the environment is restored
        os.environ["SHARDWRIGHT_POISON"] = "1"
    try:
        Interpreter(program, rank, world_size, sharded).run((*program.steps, *EPILOGUE))
    except Mismatch as mismatch:
        return str(mismatch)
    return None
