"""Lines that a run prints before its first step. Nothing here writes files."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.train.config.catalog.figures import RunFacts
from shardwright.train.data.statement import ends_in_words, statement, tokens_of
from shardwright.train.report.console import explain_figures
from shardwright.train.report.device_peaks import peak_flops
from shardwright.train.report.memory import device_name
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.account.notices import before_steps
from shardwright.train.step.trainer import Trainer


def introduction(trainer: Trainer, folder: RunFolder, resumes: bool) -> Iterator[str]:
    """All of them. Only the first rank describes the data and looks for notices."""
    yield opening_line(trainer, folder)
    if trainer.world.is_first:
        yield data_in_words(trainer)
        yield from before_steps(trainer.config, trainer.dataset, resumes)
    yield figures_in_words(trainer)


def opening_line(trainer: Trainer, folder: RunFolder) -> str:
    world, config = trainer.world, trainer.config
    parallel = config.parallel
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    start = f"from step {trainer.position.step}" if trainer.position.step else "from the start"
    engine: str = parallel.engine
    if parallel.facts.has_own_keys:
        engine += f" (strategy {parallel.strategy}, layout {parallel.layout}, memory {parallel.memory})"
    return (
        f"{config.run.name}: {trainer.facts.parameters:,} parameters, engine {engine} on {ranks} "
        f"({device_name(world.device)}), {tokens_of(trainer.dataset.train):,} training tokens, {start}; "
        f"folder {folder.path}"
    )


def data_in_words(trainer: Trainer) -> str:
    """The data of the run, and its next sample."""
    config, dataset = trainer.config, trainer.dataset
    return statement(
        dataset.train,
        dataset.validation,
        dataset.tokenizer.decode,
        packing=config.data.packing,
        first=trainer.position.samples,
        samples=config.train.steps * config.train.global_batch,
        ends=ends_in_words(dataset.tokenizer, [each.kind for each in config.data.training]),
        spelled=dataset.spelled,
        special_tokens=config.data.spelled,
    )


def figures_in_words(trainer: Trainer) -> str:
    """The meaning of the figures in this run's lines of steps."""
    config, device = trainer.config, trainer.world.device
    validates = config.validation.every > 0
    return explain_figures(
        RunFacts(
            on_gpu=device.type == "cuda",
            has_validation=validates,
            has_norm=not config.optimizer.in_backward,
            has_mfu=peak_flops(device_name(device), config.parallel.param_dtype) is not None,
            auxiliary=trainer.losses.auxiliary,
            meanings=trainer.losses.meanings,
            metrics=trainer.hooks.in_words(validates),
            has_perplexity=validates and not trainer.losses.has_loss,
            sets=trainer.dataset.validation_sets,
            **trainer.losses.in_words(),
        )
    )
