"""One training step of an architecture for each way to save memory, compared with the plain model of transformers.

Every rank of the default process group calls these functions together. Nothing here prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from shardwright.engine import RankGroup
from shardwright.extend import ExtensionError
from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.finetune.finetuning import check_called
from shardwright.train.models.hf.transformers_model import PREFIX
from shardwright.train.parallel.checks import check_device, check_division
from shardwright.train.planning.programs import program_of
from shardwright.train.step.evaluation import check_model
from tests.engine.kit.models import full
from tests.train.kit.jobs import tiny, trainer
from tests.train.kit.parallel import next_step
from tests.train.kit.text import batch, random_text
from tests.train.models.kit.architectures import reloaded
from tests.train.models.kit.foreign import NATIVE
from tests.train.models.table.small import model_of_config, save_config, save_small, small_config, unnoticed

LENGTH, BATCH = 16, 4
#: Tolerance relative to the norm of all gradients: float32 rounding, since experts and chunks sum in another order.
TOLERANCE = 2e-4
WORKS, REFUSED, LATE, WRONG, CRASH = "works", "refused", "refused in ranks", "WRONG", "CRASH"
PLAIN = "not in transformers"  #: the plain model itself does not load or run


class Cell(NamedTuple):
    """The settings of one step: kind of checkpoints, chunks of the loss, ranks of the context, method."""

    checkpoint: str
    chunks: int
    context: int
    method: str

    def config(self, path: Path, **model: str) -> Config:
        return tiny(
            model={**dict.fromkeys(NATIVE), "kind": "hf", "path": str(path), **model},
            train={
                "seq_len": LENGTH, "global_batch": BATCH, "micro_batch": 1 if self.context == 1 else 2,
                "loss_chunks": self.chunks, "accumulate": "communicate",
            },
            activations={"checkpoint": self.checkpoint},
            parallel={"engine": "shardwright", "context": self.context},
            finetune={} if self.method == "full" else {"method": self.method, "rank": 1},
            run={"sample_tokens": 0},
        )  # fmt: skip


#: Every pair of kinds of checkpoints, chunks and methods on whole samples; then two ranks divide them.
CELLS = [
    Cell("none", 0, 1, "full"),
    Cell("ops", 2, 1, "full"),
    Cell("ops", 0, 1, "lora"),
    Cell("full", 0, 1, "full"),
    Cell("full", 2, 1, "lora"),
    Cell("layers", 2, 1, "lora"),
    Cell("layers", 0, 2, "full"),
    Cell("ops", 2, 2, "lora"),
]
#: The cell of which a plan is made.
PLANNED = CELLS[1]


class Outcome(NamedTuple):
    """The result of a cell in a word, and the reason unless it works."""

    word: str
    reason: str = ""


class Step(NamedTuple):
    """The loss of a step and its gradients, by transformers' names."""

    loss: float
    gradients: dict[str, Tensor]


def outcomes(kind: str, folder: Path, cells: list[Cell]) -> Iterator[tuple[Cell, Outcome]]:
    """Run cells of an architecture. What is refused for all chunks and checkpoints is tried once."""
    path, failure = folder / kind, ""
    if dist.get_rank() == 0:
        try:
            save_small(kind, path)
        except Exception as error:  # of code that is not ours
            failure = _described(error)
    if failure := RankGroup().all_gather(failure, "models that were saved")[0]:
        yield cells[0], Outcome(PLAIN, failure)
        return
    try:
        Cell("none", 0, 1, "full").config(path)
    except ValidationError as error:
        yield cells[0], Outcome(REFUSED, _described(error))
        return
    try:
        expected = {"full": _plain(path)}
    except Exception as error:  # of code that is not ours
        yield cells[0], Outcome(PLAIN, _described(error))
        return
    refused: dict[tuple[Any, ...], Outcome] = {}
    for cell in cells:
        keys = [("context", cell.context), ("method", cell.method), ("chunks", cell.chunks)]
        known = next((refused[key] for key in keys if key in refused), None)
        outcome = known or _same_on_all(_outcome(cell, path, expected))
        if outcome.word == REFUSED:
            for key, name in zip(keys, ("parallel.context", "finetune", "train.loss_chunks"), strict=True):
                if name in outcome.reason.partition(":")[0]:
                    refused[key] = outcome
        yield cell, outcome


def planned(kind: str, folder: Path) -> Outcome:
    """Plan the steps of an architecture on two GPUs, in one process and without weights."""
    with unnoticed():
        save_config(small_config(kind), folder / kind)
    try:
        peak = program_of(PLANNED.config(folder / kind, weights="random"), 2).peak()
    except (UserError, ValidationError) as error:
        return Outcome(REFUSED, _described(error))
    except Exception as error:
        return Outcome(CRASH, _described(error))
    return Outcome(WORKS) if peak.nbytes > 0 else Outcome(WRONG, "a plan without memory")


def _outcome(cell: Cell, path: Path, expected: dict[str, Step]) -> Outcome:
    ranks = dist.get_world_size()
    try:
        config = cell.config(path)
        check_division(config, ranks)
        check_device(config.train, "cpu")
    except (UserError, ValidationError) as error:
        return Outcome(REFUSED, _described(error))
    except Exception as error:
        return Outcome(CRASH, _described(error))
    try:
        found = _step(config)
    except (UserError, ExtensionError) as error:
        return Outcome(LATE, _described(error))
    except Exception as error:
        return Outcome(CRASH, _described(error))
    if abs(found.loss - expected["full"].loss) > 1e-5 * abs(expected["full"].loss):
        return Outcome(WRONG, f"loss {found.loss:.6f}, plain {expected['full'].loss:.6f}")
    # The first step of adapters is compared with the one without any way to save memory.
    wanted = expected.setdefault(cell.method, found)
    return _compared(found.gradients, wanted.gradients)


def _step(config: Config) -> Step:
    """One step of the trainer."""
    job = trainer(config, dist.get_rank(), dist.get_world_size())
    try:
        check_model(job)
        loss = job.forward_backward(*next_step(job)) / (BATCH * LENGTH)
        check_called(job.model)
    finally:
        job.close()
    dist.all_reduce(loss)
    gradients = {
        name.removeprefix(PREFIX): full(p.grad).detach().clone()
        for name, p in job.model.named_parameters()
        if p.grad is not None
    }
    return Step(float(loss), gradients)


def _plain(path: Path) -> Step:
    """The step of transformers' own model, on the whole batch."""
    model = reloaded(path).train()
    with torch.device("meta"):
        made = dict(model_of_config(model.config).named_parameters())
    for name, parameter in model.named_parameters():  # from_pretrained forgets what the class freezes
        parameter.requires_grad_(made[name].requires_grad)
    inputs, targets = batch(random_text(), 0, 0, BATCH, LENGTH)
    loss = F.cross_entropy(
        model(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1), targets.flatten()
    )
    loss.backward()
    return Step(float(loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def _compared(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Outcome:
    for name in sorted(found.keys() | wanted.keys()):
        own, other = found.get(name), wanted.get(name)
        if own is None or other is None:
            left = own if own is not None else other
            assert left is not None
            if bool(left.any()):
                return Outcome(
                    WRONG, f"gradient of {name} is {'missing' if own is None else 'not of the plain model'}"
                )
        elif not float((own - other).norm()) <= TOLERANCE * float(other.norm()) + 1e-7:
            return Outcome(
                WRONG, f"gradient of {name} differs by {float((own - other).norm() / other.norm()):.1e}"
            )
    return Outcome(WORKS)


def _same_on_all(outcome: Outcome) -> Outcome:
    """The worst of the ranks' outcomes."""
    ranks = RankGroup()
    order = (WORKS, REFUSED, LATE, PLAIN, WRONG, CRASH)
    every = [Outcome(*each) for each in ranks.all_gather(list(outcome), "outcomes")]
    return max(every, key=lambda each: order.index(each.word))


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
