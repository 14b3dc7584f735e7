"""The mean over the trained tokens of the global batch: equal for every split into micro-batches and ranks.

Rows are generated. Each one trains on a split of the global batch, with some model, data, packing and engine. Losses,
gradient norms, weights and the loss of validation are those of one rank that has the global batch in one micro-batch.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardwright.train.config import Config
from shardwright.train.data.dataset import load_dataset
from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.world import World
from shardwright.train.step.evaluation import validate
from shardwright.train.step.losses import documents_of
from shardwright.train.step.trainer import Trainer
from tests.support.matrix import everything, generate
from tests.support.pool import WorkerPools, run_case
from tests.train.kit.jobs import HYBRID, tiny
from tests.train.models.kit.architectures import folder_with
from tests.train.models.kit.foreign import NATIVE

pytest.importorskip("transformers", reason="needs transformers")

STEPS, SAMPLES, LENGTH = 3, 12, 24
"""Steps, samples of a step and tokens of a sample."""
TIMEOUT = 1800 if everything() else 120
SEED = 54
"""One whose order has ranks without trained tokens, see the last test."""
MODULE = "tests.train.models.kit.user_module"
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "hybrid": HYBRID,
    "hf": {"kind": "hf", "path": "llama"},
    "hf-balance": {"kind": "hf", "path": "mixtral"},
    "python": {"kind": "python", "target": f"{MODULE}:Module"},
    "python-mean": {"kind": "python", "target": f"{MODULE}:MeanLoss"},
    "python-each": {"kind": "python", "target": f"{MODULE}:EachLoss"},
}
#: By name, keys of `[parallel]`.
ENGINES: dict[str, dict[str, Any]] = {
    "zero3": {"engine": "shardwright"},
    "zero2": {"engine": "shardwright", "strategy": "zero2", "layout": "ragged"},
    "replicated": {"engine": "shardwright", "strategy": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp1": {"engine": "fsdp1"},
    "ddp": {"engine": "ddp"},
}
AXES: dict[str, tuple[Any, ...]] = {
    "ranks": (2, 3, 4, 1),
    "passes": ("each", "some", "one"),  # a micro-batch is a sample, or some or all samples of a rank
    "packing": ("none", "split", "best_fit"),
    "samples": ("completions", "conversations", "documents"),
    "model": tuple(MODELS),
    "engine": tuple(ENGINES),
    "accumulate": ("hold", "communicate"),
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
#: Relative to the value. Of float32 sums in another order, over 300 tokens at most and three steps.
LOSS, NORM, WEIGHTS = 2e-6, 2e-5, 2e-6


def excluded(one: str, a: Any, other: str, b: Any) -> bool:
    """The split of the reference itself, and samples that a user's module would mix."""
    pair = {one: a, other: b}
    mixed = pair.get("packing") == "best_fit" and str(pair.get("model")).startswith("python")
    return mixed or (pair.get("ranks") == 1 and pair.get("passes") == "one")


ROWS = generate(AXES, excluded, *((3, 0) if everything() else (2, 6)))


def micro_batch(row: dict[str, Any]) -> int:
    share = SAMPLES // row["ranks"]
    return {"one": share, "some": max(n for n in range(1, share) if share % n == 0), "each": 1}[row["passes"]]


def config_of(row: dict[str, Any], folder: Path, micro: int, **parallel: Any) -> Config:
    model = dict(MODELS[row["model"]])
    if model.get("kind") in ("hf", "python"):
        model = {**dict.fromkeys(NATIVE), **model}
    if "path" in model:
        model["path"] = str(folder / model["path"])
    mask = False if row["packing"] == "split" and row["model"].startswith("python") else "auto"
    return tiny(
        run={"seed": SEED},
        model=model,
        data={
            "source": str(folder / f"{row['samples']}.jsonl"), "kind": row["samples"], "packing": row["packing"],
            "chat_template": str(folder / "template.jinja"), "cache": str(folder / "cache"), "document_mask": mask,
            "workers": 0, "validation_fraction": 0.3,
        },
        train={
            "seq_len": LENGTH, "global_batch": SAMPLES, "micro_batch": micro, "max_norm": 0.2,
            "accumulate": row["accumulate"],
        },
        validation={"batches": 1},
        parallel=parallel,
        optimizer={"warmup_steps": 0, "eps": 1e-3},  # Adam makes large steps of the rounding of tiny gradients
    )  # fmt: skip


def write_files(folder: Path) -> None:
    """Texts of 1 to 40 tokens. Most conversations and completions have few trained tokens or none in a sample."""
    draw = random.Random(0)

    def text(shortest: int, longest: int) -> str:
        return "".join(draw.choices("abcdefgh ", k=draw.randint(shortest, longest)))

    rows: dict[str, list[Any]] = {"documents": [], "conversations": [], "completions": []}
    for _ in range(100):
        rows["documents"].append({"text": text(*draw.choice([(1, 3), (20, 40)]))})
        prompt, answer = (text(50, 90), text(1, 4)) if draw.random() < 0.8 else (text(1, 5), text(12, 40))
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        rows["conversations"].append({"messages": messages})
        rows["completions"].append({"prompt": prompt, "completion": answer})
    for name, values in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    (folder / "template.jinja").write_text(TEMPLATE)
    folder_with("llama", folder / "llama")
    folder_with("mixtral", folder / "mixtral", output_router_logits=True, router_aux_loss_coef=0.5)


class Found(NamedTuple):
    """The results of a run: by step its losses and gradient norm, and after the steps the rest."""

    losses: list[list[float]]
    norms: list[float]
    weights: dict[str, Tensor]
    validation: float


def trainer(config: Config, rank: int, world_size: int) -> Trainer:
    world = World.of(config.parallel, rank, world_size, torch.device("cpu"))
    return Trainer(config, world, load_dataset(config.for_data))


def found_by(job: Trainer) -> Found:
    stop = StopRequest()  # not entered: no handlers in the pool's workers
    steps = [job.train_step(stop) for _ in range(STEPS)]
    weights = get_model_state_dict(job.model, options=StateDictOptions(full_state_dict=True))
    norms = [step.agreed.norm for step in steps if step.agreed.norm is not None]
    return Found([[s.loss, *s.auxiliary.values()] for s in steps], norms, weights, validate(job).loss)


# ---------------------------------------------------------------------------------------------------------------
# What rows are compared with


def reference_of(row: dict[str, Any]) -> tuple[str, str, str, int]:
    """Rows with equal values have one reference. The last one is its micro-batch: the balance loss of transformers is
    one of the tokens of a micro-batch."""
    micro = micro_batch(row) if row["model"] == "hf-balance" else SAMPLES
    return row["model"], row["samples"], row["packing"], micro


def references(rank: int, world_size: int, rows: list[dict[str, Any]], folder: Path) -> list[Found]:
    write_files(folder)
    return [reference(row, folder) for row in rows]


def reference(row: dict[str, Any], folder: Path) -> Found:
    """One rank without an engine. Its first loss is the one of plain PyTorch."""
    micro = reference_of(row)[-1]
    job = trainer(config_of({**row, "accumulate": "communicate"}, folder, micro, engine="none"), 0, 1)
    batch, plain = job.dataset.train.batch(0, SAMPLES), math.nan
    if not job.losses.has_loss:
        with torch.no_grad():
            logits = job.model(batch.inputs, **documents_of(batch))
        plain = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item()
    found = found_by(job)
    assert job.losses.has_loss or found.losses[0][0] == pytest.approx(plain, rel=LOSS), row
    assert min(found.norms) > 0.2, f"{row}: clipping must be at work"
    return found


@pytest.fixture(scope="module")
def files_and_references(
    worker_pools: WorkerPools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[Any, Found]]:
    folder = tmp_path_factory.mktemp("splits")
    rows = list({reference_of(row): row for row in ROWS}.values())
    results = worker_pools.run(references, 1, timeout=TIMEOUT, rows=rows, folder=folder)[0]
    return folder, dict(zip(map(reference_of, rows), results, strict=True))


# ---------------------------------------------------------------------------------------------------------------
# The rows


def check(row: dict[str, Any], expected: Found, rank: int, world_size: int, folder: Path) -> None:
    job = trainer(config_of(row, folder, micro_batch(row), **ENGINES[row["engine"]]), rank, world_size)
    found = found_by(job)
    for losses, others in zip(found.losses, expected.losses, strict=True):
        assert losses == pytest.approx(others, rel=LOSS)
    assert found.norms == pytest.approx(expected.norms, rel=NORM)
    assert found.validation == pytest.approx(expected.validation, rel=LOSS)
    assert found.weights.keys() == expected.weights.keys()
    difference, size = (
        math.sqrt(sum(each.double().square().sum().item() for each in tensors))
        for tensors in (
            (found.weights[name] - weight for name, weight in expected.weights.items()),
            expected.weights.values(),
        )
    )
    assert difference < WEIGHTS * size


def run_rows(
    rank: int, world_size: int, rows: list[dict[str, Any]], expected: list[Found], folder: Path
) -> None:
    for row, each in zip(rows, expected, strict=True):
        try:
            check(row, each, rank, world_size, folder)
        except Exception as error:
            raise AssertionError(f"{row}: {type(error).__name__}: {error}") from error


@pytest.mark.extensive("each number of ranks")
@pytest.mark.multirank
@pytest.mark.parametrize("ranks", AXES["ranks"])
def test_every_split_has_the_losses_and_weights_of_the_whole(
    worker_pools: WorkerPools, files_and_references: tuple[Path, dict[Any, Found]], ranks: int
) -> None:
    folder, known = files_and_references
    rows = [row for row in ROWS if row["ranks"] == ranks]
    expected = [known[reference_of(row)] for row in rows]
    run_case(worker_pools, run_rows, ranks, TIMEOUT, rows=rows, expected=expected, folder=folder)


@pytest.mark.parametrize("samples", ["conversations", "completions"])
@pytest.mark.parametrize("packing", AXES["packing"])
def test_ranks_of_the_rows_have_no_trained_token_in_a_step(
    tmp_path: Path, packing: str, samples: str
) -> None:
    write_files(tmp_path)
    row = {"model": "llama", "samples": samples, "packing": packing, "accumulate": "hold"}
    stream = load_dataset(config_of(row, tmp_path, 1, engine="none").for_data).train
    for ranks in (2, 3, 4):
        share = SAMPLES // ranks
        counts = [stream.trained(first, share) for first in range(0, STEPS * SAMPLES, share)]
        steps = [counts[n : n + ranks] for n in range(0, len(counts), ranks)]
        assert any(min(step) == 0 < max(step) for step in steps), (ranks, steps)
