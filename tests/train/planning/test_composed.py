"""Plans of long models from plans of short ones, beside traces of the whole model: equal, event for event."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardwright.planner.program import Alloc, Program
from shardwright.train.config import Config
from shardwright.train.planning import composed_program, traced_program
from tests.train.planning.test_peaks import config_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DEEP = "model.n_layers=17"

HANDFUL: dict[str, str] = {
    "bf16": "parallel.param_dtype=bfloat16 parallel.reduce_dtype=float32",
    "ragged, checkpoints": "parallel.layout=ragged activations.checkpoint=full",
    "fsdp2": "parallel.engine=fsdp2",
}
#: Settings for the matrix, of which a case has one of each row.
ROWS: list[list[str]] = [
    ["", "parallel.strategy=zero1", "parallel.strategy=zero2", "parallel.strategy=ddp", "parallel.engine=fsdp2",
     "parallel.strategy=hsdp parallel.replicas=2"],
    ["", "parallel.layout=ragged", "parallel.layout=element", "parallel.layout=32"],
    ["", "parallel.memory=double_buffer"],
    ["", "parallel.prefetch=0", "parallel.prefetch=2", "parallel.prefetch=3"],
    ["", "parallel.reshard_after_forward=always", "parallel.reshard_after_forward=never",
     "parallel.reshard_after_forward=2"],
    ["", "activations.checkpoint=full", "activations.checkpoint=ops", "activations.checkpoint=layers"],
    ["", "train.micro_batch=2", "train.micro_batch=2 train.accumulate=hold"],
    ["", "model.tied_embeddings=true"],
    ["", "parallel.param_dtype=bfloat16 parallel.reduce_dtype=float32"],
    ["", "finetune.method=lora", "finetune.method=dora", "finetune.method=lora finetune.train_also=['*norm.weight']"],
    ["", "optimizer.name=adamw8bit", "optimizer.in_backward=true train.max_norm=0"],
    ["", "parallel.tensor=2"],
]  # fmt: skip


def plain(program: Program) -> list[Any]:
    """The events, with the owners themselves."""
    return [
        (each._replace(owner=0), program.owners[each.owner]) if isinstance(each, Alloc) else each
        for each in program.events
    ]


def check(config: Config, ranks: int = 2, kind: Any = "cuda") -> None:
    composed = composed_program(config, ranks, kind)
    assert composed is not None
    assert plain(composed) == plain(traced_program(config, ranks, kind))


@pytest.mark.parametrize("words", HANDFUL.values(), ids=HANDFUL)
def test_a_composed_plan_is_the_traced_one(words: str) -> None:
    check(config_of(f"{DEEP} {words}"))


def cases(number: int) -> list[tuple[str, int, str]]:
    """Random settings, that go together."""
    choose = random.Random(5)
    cases: list[tuple[str, int, str]] = []
    while len(cases) < number:
        words = " ".join(each for row in ROWS if (each := choose.choice([row[0], *row])))
        ranks = 4 if "replicas" in words or "tensor" in words or "forward=2" in words else 2
        try:
            config_of(f"{DEEP} {words}", ranks=ranks)
        except Exception:
            continue
        cases.append((words, ranks, choose.choice(["cuda", "cpu"])))
    return cases
