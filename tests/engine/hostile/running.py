"""Trains the model of a program beside a plain one, and judges it. The plain model sees the data of every rank.

Ranks tell each other how a step ended through the store of their process group, never by a collective: so a rank that
was left alone in one is found.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.engine.hostile.grammar import INTERRUPTED, SAVED, STEPS, Program
from tests.engine.hostile.model import DIM, Net, Store, build, shard
from tests.engine.kit.interrupts import Interrupt, interrupted_at
from tests.engine.kit.meetings import fresh_meetings
from tests.engine.programs.compare import differences, full, too_far, whole

SOURCE = str(Path(sw.__file__).parent)
PATIENCE = timedelta(seconds=30)  #: how long a rank waits for the end of the others' step
LOOK = timedelta(seconds=1)  #: how long an interrupted rank looks whether the others have made the step

EQUAL, REFUSED, AS_PLAIN = "equal", "refused", "plain refuses, too"
WRONG, CRASH, HANG, UNEVEN = "WRONG", "CRASH", "HANG", "UNEVEN"


class Bad(Exception):
    """The verdict of a program that is neither equal nor refused: its kind and what happened."""


class Hang(Exception):
    pass


@dataclass(frozen=True)
class Ending:
    """How a step of this rank ended."""

    kind: str  #: "done", "lost": interrupted on the way out; "error"
    text: str = ""
    clear: bool = True  #: whether the library raised it on purpose
    trace: str = ""


def ending_of(error: BaseException) -> Ending:
    trace = traceback.extract_tb(error.__traceback__)
    last = trace[-1] if trace else None
    text = f"{type(error).__name__}: {error}"
    ours = last is not None and last.filename.startswith(SOURCE) and "raise" in (last.line or "raise")
    explained = "(torch: " in text
    names = re.search(r"unit|[Pp]arameter|rank|optimizer|[a-z]+_[a-z_]+|gradient", text) is not None
    bug = "please report" in text or isinstance(
        error, AssertionError | AttributeError | KeyError | IndexError
    )
    shown = "".join(traceback.format_exception(error)[-12:])
    return Ending("error", text, (ours or explained) and names and not bug, shown)


class Side:
    """One of the two models, with what a user holds of it."""

    def __init__(self, program: Program, sharded: bool, world_size: int) -> None:
        self.program, self.sharded = program, sharded
        self.net = build(program)
        self.find: Callable[[], list[torch.Tensor]] = list
        if program.captured_before:
            self.capture()
        if sharded:
            shard(self.net, program)
        if not program.captured_before:
            self.capture()
        self.hostile = True
        self.handles: list[Any] = []
        self.means: list[torch.Tensor] = []
        self.stores = [Store() for _ in range(world_size)]
        self.before: list[list[torch.Tensor]] = [[] for _ in range(world_size)]  #: kept in the last step
        self.make_optimizer()
        self.hook_gradients()
        if program.capture != "no" and program.captured_use == "forward" and self.matrix() is not None:
            self.net.trunk[0].extra = lambda y: nn.functional.linear(y, self.matrix())  # type: ignore[assignment,arg-type]

    def capture(self) -> None:
        net, capture = self.net, self.program.capture
        if capture == "parameters":
            those = list(net.parameters())
            self.find = lambda: those
        elif capture == "ids":
            ids = {id(p) for p in net.parameters()}
            self.find = lambda: [p for p in net.parameters() if id(p) in ids]
        elif capture == "detached":
            detached = [p.detach() for p in net.parameters()]
            self.find = lambda: detached
        elif capture == "view":
            views: list[torch.Tensor] = [p.view(p.shape) for p in net.parameters()]
            self.find = lambda: views

    def matrix(self) -> torch.Tensor | None:
        """A captured square weight of another unit."""
        those = self.find()
        return next((t for t in reversed(those) if t.shape == (DIM, DIM)), None) if len(those) > 2 else None

    def make_optimizer(self) -> None:
        program = self.program
        parameters: Any = self.net.parameters()
        if program.capture in ("parameters", "ids") and program.captured_use == "another optimizer":
            parameters = self.find()
        if program.optimizer == "sgd":
            self.optimizer: Any = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=0.02, eps=1e-2, weight_decay=0.5)
        if self.sharded and program.wrapped == "wrapped":
            self.optimizer = sw.fully_shard_optimizer(self.optimizer)
        elif self.sharded and program.wrapped == "in backward":
            self.optimizer = sw.optim.in_backward(self.optimizer)

    def renew_optimizer(self) -> None:
        if hasattr(self.optimizer, "leave_backward"):
            self.optimizer.leave_backward()
        self.make_optimizer()

    def hook_gradients(self) -> None:
        how = self.program.gradients
        for i, p in enumerate(self.net.parameters()):
            if how == "hook scales":
                self.handles.append(p.register_hook(lambda g: g * 0.5) if p.requires_grad else None)
            elif how == "hook masks":
                mask = (torch.arange(p.numel()).view(p.shape) % 2 + i % 2).to(p.dtype)
                self.handles.append(p.register_hook(lambda g, m=mask: g * m) if p.requires_grad else None)
            elif how == "hook after" and self.sharded and p.requires_grad:
                self.handles.append(p.register_post_accumulate_grad_hook(halve))

    def calm_down(self) -> None:
        """Leave out everything hostile from now on."""
        self.hostile = False
        for handle in self.handles:
            if handle is not None:
                handle.remove()
        for block in self.net.trunk:
            block.extra = None  # type: ignore[assignment]
        for store in self.stores:
            store.clear()

    # -- one step ----------------------------------------------------------------------------------------------------

    def batch(self, step: int, micro: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
        return torch.randn(4, DIM, generator=generator)

    def train_micro(self, step: int, micro: int, rank: int, place: int) -> list[torch.Tensor]:
        """Run a rank's batch; ``place``: of its store. Returns the loss and the input's gradient."""
        read = self.program.read if self.hostile else "no"
        store = self.stores[place]
        store.clear()
        for block in self.net.trunk:
            block.last = None
        self.net.use(store)
        x = self.batch(step, micro, rank).requires_grad_()
        result, output = self.net(x, step)
        loss = result.float().square().mean()
        extra: Any = sum((t.float().square().mean() for t in self.net.hidden()), torch.zeros(()))
        if self.hostile and self.program.capture != "no" and self.program.captured_use.startswith("penalty"):
            those = [t for t in self.find() if t.requires_grad]
            those = those[:1] if self.program.captured_use.endswith("one") else those
            loss = loss + 0.1 * sum((t**2).sum() for t in those)  # type: ignore[arg-type]
        if read.startswith("next step"):
            for old in self.before[place]:
                loss = loss + (old.detach() if read.endswith("detached") else old).float().square().mean()
        gradient = self.backward(read, loss, extra, x, output)
        return [
            loss.detach().double().clone(),
            torch.zeros(()) if gradient is None else gradient.detach().clone(),
        ]

    def backward(
        self, read: str, loss: torch.Tensor, extra: torch.Tensor, x: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor | None:
        if not extra.requires_grad and read != "twice":
            read = "no"
        if read == "together":
            (loss + extra).backward()
        elif read == "later":
            loss.backward(retain_graph=True)
            extra.backward()
        elif read == "before":
            extra.backward(retain_graph=True)
            loss.backward()
        elif read == "alone":
            return torch.autograd.grad(extra, x)[0]
        elif read == "twice":
            loss.backward(retain_graph=True)
            loss.backward()
        elif read == "inside":

            def start(gradient: torch.Tensor) -> None:
                handle.remove()
                extra.backward(retain_graph=True)

            handle = output.register_hook(start)
            loss.backward()
        elif read == "after gradient":

            def begin(gradient: torch.Tensor) -> None:
                held.remove()
                extra.backward(retain_graph=True)

            held = x.register_hook(begin)
            loss.backward(retain_graph=True)
        else:
            loss.backward()
        return x.grad

    def keep(self) -> None:
        """The step is over: what it kept is what the next one may read."""
        for place, store in enumerate(self.stores):
            self.before[place] = [t for t in store.all() if isinstance(t, torch.Tensor)]

    def edit_gradients(self) -> None:
        if not self.hostile:
            return
        how, program = self.program.gradients, self.program
        those = [p for p in self.net.parameters() if p.grad is not None]
        in_backward = program.wrapped == "in backward"
        if how == "clip":
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)
        elif how == "clip of the library":
            clip_of(self.sharded)(self.net.parameters(), 0.05)
        elif not in_backward:
            for i, p in enumerate(those):
                edit_gradient(p, how, i)
        if program.capture == "no":
            return
        use, captured = program.captured_use, self.find()
        if use == "clip":
            nn.utils.clip_grad_norm_(captured, 0.05)
        elif use == "clip of the library":
            clip_of(self.sharded)(captured, 0.05)
        elif use == "drop gradients" and not in_backward:
            for t in captured[:3]:
                t.grad = None
        elif use == "read gradients" and not in_backward:
            # A number of it, on every rank.
            self.means += [t.grad.norm().detach() for t in captured[:2] if t.is_leaf and t.grad is not None]

    @torch.no_grad()
    def edit_weights(self, step: int) -> None:
        if not self.hostile or self.program.capture == "no":
            return
        use, captured = self.program.captured_use, self.find()
        if use == "decay":
            for t in captured:
                t.mul_(0.95)
        elif use == "data decay":
            for t in captured:
                t.data.mul_(0.95)
        elif use == "copy":
            for t in captured:
                t.copy_(t * 0.9)
        elif use == "set data" and step == 1:
            for t in captured:
                t.data = t.data * 0.5
        elif use == "average":
            if not self.means:
                self.means = [t.detach().clone() for t in captured]
            for mean, t in zip(self.means, captured, strict=True):
                mean.lerp_(t, 0.25)
        elif use == "freeze" and step == 1:
            for t in captured:
                t.requires_grad_(t.ndim == 1)


def clip_of(sharded: bool) -> Callable[..., Any]:
    return sw.clip_grad_norm_ if sharded else nn.utils.clip_grad_norm_


def halve(p: torch.Tensor) -> None:
    p.grad.mul_(0.5)  # type: ignore[union-attr]


def edit_gradient(p: torch.Tensor, how: str, number: int) -> None:
    gradient = p.grad
    assert gradient is not None
    with torch.no_grad():
        if how == "in place":
            gradient.mul_(0.5)
        elif how == "halved":
            p.grad = gradient * 0.5
        elif how == "tril" and gradient.ndim == 2:
            p.grad = gradient.tril()
        elif how == "flip" and gradient.ndim:
            p.grad = gradient.flip(0)
        elif how == "whole":
            p.grad = full(gradient) * 0.5
        elif how == "none of some" and number % 2:
            p.grad = None
        elif how == "zeros":
            p.grad = torch.zeros_like(p)
        elif how == "data":
            gradient.data.mul_(0.5)


# -- a program -------------------------------------------------------------------------------------------------------


class Run:
    def __init__(self, program: Program, rank: int, world_size: int, nonce: str) -> None:
        self.program, self.rank, self.world_size = program, rank, world_size
        self.store = dist.PrefixStore(f"hostile/{nonce}", dist.distributed_c10d._get_default_store())
        self.phase = 0
        self.story: list[str] = []  #: what this rank has met
        self.plain = Side(program, False, world_size)
        self.lines = 0  #: of the step before the interrupted one
        self.interrupted = False

    @property
    def tolerance(self) -> float:
        """Return a tolerance for sums in float32, which have other orders here and there, over a few steps."""
        return 2e-4

    # -- ranks tell each other how it ended ------------------------------------------------------------------------

    def meet(self, ending: Ending) -> list[Ending]:
        """Tell the others how this phase ended here, and wait for theirs."""
        self.phase += 1
        self.story.append(f"phase {self.phase}: {ending.kind} {ending.text[:300]}")
        self.store.set(f"{self.phase}/{self.rank}", repr((ending.kind, ending.text, ending.clear)))
        keys = [f"{self.phase}/{r}" for r in range(self.world_size)]
        try:
            self.store.wait(keys, PATIENCE)
        except (dist.DistStoreError, RuntimeError):
            there = [r for r, key in enumerate(keys) if self.store.check([key])]
            raise Bad(
                HANG, f"phase {self.phase}: only ranks {there} came out; this one with {ending}"
            ) from None
        return [Ending(*eval(self.store.get(key))) for key in keys]

    def judge(self, endings: list[Ending], what: str) -> bool:
        """Whether the step was refused, as it should be, on every rank. Raises what is bad."""
        errors = [e for e in endings if e.kind == "error"]
        if not errors:
            return False
        texts = "\n".join(f"  rank {r}: {e.kind} {e.text[:600]}" for r, e in enumerate(endings))
        if not all(e.clear for e in errors):
            raise Bad(CRASH, f"{what}:\n{texts}")
        if len(errors) < len(endings):
            raise Bad(UNEVEN, f"{what}:\n{texts}")
        self.refusals.append(endings[0].text)
        return True

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self) -> tuple[str, str]:
        self.refusals: list[str] = []
        mine = Ending("done")
        try:
            self.sharded = Side(self.program, True, self.world_size)
        except Exception as error:
            mine = ending_of(error)
        if self.judge(self.meet(mine), "building" + "\n" + mine.trace):
            return REFUSED, self.refusals[0]
        plain_refuses = ""
        for step in range(STEPS):
            went_on, why = self.step(step)
            plain_refuses = plain_refuses or why
            if not went_on:
                self.start_again()
                self.step(7)
                self.step(8)
                break
        if plain_refuses:
            return AS_PLAIN, plain_refuses
        return (REFUSED, self.refusals[0]) if self.refusals else (EQUAL, "")

    def start_again(self) -> None:
        """Load the plain model's weights, and go on without anything hostile: both must be equal again."""
        mine = Ending("done")
        try:
            for side in (self.plain, self.sharded):
                side.calm_down()
                for p in side.net.parameters():
                    p.grad = None
                side.net.zero_grad()
            for p, q in zip(self.sharded.net.parameters(), self.plain.net.parameters(), strict=True):
                p.requires_grad_(q.requires_grad)
            self.sharded.net.load_state_dict(self.plain.net.state_dict())
            self.plain.renew_optimizer()
            self.sharded.renew_optimizer()
        except Exception as error:
            mine = ending_of(error)
        endings = self.meet(mine)
        if any(e.kind == "error" for e in endings):
            raise Bad(CRASH, f"loading after {self.refusals}: {endings}\n{mine.trace}")

    def step(self, step: int) -> tuple[bool, str]:
        """One step of both. Returns whether training goes on as before, and why plain torch refused, if it did."""
        program = self.program
        micros = 1 if program.micros == "one" else 2
        if step == SAVED and program.save != "no" and self.sharded.hostile:
            self.save_and_load()
        before = [p.detach().clone() for p in self.plain.net.parameters()]
        try:
            expected, gradients = self.plain_step(step, micros)
        except RuntimeError as error:
            return self.plain_refuses(step, micros, error)
        found: list[Any] = []
        where = self.forward_and_backward(step, micros, found)
        if self.judge(where, f"step {step}" + self.trace):
            return False, ""
        in_backward = program.wrapped == "in backward"
        if in_backward and self.is_disturbed(step):
            return False, ""  # backward has stepped some units before it failed, as docs/optimizers.md says
        wrong: list[str] = []
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            what = ("loss", "gradient of the input")[i % 2]
            if a.shape != b.shape:
                wrong.append(f"{what} {i // 2}: shape {tuple(a.shape)}, expected {tuple(b.shape)}")
            else:
                wrong += too_far(f"{what} {i // 2}", a.double(), b, 1e-2 if i % 2 else 1.0, self.tolerance)
        self.give(gradients)
        if in_backward:
            for p in self.sharded.net.parameters():
                p.grad = None
        endings = self.edit(self.sharded.edit_gradients)
        self.plain.edit_gradients()
        if self.judge(endings, f"edits of gradients in step {step}" + self.trace):
            return False, ""
        if not in_backward:  # there the weights have been stepped
            self.compare(f"gradients of step {step}", wrong)
            wrong = []
        interrupted = self.optimizer_step(step)
        if interrupted is None:
            return False, ""
        self.plain.optimizer.step()
        self.sharded.keep(), self.plain.keep()
        for side in (self.sharded, self.plain):
            side.net.zero_grad()
            side.optimizer.zero_grad()
        if interrupted:
            return self.after_interrupted_step(before)
        endings = self.edit(lambda: self.sharded.edit_weights(step))
        self.plain.edit_weights(step)
        if self.judge(endings, f"edits of weights in step {step}" + self.trace):
            return False, ""
        self.compare(f"weights of step {step}", wrong)
        return True, ""

    def plain_step(self, step: int, micros: int) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The losses of this rank, and the gradients of all ranks' data."""
        side, found = self.plain, []
        parameters = list(side.net.parameters())
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for micro in range(micros):
            mean: list[torch.Tensor | None] = [None] * len(parameters)
            for rank in range(self.world_size):
                for p in parameters:
                    p.grad = None
                values = side.train_micro(step, micro, rank, rank)
                if rank == self.rank:
                    found += values
                for i, p in enumerate(parameters):
                    if p.grad is not None:
                        part = p.grad / self.world_size
                        mean[i] = part if mean[i] is None else mean[i] + part
            sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, mean, strict=True)]
            if self.program.gradients == "hook after" and side.hostile:
                # The hook sees the sum of what has been reduced so far.
                held = self.program.micros == "two, held" and micro == 0
                sums = [t if t is None or held else t * 0.5 for t in sums]
        for p in parameters:
            p.grad = None
        return found, sums

    def give(self, gradients: list[torch.Tensor | None]) -> None:
        for p, gradient in zip(self.plain.net.parameters(), gradients, strict=True):
            p.grad = gradient

    def edit(self, function: Callable[[], Any]) -> list[Ending]:
        mine, self.trace = Ending("done"), ""
        try:
            function()
        except Exception as error:
            mine = ending_of(error)
            self.trace = "\n" + mine.trace
        return self.meet(mine)

    def compare(self, what: str, wrong: list[str]) -> None:
        mine, theirs = self.sharded.means, self.plain.means
        if self.sharded.hostile and len(mine) != len(theirs):
            wrong.append(f"{len(mine)} captured values, expected {len(theirs)}")
        elif self.sharded.hostile:
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                wrong += too_far(f"captured {i}", full(a).double(), b, 1.0, self.tolerance)
        found = differences(self.sharded.net, self.plain.net, self.tolerance, wrong)
        if found:
            raise Bad(WRONG, f"{what}: " + "; ".join(found[:8]))

    # -- forward and backward --------------------------------------------------------------------------------------

    def attempt(self, step: int, micros: int, found: list[Any]) -> None:
        side, net = self.sharded, self.sharded.net
        found.clear()
        how = self.program.micros
        for micro in range(micros):
            last = micro == micros - 1
            if how == "two, held":
                net.set_requires_gradient_sync(last)  # type: ignore[operator]
            elif how == "two, late":
                net.set_is_last_backward(last)  # type: ignore[operator]
            found += side.train_micro(step, micro, self.rank, 0)

    def forward_and_backward(self, step: int, micros: int, found: list[Any]) -> list[Ending]:
        """An attempt, and after an interrupt others, as a loop makes that catches it."""
        program, self.trace = self.program, ""
        wanted = self.is_disturbed(step)
        mine = program.all_ranks or self.rank == self.world_size - 1
        armed, disturbed = wanted and mine, wanted
        for _ in range(6):
            ending = Ending("done")
            try:
                with self.interrupting(armed, step):
                    self.attempt(step, micros, found)
            except Interrupt as error:
                self.note(error)
                ending = Ending("lost" if self.others_are_done() else "retry", str(error))
            except Exception as error:
                ending = ending_of(error)
                self.trace = "\n" + ending.trace
                if disturbed and "diverged" in str(error) and "Load a state dict" not in str(error):
                    ending = Ending("retry", str(error))
            armed = False
            self.story.append(f"step {step}: {ending.kind} {ending.text[:300]}")
            if ending.kind == "retry":
                self.sharded.net.zero_grad()
                continue
            if disturbed:
                self.store.set(f"done/{self.phase}/{self.rank}", "")
            endings = self.meet(ending)
            if all(e.kind in ("done", "lost") for e in endings) and any(e.kind == "lost" for e in endings):
                if program.wrapped == "in backward":
                    return [Ending("error", "interrupted after it stepped")] * self.world_size
                self.sharded.net.zero_grad()
                continue
            return endings
        return self.meet(Ending("error", "it fails again and again", clear=False))

    def is_disturbed(self, step: int) -> bool:
        kinds = ("forward and backward", "boom in forward", "boom in backward")
        return self.program.interrupt in kinds and step == INTERRUPTED and self.sharded.hostile

    def others_are_done(self) -> bool:
        keys = [f"done/{self.phase}/{r}" for r in range(self.world_size) if r != self.rank]
        try:
            self.store.wait(keys[:1], LOOK)
        except (dist.DistStoreError, RuntimeError):
            return False
        return True

    def note(self, error: BaseException) -> None:
        self.interrupted = True
        self.where = str(error)

    @contextmanager
    def interrupting(self, armed: bool, step: int) -> Iterator[None]:
        program = self.program
        if program.interrupt == "forward and backward" and step == INTERRUPTED - 1 and self.sharded.hostile:
            with interrupted_at(0, program.part) as lines:
                yield
            self.lines = lines[0]
        elif armed and program.interrupt == "forward and backward":
            with interrupted_at(max(1, round(program.line * self.lines)), program.part):
                yield
        elif armed:
            with boom(self.sharded.net, program):
                yield
        else:
            yield

    # -- the optimizer's step --------------------------------------------------------------------------------------

    def optimizer_step(self, step: int) -> bool | None:
        """Returns whether some rank was interrupted in it; None: it was refused."""
        program, self.trace = self.program, ""
        wanted = program.interrupt.startswith("optimizer") and self.sharded.hostile
        mine = program.all_ranks or self.rank == self.world_size - 1
        kind, ending = "done", Ending("done")
        try:
            if wanted and step == INTERRUPTED - 1:
                with interrupted_at(0, program.part) as lines:
                    self.sharded.optimizer.step()
                self.lines = lines[0]
            elif wanted and step == INTERRUPTED and mine:
                try:
                    with interrupted_at(max(1, round(program.line * self.lines)), program.part):
                        self.sharded.optimizer.step()
                except Interrupt as error:
                    self.note(error)
                    kind = "interrupted"
                    if program.interrupt.endswith("retried"):
                        self.sharded.optimizer.step()
                ending = Ending(kind)
            else:
                self.sharded.optimizer.step()
        except Exception as error:
            ending = ending_of(error)
            self.trace = "\n" + ending.trace
        endings = self.meet(ending)
        if (
            wanted
            and step == INTERRUPTED
            and ending.kind != "done"
            and any(e.kind == "error" for e in endings)
        ):
            # A step has no meetings: a rank alone may be refused, and the others hear of it in their next forward.
            endings = [e if e.kind == "error" else replace(endings[self.rank], kind="error") for e in endings]
        if wanted and step == INTERRUPTED and any(e.kind == "error" for e in endings):
            bad = [e for e in endings if e.kind == "error" and not e.clear]
            if bad:
                raise Bad(CRASH, f"optimizer's step: {endings}{self.trace}")
            self.refusals.append(next(e.text for e in endings if e.kind == "error"))
            return None
        if self.judge(endings, f"optimizer's step {step}" + self.trace):
            return None
        return any(e.kind == "interrupted" for e in endings)

    def after_interrupted_step(self, before: list[torch.Tensor]) -> tuple[bool, str]:
        """The next forward is refused, or the weights are those before the step or after it, on every rank."""
        after = [p.detach().clone() for p in self.plain.net.parameters()]
        for side in (self.plain, self.sharded):
            side.calm_down()
        mine, self.trace = Ending("done"), ""
        found: list[Any] = []
        try:
            self.attempt(6, 1, found)
        except Exception as error:
            mine = ending_of(error)
            self.trace = "\n" + mine.trace
        endings = self.meet(mine)
        if self.judge(
            endings, f"the forward after an interrupted optimizer step ({self.where_of()}){self.trace}"
        ):
            return False, ""
        for p in self.sharded.net.parameters():
            p.grad = None
        if self.program.wrapped == "in backward":
            return False, ""  # this backward has stepped them
        values, _, _ = whole(self.sharded.net)
        for which in (after, before):
            if not any(too_far("", v, w, 1.0, self.tolerance) for v, w in zip(values, which, strict=True)):
                with torch.no_grad():
                    for p, w in zip(self.plain.net.parameters(), which, strict=True):
                        p.copy_(w)
                return False, ""
        far = [
            t
            for v, w in zip(values, after, strict=True)
            for t in too_far("weight", v, w, 1.0, self.tolerance)
        ]
        raise Bad(
            WRONG,
            f"after an interrupted optimizer step ({self.where_of()}) weights are partly changed: {far[:5]}",
        )

    def where_of(self) -> str:
        return getattr(self, "where", "another rank")

    # -- other things ----------------------------------------------------------------------------------------------

    def plain_refuses(self, step: int, micros: int, error: Exception) -> tuple[bool, str]:
        mine, self.trace = Ending("done"), ""
        try:
            self.attempt(step, micros, [])
        except Exception as raised:
            mine = ending_of(raised)
            same = type(raised) is type(error) and alike(str(error), str(raised))
            mine = replace(mine, clear=mine.clear or same)
            self.trace = "\n" + mine.trace
        endings = self.meet(mine)
        if any(e.kind == "error" for e in endings):
            self.judge(endings, f"step {step}, in which torch raises {error}" + self.trace)
        return False, str(error).splitlines()[0]

    def save_and_load(self) -> None:
        how, side = self.program.save, self.sharded

        def work() -> None:
            if how == "state dict":
                state = side.net.state_dict()
                side.net.load_state_dict({k: v.clone() for k, v in state.items()})
                side.optimizer.load_state_dict(side.optimizer.state_dict())
            elif how == "assign":
                side.net.load_state_dict({k: v.clone() for k, v in side.net.state_dict().items()})
            elif how == "checkpoint":
                folder = Path(tempfile.gettempdir()) / f"shardwright-hostile-{id_of(self.store)}"
                try:
                    sw.save_checkpoint(folder, side.net, side.optimizer, overwrite=True)
                    with torch.no_grad():
                        for p in side.net.parameters():
                            p.mul_(0)
                    sw.load_checkpoint(folder, side.net, side.optimizer)
                finally:
                    dist.barrier()
                    if self.rank == 0:
                        shutil.rmtree(folder, ignore_errors=True)
            elif how == "deepcopy of state":
                import copy

                state = copy.deepcopy(side.net.state_dict())
                with torch.no_grad():
                    for p in side.net.parameters():
                        p.add_(1.0)
                side.net.load_state_dict(state)

        endings = self.edit(work)
        if any(e.kind == "error" for e in endings):
            raise Bad(CRASH, f"{how}: {endings}{self.trace}")


def alike(one: str, other: str) -> bool:
    """Whether two messages of torch are the same but for numbers and names."""
    return re.sub(r"[\d\[\]., x]+|'[^']*'", "", one)[:60] == re.sub(r"[\d\[\]., x]+|'[^']*'", "", other)[:60]


def id_of(store: dist.PrefixStore) -> str:
    return store.prefix.replace("/", "-") if hasattr(store, "prefix") else "x"


@contextmanager
def boom(net: Net, program: Program) -> Iterator[None]:
    """Raise in the forward of a block in the middle, or when backward comes to its output."""
    block = net.trunk[int(program.line * len(net.trunk))]

    def fail(_: Any) -> None:
        raise Interrupt("boom")

    def hook(_: Any, args: Any, output: torch.Tensor) -> None:
        if program.interrupt == "boom in forward":
            raise Interrupt("boom")
        if output.requires_grad:
            output.register_hook(fail)

    handle = block.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def run_program(rank: int, world_size: int, program: Program, nonce: str) -> tuple[str, str]:
    """The verdict of a program on this rank, and why."""
    with fresh_meetings(program.transport):
        run = Run(program, rank, world_size, nonce)
        try:
            return run.run()
        except Bad as bad:
            if bad.args[0] == HANG:
                print(bad, "\n".join(run.story))  # the reply comes too late
            return bad.args[0], f"{bad.args[1]} {getattr(run, 'where', '')}"
