"""Every engine against a plain model, on ranks that see different data; checkpoints between all of them."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

import shardwright as sw
from shardwright.train.config import Config
from shardwright.train.data.samples.batch import Batch
from shardwright.train.errors import UserError
from shardwright.train.launch.signals import StopRequest
from shardwright.train.models.build import build_model
from shardwright.train.parallel.checks import check_ranks
from shardwright.train.parallel.world import World
from shardwright.train.run.position import Position
from shardwright.train.step import loading
from shardwright.train.step.evaluation import sample_text, validate
from shardwright.train.step.saving import checkpoint
from shardwright.train.step.trainer import Trainer
from tests.support.matrix import select, together
from tests.support.pool import multirank
from tests.train.kit.jobs import tiny
from tests.train.kit.parallel import dataset_of, plain_steps, take_steps
from tests.train.kit.text import batch, random_text

ENGINES = ["ddp", "fsdp1", "fsdp2", "shardwright"]
STEPS = 3


def trainer(config: Config, rank: int, world_size: int) -> Trainer:
    return Trainer(
        config, World.of(config.parallel, rank, world_size, torch.device("cpu")), dataset_of(config)
    )


@multirank(2, 3)
@pytest.mark.parametrize(
    ("engine", "tied", "accumulate"),
    select(
        itertools.product(ENGINES, (False, True), ("communicate", "hold")),
        lambda row, strength: together(strength, *row),
    ),
)
def test_engine_trains_like_a_plain_model(
    rank: int, world_size: int, engine: str, tied: bool, accumulate: str
) -> None:
    config = tiny(
        model={"tied_embeddings": tied, "ffn_dim": 62},  # a size no number of ranks divides
        train={"global_batch": 12, "micro_batch": 2, "accumulate": accumulate, "max_norm": 0.2},
        parallel={"engine": engine},
    )
    expected = plain_steps(config, STEPS)
    assert expected[0][1] > 0.2, "clipping must be at work"
    found = take_steps(trainer(config, rank, world_size), STEPS)
    # Other orders of summation: float32 rounding, amplified by three steps at a high rate.
    for (loss, norm), (plain_loss, plain_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-5)
        assert norm == pytest.approx(plain_norm, rel=1e-4)


@multirank(2, 4)
@pytest.mark.parametrize(
    ("accumulate", "options"),
    [
        ("communicate", {"strategy": "ddp"}),
        ("hold", {"strategy": "zero1", "layout": "ragged"}),
        ("communicate", {"strategy": "zero2"}),
        ("hold", {"layout": "element"}),
        ("communicate", {"strategy": "hsdp", "replicas": 2, "layout": "ragged"}),
        ("hold", {"strategy": "hfsdp", "replicas": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_strategies_and_layouts_train_like_a_plain_model(
    rank: int, world_size: int, options: dict[str, Any], accumulate: str
) -> None:
    config = tiny(
        model={"ffn_dim": 62},
        train={"global_batch": 16, "micro_batch": 2, "accumulate": accumulate, "max_norm": 0.2},
        parallel={"engine": "shardwright", **options},
    )
    expected = plain_steps(config, STEPS)
    found = take_steps(trainer(config, rank, world_size), STEPS)
    for (loss, norm), (plain_loss, plain_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-5)
        assert norm == pytest.approx(plain_norm, rel=1e-4)


@multirank(2)
def test_the_wait_for_data_is_the_longest_of_the_ranks(rank: int, world_size: int) -> None:
    """Rank 0 writes the metrics. It must not hide that the other rank's data are late."""
    job = trainer(tiny(data={"workers": 0}), rank, world_size)
    batch = job.dataset.train.batch

    def late(first: int, count: int) -> Batch:
        if rank == 1:
            time.sleep(0.2)
        return batch(first, count)

    job.dataset.train.batch = late  # type: ignore[method-assign]
    stop = StopRequest()  # not entered: no handlers in the pool's workers
    waits = [job.train_step(stop).agreed.data_seconds for _ in range(2)]
    assert all(0.2 < wait < 20 for wait in waits)
    found: list[list[float]] = [[] for _ in range(world_size)]
    dist.all_gather_object(found, waits)
    assert found[0] == found[1]


@pytest.mark.extensive("each dtype with each setting", but=("float32-default-*",))
@multirank(2)
@pytest.mark.parametrize("reshard", ["default", "always", "never"])
@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_shardwright_agrees_with_fsdp2_in_bf16(
    rank: int, world_size: int, reshard: str, reduce_dtype: str
) -> None:
    options = {"param_dtype": "bfloat16", "reduce_dtype": reduce_dtype, "reshard_after_forward": reshard}
    ours, theirs = (
        take_steps(trainer(tiny(parallel={"engine": engine, **options}), rank, world_size), STEPS)
        for engine in ("shardwright", "fsdp2")
    )
    for (loss, norm), (their_loss, their_norm) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(their_loss, rel=2e-3)
        assert norm == pytest.approx(their_norm, rel=2e-2)  # bf16 has 8 bits


@multirank(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_validation_between_steps_changes_nothing(rank: int, world_size: int, engine: str) -> None:
    config = tiny(parallel={"engine": engine})
    undisturbed = take_steps(trainer(config, rank, world_size), STEPS)
    job = trainer(config, rank, world_size)
    disturbed = []
    for number in range(STEPS):
        disturbed += take_steps(job, 1)
        validate(job)
        if number == 0:  # 160 passes
            sample_text(job)
    assert disturbed == undisturbed


@multirank(2, 3)
@pytest.mark.parametrize(("batches", "windows"), [(1, 12), (9, 31)])
def test_validation_counts_every_window_once(rank: int, world_size: int, batches: int, windows: int) -> None:
    """12 windows do not fill the last round of 3 ranks x 2 windows evenly, 31 (all there are) neither of any."""
    config = tiny(train={"global_batch": 12, "micro_batch": 2}, validation={"batches": batches},
                  parallel={"engine": "shardwright"})  # fmt: skip
    job = trainer(config, rank, world_size)
    torch.manual_seed(0)
    plain = build_model(config.model, 256)
    inputs, targets = batch(random_text(), 0, 0, windows, 32, split="validation")
    with torch.no_grad():
        expected = F.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten())
    assert validate(job).loss == pytest.approx(expected.item(), rel=1e-5)


#: Ours to each and from each, and the others in a ring: all of them write and read one format.
PASSED_ON = [
    (saver, loader)
    for saver, loader in itertools.permutations(ENGINES, 2)
    if "shardwright" in (saver, loader) or ENGINES.index(loader) == (ENGINES.index(saver) + 1) % 3
]


@pytest.mark.extensive("each pair of engines", but=("shardwright-fsdp2-*", "ddp-shardwright-*"))
@multirank(3)
@pytest.mark.parametrize(("saver", "loader"), PASSED_ON)
def test_checkpoint_passes_from_any_engine_to_any(
    rank: int, world_size: int, tmp_path: Path, saver: str, loader: str
) -> None:
    def config(engine: str) -> Config:
        return tiny(
            model={"ffn_dim": 62}, train={"global_batch": 6, "micro_batch": 2}, parallel={"engine": engine}
        )

    first = trainer(config(saver), rank, world_size)
    take_steps(first, 2)
    folder = checkpoint.save(tmp_path, first.model, first.optimizer, first.position)
    second = trainer(config(loader), rank, world_size)
    second.position = loading.load(folder, second.model, second.optimizer).position
    assert second.position == Position(step=2, samples=12)
    options = StateDictOptions(full_state_dict=True)
    weights, loaded = (get_model_state_dict(job.model, options=options) for job in (first, second))
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    # The moments, the step counts and the place in the data must have come over too.
    for (loss, norm), (other_loss, other_norm) in zip(
        take_steps(first, 2), take_steps(second, 2), strict=True
    ):
        assert loss == pytest.approx(other_loss, rel=1e-6)
        assert norm == pytest.approx(other_norm, rel=1e-5)


@multirank(2)
def test_loading_keeps_the_settings_of_the_configuration(rank: int, world_size: int, tmp_path: Path) -> None:
    first = trainer(tiny(parallel={"engine": "shardwright"}), rank, world_size)
    take_steps(first, 1)
    folder = checkpoint.save(tmp_path, first.model, first.optimizer, first.position)
    changed = tiny(parallel={"engine": "shardwright"}, optimizer={"weight_decay": 0.3, "betas": [0.8, 0.9]})
    second = trainer(changed, rank, world_size)
    loading.load(folder, second.model, second.optimizer)
    assert [(g["weight_decay"], tuple(g["betas"])) for g in second.optimizer.param_groups] == [
        (0.3, (0.8, 0.9)),
        (0.0, (0.8, 0.9)),
    ]


@multirank(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("engine", ["fsdp2", "shardwright"])
def test_units_are_embedding_blocks_and_head(rank: int, world_size: int, engine: str, tied: bool) -> None:
    job = trainer(tiny(model={"tied_embeddings": tied}, parallel={"engine": engine}), rank, world_size)
    kind = TorchFSDPModule if engine == "fsdp2" else sw.FSDPModule
    units = {name for name, module in job.model.named_modules() if isinstance(module, kind)}
    assert units == {"", "tok_embeddings", "layers.0", "layers.1", "norm", "output"}
    assert tied == (job.model.tok_embeddings is job.model.head()[0])  # then they are one unit


@multirank(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_only_matrices_decay(rank: int, world_size: int, engine: str) -> None:
    job = trainer(tiny(parallel={"engine": engine}), rank, world_size)
    decayed, others = (sum(p.numel() for p in group["params"]) for group in job.optimizer.param_groups)
    vectors = (2 * 2 + 1) * 32  # two norms per block and the last one
    if engine == "fsdp1":  # its views count only what this rank holds
        counts = torch.tensor([decayed, others])
        dist.all_reduce(counts)
        decayed, others = counts.tolist()
    assert (decayed, others) == (job.facts.parameters - vectors, vectors)
    assert [group["weight_decay"] for group in job.optimizer.param_groups] == [0.1, 0.0]


def test_options_an_engine_cannot_honour_are_refused() -> None:
    with pytest.raises(UserError, match="expected float32 with engine ddp"):
        check_ranks(tiny(parallel={"engine": "ddp", "reduce_dtype": "bfloat16"}), 2)
    with pytest.raises(ValueError, match="with engine ddp, which shards nothing"):
        tiny(parallel={"engine": "ddp", "reshard_after_forward": "always"})


@multirank(2)
def test_validation_in_full_precision(rank: int, world_size: int) -> None:
    """The validation runs in float32 with the same weights. The steps run in bfloat16, and it does not change them."""
    engine = {"engine": "shardwright"}
    low = {**engine, "param_dtype": "bfloat16", "accumulate_dtype": "float32"}
    jobs = [
        trainer(tiny(parallel=options), rank, world_size)
        for options in (engine, low, {**low, "full_precision_in_eval": True})
    ]
    exact, rounded, full = [validate(job).loss for job in jobs]
    assert full == exact != rounded
    assert take_steps(jobs[1], 2) == take_steps(jobs[2], 2)
    with pytest.raises(ValueError, match="only the engine shardwright supports other values"):
        tiny(parallel={"engine": "fsdp2", "full_precision_in_eval": True})
