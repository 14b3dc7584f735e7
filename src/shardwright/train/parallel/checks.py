"""Checks before any rank starts: numbers of ranks, devices and batches that a job cannot have.

Nothing here needs a process group. Importing this file imports no engine, see `rank_facts.py`.
"""

from __future__ import annotations

from shardwright.train.config import Config, TrainConfig
from shardwright.train.config.catalog.kinds import experts_of
from shardwright.train.config.conflicts.jobs import STARTED
from shardwright.train.config.conflicts.table import refuse
from shardwright.train.config.dims import ParallelDims, check_divisor
from shardwright.train.config.schema import toml_value
from shardwright.train.config.sections.finetune import FinetuneConfig
from shardwright.train.errors import UserError
from shardwright.train.models.offers import offer, offers_of, uneven
from shardwright.train.parallel.host_memory import check_model_fits, ranks_of_host
from shardwright.train.parallel.rank_facts import choose_device, under_launcher

EPOCHS_PER_STEP = 1000
"""Passes over the training text in one step from which on a global batch is taken for a mistake."""


def check_device(config: Config, kind: str) -> None:
    """Refuse what only a GPU, or some GPUs, can do on another device."""
    if config.train.float8 != "none":
        from shardwright.train.parallel.float8 import check_float8

        check_float8(config, kind)
    for key, value, expected in (
        ("cuda_graph", config.train.cuda_graph, False),
        ("memory_snapshot", config.train.memory_snapshot, ()),
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
    check_model_fits(config, ranks, ranks_of_host(ranks, under_launcher()), choose_device(config))


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
        check_profiled_ranks(config, ranks)
    dims = ParallelDims.of(parallel, ranks)
    if dims.tensor > 1:
        _check_tensor_parallel(config)
    if dims.context > 1:
        _check_context_parallel(config, dims)
    group = parallel.reshard_after_forward
    if isinstance(group, int):
        what = "the number of ranks that shard parameters"
        check_divisor("parallel.reshard_after_forward", group, dims.shard, what)
    if dims.expert > 1:
        _check_expert_parallel(config, dims)
    config.train.accumulation_steps(dims.data, tensor=dims.sharing_data, resumes=resumes)
    shape = config.model.shape()
    if (check_model := offers_of(shape).check) is not None:
        check_model(shape, config)
    if config.finetune != FinetuneConfig():
        from shardwright.train.finetune.finetuning import check_fits  # which imports the engine

        check_fits(config)


def check_profiled_ranks(config: Config, ranks: int) -> None:
    """Refuse ranks in `profile.ranks` that the job does not have."""
    profile = config.profile
    if profile.steps and profile.ranks != "all" and (last := max(profile.ranks)) >= ranks:
        raise UserError(
            f'profile.ranks: expected ranks below {ranks}, the number of ranks, found {last}; or set it to "all"'
        )


def check_least_ranks(config: Config, ranks: int) -> None:
    """Refuse a smallest number of ranks that this job does not have. A launcher calls it before its first attempt."""
    if config.fault.least_ranks > ranks:
        raise UserError(
            f"fault.least_ranks: expected at most {ranks}, the number of ranks, found {config.fault.least_ranks}"
        )


def _check_tensor_parallel(config: Config) -> None:
    """Refuse sizes that tensor parallelism does not divide."""
    ranks, shape = config.parallel.tensor, config.model.shape()
    for key, size, multiple in uneven(shape, config.train.seq_len, ranks):
        of_what = (
            f"parallel.tensor = {ranks}"
            if multiple == ranks
            else f"{multiple // ranks} x parallel.tensor = {multiple}"
        )
        raise UserError(f"{key}: expected a multiple of {of_what}, found {size}")


def _check_context_parallel(config: Config, dims: ParallelDims) -> None:
    """Refuse a model whose samples no ranks divide, and a length that they do not divide."""
    offer(config.model.shape(), "divide_samples", "parallel.context")
    if config.train.seq_len % dims.sharing_data:
        ranks = f"parallel.context = {dims.context}"
        if dims.tensor > 1:
            ranks += f" x parallel.tensor = {dims.tensor}"
        raise UserError(f"train.seq_len: expected a multiple of {ranks}, found {config.train.seq_len}")


def _check_expert_parallel(config: Config, dims: ParallelDims) -> None:
    """Refuse numbers that expert parallelism does not divide."""
    parallel, experts = config.parallel, experts_of(config.model.shape())
    assert experts is not None  # STARTED has refused others
    for what, size in (
        ("the number of ranks that share a replica", dims.shard),
        ("model.n_experts", experts.number),
    ):
        check_divisor("parallel.expert", parallel.expert, size, what)
    if isinstance(group := parallel.reshard_after_forward, int):
        what = "the number of ranks that have the same experts"
        check_divisor("parallel.reshard_after_forward", group, dims.with_same_experts, what)


def check_batch_fits(train: TrainConfig, windows: int) -> None:
    """Refuse a global batch that no step would ever get through. `windows` is the sequences of the training text."""
    if train.global_batch > EPOCHS_PER_STEP * windows:
        raise UserError(
            f"train.global_batch: expected at most {EPOCHS_PER_STEP} times the {windows} sequences of the training "
            f"text (that is {EPOCHS_PER_STEP * windows}), found {train.global_batch}"
        )
