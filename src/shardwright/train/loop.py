"""The training loop: what one rank does from the first sample to the last checkpoint.

It reads as if there were one engine and one rank: engines differ in `parallel`, files in `runs` and `checkpoint`.
Where a run stands is one integer, the samples seen: step s takes samples [s*G, (s+1)*G) of the order, and each rank a
contiguous part of them, so any number of ranks sees the same sequence.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright._torch import dump_memory_history, record_memory_history
from shardwright.engine.front.report import in_units
from shardwright.train import checkpoint, float8, metrics, parallel, report
from shardwright.train.activations import Recompiles, prepare_blocks
from shardwright.train.checks import check_batch_fits
from shardwright.train.config import Config, OptimizerConfig
from shardwright.train.data import Corpus, batch, decode
from shardwright.train.data.corpus import encode
from shardwright.train.errors import UserError
from shardwright.train.generate import sample
from shardwright.train.resuming import changes_in_words, resume_command
from shardwright.train.runs import (
    RunFolder,
    RunRecord,
    Session,
    check_same_corpus,
    now,
    versions,
    write_json,
    write_text,
    writing,
)
from shardwright.train.starting import START
from shardwright.train.stop import StopRequest
from shardwright.train.world import World

PROMPT_BYTES = 48
VALIDATION_SEED = 0  # of the choice of windows: the same ones whatever the run's own seed


class NonFiniteError(Exception):
    """Loss or gradient norm is no longer a number: the run cannot go on."""


def learning_rate(step: int, steps: int, settings: OptimizerConfig) -> float:
    """Rate of step number `step` (from 0) of `steps`: rises over the warm-up to lr, then falls to min_lr_ratio * lr
    at the last step."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = (step - settings.warmup_steps) / max(1, steps - 1 - settings.warmup_steps)
    part = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * part)


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Of every token, float32 [B * S]."""
    return whole(F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten(), reduction="none"))


def whole(loss: Tensor) -> Tensor:
    """Every rank's, of logits that may be cut."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step.

    `loss` is the cross-entropy alone, `stop` the signal that asks to end here, 0 for none.
    """

    loss: float
    grad_norm: float | None  # None where the optimizer has used the gradients before all were known
    data_seconds: float
    stop: int
    auxiliary: Mapping[str, float]  # by name, the losses beside the cross-entropy


class Trainer:
    """A model in training on one rank. Every method is called by all ranks together."""

    def __init__(self, config: Config, world: World, corpus: Corpus) -> None:
        self.config, self.world, self.corpus = config, world, corpus
        self.micro_batches = config.train.accumulation_steps(world.data_size)
        check_batch_fits(config.train, corpus.windows(config.train.seq_len))
        if config.validation.every:
            corpus.windows(config.train.seq_len, "validation")
        torch.manual_seed(config.run.seed)  # equal on all ranks, which is what makes their models equal
        plain = parallel.build_for(config, corpus.vocab_size)
        self.parameters = plain.num_params()
        self.flops_per_token = plain.flops_per_token(config.train.seq_len)
        self.auxiliary, self.auxiliary_sums = plain.auxiliary, plain.auxiliary_sums
        self.loss_weights = torch.tensor([1.0, *self.auxiliary.values()], device=world.device)
        self.shapes = checkpoint.shapes_of(plain)
        matrices = parallel.matrix_names(plain)
        float8.convert(plain, config)
        prepare_blocks(plain, config)
        self.model: nn.Module = parallel.parallelize(plain, config.parallel, world.mesh)
        self.optimizer = parallel.build_optimizer(self.model, config, matrices)
        #: Forward and backward of a step.
        self.work: Callable[..., Tensor] = self._forward_backward
        if config.train.cuda_graph:
            self.work = sw.GraphedStep(self.model, self._forward_backward)
        self.position = checkpoint.Position(step=0, samples=0)
        self.recompiles = Recompiles()
        self.peak_memory = 0  # bytes held at most by this rank

    # -- one step

    def train_step(self, stop: StopRequest) -> StepResult:
        """Forward and backward over the step's micro-batches, then one optimizer step.

        Raises NonFiniteError, on all ranks, where loss or norm is not finite: before weights are touched, unless the
        optimizer steps in backward.
        """
        train, step = self.config.train, self.position.step
        step_tokens = train.global_batch * train.seq_len
        started = time.perf_counter()
        batches = [tensor for number in range(self.micro_batches) for tensor in self._micro_batch(number)]
        data_seconds = time.perf_counter() - started
        rate = learning_rate(step, train.steps, self.config.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with parallel.parallel_loss(self.config.parallel):
            loss_sums = self.work(*batches)
        norm = parallel.clip_gradients(self.model, self.config)
        (loss, *others), stop_signal = self._agree(loss_sums / step_tokens, stop)
        auxiliary = dict(zip(self.auxiliary, others, strict=True))
        grad_norm = None if norm is None else float(norm)
        result = StepResult(loss, grad_norm, data_seconds, stop_signal, auxiliary)
        if not (math.isfinite(loss) and (grad_norm is None or math.isfinite(grad_norm))):
            told, updated = (
                (grad_norm, "nothing") if grad_norm is not None else ("not known", "what was reached")
            )
            raise NonFiniteError(
                f"step {step + 1}: expected a finite loss and gradient norm, found loss {loss}, norm "
                f"{told}; {updated} was updated. Try a lower optimizer.lr or a longer "
                "optimizer.warmup_steps"
            )
        self.optimizer.step()
        float8.prepare_scales(self.model, self.config)
        self.optimizer.zero_grad(set_to_none=True)
        self.position = checkpoint.Position(step + 1, self.position.samples + train.global_batch)
        return result

    def _forward_backward(self, *batches: Tensor) -> Tensor:
        """Inputs and targets [B, S] of one micro-batch after another; returns the losses summed over all tokens:
        cross-entropy, then the auxiliary ones, float64 [1 + auxiliaries]."""
        train = self.config.train
        step_tokens = train.global_batch * train.seq_len
        loss_sums = torch.zeros(1 + len(self.auxiliary), dtype=torch.float64, device=self.world.device)
        for first in range(0, len(batches), 2):
            last = first + 2 == len(batches)
            reduced = last or train.accumulate == "communicate"
            with parallel.gradient_sync(self.model, wanted=reduced, last=last):
                sums = self._summed_losses(batches[first], batches[first + 1])
                # Engines average gradients over the ranks; the sum over all tokens by their global count is wanted.
                ((sums * self.loss_weights).sum() * (self.world.data_size / step_tokens)).backward()
            loss_sums += sums.detach()
        return loss_sums

    def _micro_batch(self, number: int) -> tuple[Tensor, Tensor]:
        train = self.config.train
        share = train.global_batch // self.world.data_size
        first = self.position.samples + self.world.data_rank * share + number * train.micro_batch
        inputs_BS, targets_BS = batch(
            self.corpus, self.config.run.seed, first, train.micro_batch, train.seq_len
        )
        return inputs_BS.to(self.world.device), targets_BS.to(self.world.device)

    def _summed_losses(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Cross-entropy, then the losses named in `auxiliary`, summed over the tokens: float32."""
        if not self.auxiliary:
            return self._losses(inputs_BS, targets_BS).sum()[None]
        with parallel.compute_precision(self.config.parallel, self.world.device):
            logits_BSV, extras = self.model(inputs_BS, extras=True)
        sums = self.auxiliary_sums(extras, targets_BS)
        return torch.stack(
            [cross_entropy(logits_BSV, targets_BS).sum(), *(whole(sums[name]) for name in self.auxiliary)]
        )

    def _losses(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Cross-entropy of every token, float32 [B * S]."""
        with parallel.compute_precision(self.config.parallel, self.world.device):
            logits_BSV = self.model(inputs_BS)
        return cross_entropy(logits_BSV, targets_BS)

    def _agree(self, shares: Tensor, stop: StopRequest) -> tuple[list[float], int]:
        """Sum the ranks' shares of the losses and, in the same reduction, the signals they have seen.

        Signals reach ranks at different moments; by their sum all stop after the same step.
        """
        seen = [float(stop.wanted == signal.SIGINT), float(stop.wanted == signal.SIGTERM)]
        totals = torch.cat([shares, torch.tensor(seen, dtype=torch.float64, device=shares.device)])
        dist.all_reduce(totals)
        *losses, interrupts, terminations = totals.tolist()
        losses = [loss / self.world.tensor for loss in losses]  # which ranks of the same data have each
        if interrupts:
            return losses, signal.SIGINT
        return losses, signal.SIGTERM if terminations else 0

    # -- between steps

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the validation windows, the same ones every time and for any number of ranks."""
        train, world = self.config.train, self.world
        windows = self.corpus.windows(train.seq_len, "validation")
        wanted = min(windows, self.config.validation.batches * train.global_batch)
        rounds = math.ceil(wanted / (world.data_size * train.micro_batch))
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        self.model.eval()
        for number in range(rounds):
            first = (number * world.data_size + world.data_rank) * train.micro_batch
            # Every rank runs the same number of passes, as sharded engines must; beyond the end on windows that
            # do not count.
            count = max(0, min(train.micro_batch, wanted - first))
            start = first if count else 0
            inputs, targets = batch(
                self.corpus, VALIDATION_SEED, start, count or 1, train.seq_len, split="validation"
            )
            with parallel.parallel_loss(self.config.parallel):
                losses = self._losses(inputs.to(world.device), targets.to(world.device))
            total += losses.double().sum() if count else 0.0
        self.model.train()
        parallel.free_gathered(self.model)
        dist.all_reduce(total)
        return float(total) / world.tensor / (wanted * train.seq_len)

    @torch.no_grad()
    def sample(self) -> tuple[str, str]:
        """A prompt from the corpus and what the model makes of it. Ranks run in step, so any size of model fits."""
        source = self.corpus.validation if len(self.corpus.validation) >= PROMPT_BYTES else self.corpus.train
        # Decoding and encoding again drops a character cut in half at either end.
        prompt = decode(source[:PROMPT_BYTES]).strip("\ufffd")
        torch.compiler.set_stance("force_eager")  # every token is of another length
        tokens = sample(
            self.model, encode(prompt), count=self.config.run.sample_tokens, temperature=0.8, top_k=50, seed=0,
            context=self.config.train.seq_len, device=self.world.device, multiple=self.world.tensor,
        )  # fmt: skip
        torch.compiler.set_stance("default")
        parallel.free_gathered(self.model)
        return prompt, decode(tokens)

    def save(self, folder: RunFolder, reporter: metrics.Reporter) -> None:
        keep = self.config.checkpoint.keep
        checkpoint.save(folder.checkpoints, self.model, self.optimizer, self.position, keep, reporter.say)

    def load(self, folder: RunFolder, reporter: metrics.Reporter) -> None:
        """Go on from the run's newest whole checkpoint."""
        self.position = checkpoint.load_newest(
            folder.checkpoints, self.model, self.optimizer, self.shapes, reporter.say
        )


# ---------------------------------------------------------------------------------------------------------------
# The whole job


def train(config: Config, folder: RunFolder, corpus: Corpus, world: World, resume: bool) -> int:
    """Run the job to its last step, or to the signal that stops it. Returns the exit status.

    Until the model is there a signal ends the job as it ends any program: there is nothing to save.
    """
    START.doing(f"building the model of {config.model.shape().parameters:,} parameters")
    if resume:
        check_same_corpus(folder, corpus.sha256)
    with metrics.Reporter([metrics.Lines(0, 1)] if world.is_first else []) as notices:
        if resume and world.is_first and (changes := changes_in_words(folder.config(), config)):
            notices.say(changes)
        trainer = Trainer(config, world, corpus)
        if resume:
            notices.say(f"reading the newest checkpoint in {folder.checkpoints}")
            with START.left_to_others():
                trainer.load(folder, notices)
    done = trainer.position.step
    if done >= config.train.steps:
        raise UserError(
            f"train.steps: expected more than the {done} steps {folder.path} has done, found {config.train.steps}; "
            "give more steps to go on"
        )
    START.doing("running the first step")
    with StopRequest() as stop:
        record = open_record(trainer, folder) if world.is_first else None
        with metrics.Reporter(open_sinks(config, folder, done) if world.is_first else []) as reporter:
            reporter.say(opening_line(trainer, folder))
            try:
                ended_by = run_steps(trainer, folder, reporter, stop)
            except BaseException:
                if record is not None:
                    record.close("failed", trainer.position.step, {})
                raise
        return conclude(trainer, folder, record, ended_by)


def run_steps(trainer: Trainer, folder: RunFolder, reporter: metrics.Reporter, stop: StopRequest) -> int:
    """Steps, validations and checkpoints until the end or a signal; returns the signal, 0 for none.

    The state is saved when this returns.
    """
    config, device = trainer.config, trainer.world.device
    steps_of_session = 0
    while True:
        started = time.perf_counter()
        with memory_history(trainer, folder), trainer.recompiles.step():
            result = trainer.train_step(stop)
        seconds = time.perf_counter() - started
        START.end()
        step = trainer.position.step
        leaving = result.stop != 0 or step == config.train.steps
        validation = None
        if due(step, config.validation.every) or (step == config.train.steps and config.validation.every):
            validation = trainer.validate()
        memory = metrics.measure_memory(device)
        trainer.peak_memory = max(trainer.peak_memory, memory.reserved)
        reporter.step(step_record(trainer, result, seconds, validation, memory))
        steps_of_session += 1
        if (
            steps_of_session == REPORTED
            and trainer.world.is_first
            and config.parallel.engine == "shardwright"
        ):
            reporter.say(report_memory(trainer, folder))
        if leaving or due(step, config.checkpoint.every):
            trainer.save(folder, reporter)
        if leaving:
            return result.stop if step < config.train.steps else 0


@contextmanager
def memory_history(trainer: Trainer, folder: RunFolder) -> Iterator[None]:
    """Record what this rank's GPU allocates and frees in the coming step, if that was asked for; also if it fails."""
    step = trainer.position.step + 1
    if step not in trainer.config.train.memory_snapshot:
        yield
        return
    path = folder.memory_history(step, trainer.world.rank)
    record_memory_history(True)
    try:
        yield
    finally:
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            dump_memory_history(str(path))
        record_memory_history(False)


REPORTED = 3
"""The step of a session after which its memory is reported: planned, and run once by the plan."""


def report_memory(trainer: Trainer, folder: RunFolder) -> str:
    """Write what this rank's memory is used for, and the plan if there is one, into the folder; return one line."""
    found = sw.memory_report(trainer.model, trainer.optimizer)
    write_text(folder.memory_file, f"{found}\n")
    line = f"memory: parameters {in_units(found.shards + found.rest)}, optimizer {in_units(found.optimizer)}"
    if found.peak is not None and found.peak_at is not None:
        unit, kind = found.peak_at
        line += f", leased in a step at most {in_units(found.peak)}, with {unit}'s {kind}"
    if found.plan is not None:
        write_json(folder.plan_file, found.plan.as_dict())
        with writing(folder.plan_picture):
            report.memory_plan(found.plan, folder.plan_picture, trainer.config.run.name)
        line += f"; {found.memory} of {in_units(found.plan.nbytes)}"
    return f"{line}; see {folder.memory_file}"


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def step_record(
    trainer: Trainer, result: StepResult, seconds: float, validation: float | None, memory: metrics.Memory
) -> metrics.StepRecord:
    config, world, position = trainer.config, trainer.world, trainer.position
    tokens_per_second = config.train.global_batch * config.train.seq_len / seconds
    flops_per_second = tokens_per_second * trainer.flops_per_token / world.size
    peak = metrics.peak_flops(metrics.device_name(world.device), config.parallel.param_dtype)
    return metrics.StepRecord(
        step=position.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=learning_rate(position.step - 1, config.train.steps, config.optimizer),
        samples=position.samples,
        seconds=seconds,
        data_seconds=result.data_seconds,
        tokens_per_second=tokens_per_second,
        flops_per_second=flops_per_second,
        mfu=None if peak is None else flops_per_second / peak,
        memory_active=memory.active,
        memory_reserved=memory.reserved,
        memory_total=memory.total,
        validation_loss=validation,
        balance_loss=result.auxiliary.get("balance"),
        mtp_loss=result.auxiliary.get("mtp"),
    )


def open_sinks(config: Config, folder: RunFolder, steps_done: int) -> list[metrics.Sink]:
    steps, every = config.train.steps, config.log.every
    console = Console()
    if console.is_terminal:
        START.end()  # a bar moves from its beginning on
    sinks: list[metrics.Sink] = [metrics.JsonLines(folder.metrics_file, steps_done)]
    if config.log.tensorboard:
        sinks.append(metrics.TensorBoard(folder.tensorboard, steps_done, every))
    sinks.append(
        metrics.Bar(steps, steps_done, every, console) if console.is_terminal else metrics.Lines(steps, every)
    )
    return sinks


def open_record(trainer: Trainer, folder: RunFolder) -> RunRecord:
    corpus, parallel_config, world = trainer.corpus, trainer.config.parallel, trainer.world
    facts = {
        "parameters": trainer.parameters,
        "flops_per_token": trainer.flops_per_token,
        "vocab_size": corpus.vocab_size,
        "corpus": {
            "sha256": corpus.sha256,
            "train_tokens": len(corpus.train),
            "validation_tokens": len(corpus.validation),
        },
    }
    session = Session(
        start=now(), from_step=trainer.position.step, engine=parallel_config.engine, ranks=world.size,
        device=world.device.type, device_name=metrics.device_name(world.device), threads=torch.get_num_threads(),
        param_dtype=parallel_config.param_dtype, reduce_dtype=parallel_config.reduce_dtype, versions=versions(),
    )  # fmt: skip
    return RunRecord(folder, trainer.config, facts, session)


def opening_line(trainer: Trainer, folder: RunFolder) -> str:
    world, config = trainer.world, trainer.config
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    start = f"from step {trainer.position.step}" if trainer.position.step else "from the start"
    return (
        f"{config.run.name}: {trainer.parameters:,} parameters, engine {config.parallel.engine} on {ranks} "
        f"({metrics.device_name(world.device)}), {len(trainer.corpus.train):,} training tokens, {start}; "
        f"folder {folder.path}"
    )


def conclude(trainer: Trainer, folder: RunFolder, record: RunRecord | None, ended_by: int) -> int:
    """After the last step: note how it ended, draw, sample, print the summary. Returns the exit status."""
    memory = torch.tensor(trainer.peak_memory, device=trainer.world.device)
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    sampled = trainer.sample() if trainer.config.run.sample_tokens and not ended_by else None
    if record is None:
        return 128 + ended_by if ended_by else 0
    records = metrics.read_records(folder.metrics_file)
    results = {**report.results(records), "peak_memory": int(memory)}
    if trainer.config.train.compile != "none":
        results |= {"graphs": trainer.recompiles.graphs, "recompiles": trainer.recompiles.later}
    record.close("interrupted" if ended_by else "finished", trainer.position.step, results)
    with writing(folder.picture):
        report.loss_curve(records, folder.picture, trainer.config.run.name)
    if ended_by:
        print(
            f"stopped by {signal.Signals(ended_by).name} after step {trainer.position.step}, which is saved; "
            f"to go on:\n  {resume_command(folder, trainer.world.size)}",
            flush=True,
        )
        return 128 + ended_by
    text = summary(trainer, folder, results, sampled)
    write_text(folder.summary_file, text)
    print(text, end="", flush=True)
    return 0


def summary(
    trainer: Trainer, folder: RunFolder, results: Mapping[str, Any], sampled: tuple[str, str] | None
) -> str:
    drawn = []
    if sampled is not None:
        prompt, continuation = map(printable, sampled)
        drawn = [f"  sample          {prompt!r} ->", *("    " + line for line in continuation.split("\n"))]
    validation = results["validation_loss"]
    compiled = []
    if "graphs" in results:
        later = f"{results['recompiles']} of them after step {Recompiles.WARM_UP}"
        compiled = [f"  compiled        {results['graphs']} graphs, {later}"]
    lines = [
        "",
        f"done: {trainer.position.step} steps, {trainer.position.samples * trainer.config.train.seq_len:,} tokens",
        f"  loss            {results['first_loss']:.4f} -> {results['train_loss']:.4f}",
        f"  validation      {'none' if validation is None else f'{validation:.4f}'}",
        f"  tokens/s        {results['tokens_per_second']:,.0f} (median)",
        f"  peak memory     {metrics.gib(results['peak_memory'])} GiB on the fullest rank",
        *compiled,
        f"  checkpoint      {checkpoint.step_folder(folder.checkpoints, trainer.position.step)}",
        f"  loss curve      {folder.picture}",
        *drawn,
        "",
    ]
    return "\n".join(lines)


def printable(text: str) -> str:
    """The text without characters that a terminal would obey: a model may produce any byte."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
