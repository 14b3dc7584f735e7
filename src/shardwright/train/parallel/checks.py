"""Checks before any rank starts: numbers of ranks, devices and batches that a job cannot have.

Nothing here needs a process group. Importing this file imports no engine, see `rank_facts.py`.
"""

from __future__ import annotations

from math import prod

from shardwright.train.config import Config, FaultConfig, ProfileConfig, TrainConfig
from shardwright.train.config.axes import Divided, ParallelDims, axes_that_divide, check_divisor
from shardwright.train.config.catalog.kinds import experts_of
from shardwright.train.config.conflicts.jobs import STARTED
from shardwright.train.config.conflicts.table import refuse
from shardwright.train.config.schema import toml_value
from shardwright.train.config.sections.finetune import FinetuneConfig
from shardwright.train.errors import UserError
from shardwright.train.models.offers import offer_of_axis, offers_of, uneven
from shardwright.train.parallel.host_memory import check_model_fits, ranks_of_host
from shardwright.train.parallel.rank_facts import choose_device, under_launcher

EPOCHS_PER_STEP = 1000
"""Passes over the training text in one step from which on a global batch is taken for a mistake."""


def check_device(train: TrainConfig, kind: str) -> None:
    """Refuse what only a GPU, or some GPUs, can do on another device."""
    if train.float8 != "none":
        from shardwright.train.parallel.float8 import check_float8

        check_float8(train.float8, kind)
    for key, value, expected in (
        ("cuda_graph", train.cuda_graph, False),
        ("memory_snapshot", train.memory_snapshot, ()),
    ):
        if value != expected and kind != "cuda":
            raise UserError(
                f"train.{key}: expected {toml_value(expected)} on the {kind.upper()}, found {toml_value(value)}; it "
                "needs a CUDA device"
            )


def check_ranks(config: Config, ranks: int, resumes: bool = False) -> None:
    """Refuse a job that this many ranks cannot run, or an option its engine cannot honour. Needs no process group.

    `resumes`: the job continues a run, so that messages advise what may change then.
    """
    check_division(config, ranks, resumes)
    check_model_fits(
        config.for_building, ranks, ranks_of_host(ranks, under_launcher()), choose_device(config.run)
    )


def check_division(config: Config, ranks: int, resumes: bool = False) -> None:
    """The same, wherever the job will run: without this machine's memory and devices."""
    parallel = config.parallel
    if parallel.facts.one_rank and ranks != 1:
        raise UserError(
            f"parallel.engine: the engine {parallel.engine!r} runs on exactly 1 rank, found {ranks}; use --nproc 1 or "
            "another engine"
        )
    refuse(STARTED, config)
    if not resumes:  # a run that goes on may have lost ranks
        check_profiled_ranks(config.profile, ranks)
    dims = parallel.dims(ranks)
    _check_layers(config)
    _check_samples(config)
    group = parallel.reshard_after_forward
    if isinstance(group, int):
        what = "the number of ranks that shard parameters"
        check_divisor("parallel.reshard_after_forward", group, dims.shard, what)
    _check_experts(config, dims)
    config.train.accumulation_steps(dims.data, tensor=dims.sharing_data, resumes=resumes)
    shape = config.model.shape()
    if (check_model := offers_of(shape).check) is not None:
        check_model(shape, config)
    if config.finetune != FinetuneConfig():
        from shardwright.train.finetune.finetuning import check_fits  # which imports the engine

        check_fits(config.finetune, shape)


def check_profiled_ranks(profile: ProfileConfig, ranks: int) -> None:
    """Refuse ranks in `profile.ranks` that the job does not have."""
    if profile.steps and profile.ranks != "all" and (last := max(profile.ranks)) >= ranks:
        raise UserError(
            f'profile.ranks: expected ranks below {ranks}, the number of ranks, found {last}; or set it to "all"'
        )


def check_least_ranks(fault: FaultConfig, ranks: int) -> None:
    """Refuse a smallest number of ranks that this job does not have. A launcher calls it before its first attempt."""
    if fault.least_ranks > ranks:
        raise UserError(
            f"fault.least_ranks: expected at most {ranks}, the number of ranks, found {fault.least_ranks}"
        )


def _used(config: Config, *what: Divided) -> dict[str, int]:
    """Return the sizes of the job's axes that divide these things, by key, without axes of one rank."""
    sizes = {axis.key: config.value_at(axis.key) for each in what for axis in axes_that_divide(each)}
    return {key: size for key, size in sizes.items() if size > 1}


def _check_layers(config: Config) -> None:
    """Raise UserError for a size of the model, or a length, that the ranks which divide layers do not divide."""
    if not (axes := _used(config, "layers")):
        return
    ranks, keys = prod(axes.values()), " x ".join(axes)
    for key, size, multiple in uneven(config.model.shape(), config.train.seq_len, ranks):
        of_what = f"{keys} = {ranks}" if multiple == ranks else f"{multiple // ranks} x {keys} = {multiple}"
        raise UserError(f"{key}: expected a multiple of {of_what}, found {size}")


def _check_samples(config: Config) -> None:
    """Raise UserError for a model whose samples no ranks divide, and for a length that they do not divide."""
    if not _used(config, "samples"):
        return
    offer_of_axis(config.model.shape(), "samples")
    axes = _used(config, "samples", "layers")
    if config.train.seq_len % prod(axes.values()):
        ranks = " x ".join(f"{key} = {size}" for key, size in axes.items())
        raise UserError(f"train.seq_len: expected a multiple of {ranks}, found {config.train.seq_len}")


def _check_experts(config: Config, dims: ParallelDims) -> None:
    """Raise UserError for a number that the ranks which divide experts do not divide."""
    axes, experts = _used(config, "experts"), experts_of(config.model.shape())
    for key, size in axes.items():
        assert experts is not None  # STARTED has refused others
        check_divisor(key, size, dims.shard, "the number of ranks that share a replica")
        check_divisor(key, size, experts.number, "model.n_experts")
    if axes and isinstance(group := config.parallel.reshard_after_forward, int):
        what = "the number of ranks that have the same experts"
        check_divisor("parallel.reshard_after_forward", group, dims.with_same_experts, what)


def check_batch_fits(train: TrainConfig, windows: int) -> None:
    """Refuse a global batch that no step would ever get through. `windows` is the sequences of the training text."""
    if train.global_batch > EPOCHS_PER_STEP * windows:
        raise UserError(
            f"train.global_batch: expected at most {EPOCHS_PER_STEP} times the {windows} sequences of the training "
            f"text (that is {EPOCHS_PER_STEP * windows}), found {train.global_batch}"
        )
