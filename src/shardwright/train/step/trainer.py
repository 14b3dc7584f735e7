"""A model in training on one rank: steps, validation, samples, and where the run stands.

It reads as if there were one engine and one rank: engines differ in `parallel/engines`. The position of a
run is one integer, the samples seen: step s takes samples [s*G, (s+1)*G) of the order, and each rank a contiguous part
of them, so any number of ranks sees the same sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.activations import HostMemoryError
from shardwright.checkpoint import seed_generators
from shardwright.engine import RankGroup, heartbeat
from shardwright.optim import ParameterNorms
from shardwright.train.config import Config
from shardwright.train.config.catalog.hooks import Fault, StepInProgress, TrainerHook
from shardwright.train.config.conflicts.configurations import LENGTH
from shardwright.train.config.conflicts.table import refuse
from shardwright.train.data.dataset import Dataset, extended
from shardwright.train.errors import UserError, as_user_errors
from shardwright.train.finetune import adapters, finetuning
from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel import float8, recipe
from shardwright.train.parallel.activations import Recompiles, prepare_blocks, prepare_loss
from shardwright.train.parallel.checks import check_batch_fits
from shardwright.train.parallel.engines import engine_of
from shardwright.train.parallel.model_conflicts import BuiltJob, check_model_goes_with
from shardwright.train.parallel.recipe import check_same_model
from shardwright.train.parallel.world import World
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.folder import RunFolder, checkpoints_of
from shardwright.train.run.position import FolderOrUrl, Position
from shardwright.train.step import loading
from shardwright.train.step.account.clock import clock_for
from shardwright.train.step.feed import Feed, Untrained, batches_of, tensors_of
from shardwright.train.step.hooks import Hooks, JobOfHooks
from shardwright.train.step.loading import LoadedRun
from shardwright.train.step.losses import Losses
from shardwright.train.step.model_facts import ModelFacts
from shardwright.train.step.numerics import detect, verifying
from shardwright.train.step.numerics.not_finite import check_rates
from shardwright.train.step.reduction import Agreed, OwnPart, Reduction, StepResult, add_up
from shardwright.train.step.saving.saves import Saves


class StepData(NamedTuple):
    """The data of a step on this rank.

    Attributes:
        tensors: of its micro-batches, see `tensors_of`.
        counts: see `Losses.counts`.
        seconds: the wait for it.
        untrained: global batches before this one, of which no step is made.
    """

    tensors: list[Tensor]
    counts: Tensor
    seconds: float
    untrained: Untrained | None


class StepGradients(NamedTuple):
    """The result of forward and backward on this rank, beside the gradients.

    Attributes:
        shares: this rank's parts of the losses, float64 [1 + auxiliaries].
        norm: the gradient norm over all ranks before clipping, 0-d; None with an optimizer in backward.
        norms: the norms of which it is made, if this step records norms by unit.
        again: does forward and backward once more.
    """

    shares: Tensor
    norm: Tensor | None
    norms: ParameterNorms | None
    again: Callable[[], Tensor]


@dataclass(frozen=True)
class StartedStep:
    """A step whose work is queued on the device, and whose numbers the host has not read.

    Attributes:
        number: of the optimizer step, from 1.
        data, gradients: its data, and the result of forward and backward.
        first: its first sample.
        faults: what this rank's hooks say about it.
        reduction: what all ranks must know of it.
        rate: of the optimizer's first group.
        left_out: float32, 0-d, on the device: 1 if the device leaves this step out, or one before it, else 0. None: the
            optimizer has not stepped, because the host reads the numbers first.
        buffers: the model's buffers with copies from before forward.
    """

    number: int
    data: StepData
    gradients: StepGradients
    faults: Sequence[Fault]
    reduction: Reduction
    rate: float
    first: int
    left_out: Tensor | None = None
    buffers: Sequence[tuple[Tensor, Tensor]] = ()


#: Steps of a session that are read before the next one begins, because hooks of the trainer note one of them.
FIRST_STEPS = 4


class Trainer:
    """A model in training on one rank. Every method is called by all ranks together."""

    def __init__(
        self,
        config: Config,
        world: World,
        dataset: Dataset,
        reads_weights: bool = True,
        hooks: Hooks | None = None,
    ) -> None:
        """`reads_weights`: begin with the model's stored weights, if any. Not for a run that `load` continues."""
        self.world = world
        self.clock = clock_for(world.device, config.train.cuda_graph, config.fault.check == "before_step")
        config.train.accumulation_steps(world.data_size)
        self._set_data(config, dataset)
        config = self.config
        self.hooks = hooks or Hooks()
        self.engine = engine_of(config.parallel)
        check_batch_fits(config.train, dataset.windows)
        seed_generators(config.run.seed)  # equal on all ranks, which is what makes their models equal
        building = config.for_building
        plain = recipe.build_for(building, dataset.vocab_size, reads_weights, world.mesh)
        check_model_goes_with(config, plain, self.hooks.validation_metrics)
        self.facts = ModelFacts.of(plain, config.model, config.train.seq_len)
        self.hooks.check_losses(plain.auxiliary, self.facts.in_words)
        check_same_model(plain, world.mesh, self.facts.in_words)
        matrices = recipe.matrix_names(plain)
        float8.convert(plain, building)
        self._gathers_float8 = building.gathers_float8
        recipe.divide_samples(plain, config.model.shape(), world.context)
        are_cut = bool(world.dims.axes_of("layers"))
        prepare_blocks(plain, config.activations, config.train.compile, are_cut)
        chunked = prepare_loss(plain, config.train.loss_chunks)
        self.model: nn.Module = recipe.parallelize(plain, config.parallel, world.mesh, reads_weights)
        self.losses = Losses(
            config.train, self.facts.in_words, BuiltJob(config, plain).numbers_padding, world, self.engine, self.model,
            plain, dataset.vocab_size, chunked,
        )  # fmt: skip
        self.optimizer = recipe.build_optimizer(self.model, config.optimizer, config.parallel, matrices)
        #: Forward and backward of a step, once.
        self.forward_backward: Callable[..., Tensor] = self._forward_backward
        if config.train.cuda_graph:
            self.forward_backward = sw.GraphedStep(self.model, self._forward_backward)
        self.position = Position(step=0, samples=0)
        self.recompiles = Recompiles()
        #: The step after the one that `train_step` has returned, if it has begun; or the error with which it did not.
        self._following: StartedStep | Exception | None = None
        self._steps_begun = 0  #: in this session
        self._leaves = False  #: whether a rank has asked for the end of the run

    def open_hooks(
        self, reporter: Reporter, trainer_hooks: Sequence[TrainerHook] = (), loaded: LoadedRun | None = None
    ) -> None:
        """Set the hooks up, after `trainer_hooks`. They and random generators go on from the `loaded` checkpoint."""
        world = self.world
        job = JobOfHooks(
            self.config,
            self.model,
            self.optimizer,
            world.device,
            world.rank,
            world.size,
            reporter.say,
            lambda: self.position.step,
            self.hooks.end_run,
        )
        self.hooks.setup(job, trainer_hooks)
        if loaded is not None:
            self._load_rest(loaded, reporter)

    def _set_data(self, config: Config, dataset: Dataset) -> None:
        """Set the data, the configuration with the steps that `train.epochs` makes of it, and the feed of these steps.
        They change together, when a run that resumes has more data.

        Raises:
            UserError: the settings need a longer run, on all ranks.
        """
        train = config.train.with_steps_of(dataset.train.samples_of)
        self.dataset, self.config = dataset, config.model_copy(update={"train": train})
        if train.epochs:  # else the launcher has known the steps
            refuse(LENGTH, self.config)
        self.feed = Feed(
            self.config.train, self.config.data.workers, self.config.run.seed, self.world, dataset.train
        )

    def close(self) -> None:
        """End the threads that prepare batches."""
        self.feed.close()

    @property
    def state(self) -> detect.TrainingState:
        config = self.config
        return detect.TrainingState(
            config.fault, config.parallel, config.train, config.optimizer.in_backward, self.world, self.model,
            self.optimizer, self.position,
        )  # fmt: skip

    # -- one step

    @property
    def is_ahead(self) -> bool:
        """Whether the next step has begun, so that weights may be those after it."""
        return self._following is not None

    def train_step(self, stop: StopRequest, save_ended: bool = False) -> StepResult:
        """Forward and backward over the step's micro-batches, then one optimizer step.

        A global batch without a trained token has no gradient. The step is made of the next one that has some.

        `save_ended`: this rank knows that a checkpoint in the background is written or has failed.

        With a fault the position stays, and so do the weights, unless the optimizer steps in backward.

        With `fault.check = "after_step"` the next step has begun when this returns, see `is_ahead`, unless the state
        after this one is needed. An error of the next step is raised in its own call.
        """
        here, begun, self._following = self.position, self._following, None
        if isinstance(begun, Exception):
            raise begun
        ahead = self.config.fault.check == "after_step"
        started = begun or self._start(stop, save_ended, on_device=ahead)
        if ahead and self._goes_on_after(started.number):
            self._following = self._begun_after(started, stop, save_ended)
        agreed, left_out = started.reduction.read(self.clock), None
        if agreed.mark:
            # The device has left it out, and what came after it. Done again, its numbers decide what the run does.
            self._drop(started, here)
            started, left_out = self._start(stop, save_ended, on_device=False), agreed
            agreed = started.reduction.read(self.clock)
        return self._end(started, agreed, left_out)

    def _goes_on_after(self, step: int) -> bool:
        """Return whether the next step may begin before the host knows the numbers of this one: not if the state after
        this one is saved, validated, traced or recorded, and not if the run ends."""
        config = self.config
        periods = config.checkpoint.every, config.validation.every, config.validation.tasks_every
        first, last = config.profile.steps or (0, 0)
        recorded = any(step in (each - 1, each) for each in config.train.memory_snapshot)
        return not (
            step == config.train.steps
            or self._leaves
            or self._steps_begun < FIRST_STEPS
            or any(every and step % every == 0 for every in periods)
            or first - 1 <= step <= last
            or recorded
        )

    def _begun_after(
        self, before: StartedStep, stop: StopRequest, save_ended: bool
    ) -> StartedStep | Exception:
        """Return the step after one whose numbers are not known, or the error with which it failed: the step before it
        is reported first."""
        here, samples = self.position, before.first + self.config.train.global_batch
        self.position = replace(here, step=before.number, samples=samples)
        try:
            return self._start(stop, save_ended, on_device=True, before=before)
        except Exception as error:
            return error
        finally:
            self.position = here

    def _drop(self, started: StartedStep, position: Position) -> None:
        """Leave no trace of steps that the device has left out: of this one, which began at a position, and of the one
        after it."""
        self._following, self.position = None, position
        self.close()  # drops prefetched batches, so that the next one to be read is the first of this step
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, values in started.buffers:
                buffer.copy_(values)

    def _start(
        self,
        stop: StopRequest,
        save_ended: bool,
        on_device: bool,
        before: StartedStep | None = None,
    ) -> StartedStep:
        """Begin the step at the position, which is after the step `before` if that is not over. The position moves over
        global batches without a trained token.

        `on_device`: queue the optimizer's step, too. It changes nothing if numbers of this step or of `before` are
        wrong.
        """
        step = self.position.step + 1
        self._steps_begun += 1
        heartbeat.begin_step(step)
        ends_after = step + (on_device and self._goes_on_after(step))
        stop.take_effect_after(ends_after)
        data = self._next_data()
        buffers = [(each, each.detach().clone()) for each in self.model.buffers()] if on_device else []
        self._set_rates(self.config.optimizer.rate(step - 1, self.config.train.steps))
        self.hooks.before_step(step)
        check_rates(self.optimizer, step)
        gradients = self._compute_gradients(data)
        faults = self.hooks.faults(StepInProgress(step, gradients.norm, gradients.shares[0]))
        # A signal from here on is answered in the next step, and this one's thread may print that at once.
        stop.take_effect_after(ends_after + 1)
        part = OwnPart(
            shares=gradients.shares,
            flag=detect.flag(gradients.norm, self.world.device),
            norm=gradients.norm,
            data_seconds=data.seconds,
            signal=stop.signal_number,
            save_ended=save_ended,
            stops_early=self.hooks.stops_early,
            votes=[each.action for each in faults],
            sums=self.hooks.metrics(step),
            norms=gradients.norms,
        )
        reduction = add_up(self.world, part, self.hooks.step_metrics, self.clock)
        rate = float(self.optimizer.param_groups[0]["lr"])  # as a hook may have set it
        left_out = None
        if on_device:
            left_out = self._is_left_out(reduction, before)
            reduction = reduction.with_mark(left_out)
            self._step_optimizer(left_out)
        first = self.position.samples
        return StartedStep(step, data, gradients, faults, reduction, rate, first, left_out, buffers)

    def _is_left_out(self, reduction: Reduction, before: StartedStep | None) -> Tensor:
        """`StartedStep.left_out` of a step with these sums, after the step `before` if that is not over."""
        settings, wrong = self.config.fault, reduction.is_wrong
        if settings.on_spike != "ignore":
            losses = self.world.figures(self.position.past.losses)
            if before is not None:
                losses = torch.cat([losses, before.reduction.loss[None]])
            wrong = wrong | detect.may_be_spike(reduction.loss, losses[-settings.spike_window :], settings)
        if before is not None and before.left_out is not None:
            wrong = wrong | before.left_out.bool()
        return wrong.float()

    def _end(self, started: StartedStep, agreed: Agreed, left_out: Agreed | None) -> StepResult:
        """Return the result of a step whose numbers the host has read, which has its optimizer step now if it had none.

        `left_out`: its numbers when it was done first, and the device left it out; None if it was done once.
        """
        data = started.data
        if data.untrained is not None and self.position.samples != started.first:
            self.position = self.position.after_untrained(started.first, data.untrained.batches)
        fault = None
        if started.left_out is None:
            fault = self._fault(agreed, started.gradients, started.faults)
            if fault is None or agreed.norm is None:  # in backward most of it is done, and it ends here
                self._step_optimizer()
            self._free_gradients()
        repeat = None
        if fault is None:
            if left_out is not None:
                repeat = detect.repeat_of(self.state, left_out)
            batch, kept = self.config.train.global_batch, self.config.fault.losses_kept
            self.position = self.position.after_step(batch, agreed.losses[0], kept)
        heartbeat.end_step(self.position.step + 1)
        self._leaves = agreed.signal != 0 or agreed.stops_early
        if started.number == 1 and self.config.train.compile == "none":
            finetuning.check_called(self.model)
        loss, *others = agreed.losses
        auxiliary = dict(zip(self.losses.auxiliary, others, strict=True))
        return StepResult(agreed, loss, auxiliary, started.rate, fault, data.untrained, repeat)

    def _next_data(self) -> StepData:
        """Return the data of the next step. The position moves over global batches without a trained token."""
        heartbeat.at(heartbeat.DATA)
        self.clock.to("data")
        started = time.perf_counter()
        data, untrained = self.feed.next(self.position)
        if untrained is not None:
            self.position = self.position.after_untrained(data.first, untrained.batches)
        batches = [each.to(self.world.device, non_blocking=True) for each in data.batches]
        counts = self.losses.counts(data.trained)
        self.clock.to("host")
        return StepData(tensors_of(batches), counts, time.perf_counter() - started, untrained)

    def _set_rates(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _compute_gradients(self, data: StepData) -> StepGradients:
        """Forward and backward, reduced and clipped."""
        heartbeat.at(heartbeat.MODEL)
        arguments = self.losses.weights(data.counts), *data.tensors
        with (
            recipe.parallel_loss(self.world.dims),
            as_user_errors(HostMemoryError, prefix="activations.offload: "),
        ):
            if self.config.train.cuda_graph:  # which has forward inside
                self.clock.to("backward")
            loss_sums = self._verified_if_due(*arguments)
        heartbeat.at(heartbeat.CLIP)
        self.clock.to("optimizer")
        norm, norms = self.clip_gradients()
        self.clock.to("host")
        return StepGradients(loss_sums / data.counts, norm, norms, partial(self.forward_backward, *arguments))

    def clip_gradients(self) -> tuple[Tensor | None, ParameterNorms | None]:
        """Scale gradients down to `train.max_norm`; returns their norm before that, and the norms of which it is made
        in steps that record norms by unit. None: the optimizer has used the gradients already."""
        if self.config.optimizer.in_backward:
            return None, None
        limit = self.config.train.max_norm or float("inf")
        if self.config.log.records_unit_norms(self.position.step + 1):
            return self.engine.clip_with_units(self.model, limit)
        return self.engine.clip_gradients(self.model, limit), None

    def _fault(self, agreed: Agreed, gradients: StepGradients, votes: Sequence[Fault]) -> Fault | None:
        """Return the fault of the step on all ranks: of its numbers, or one that a hook has asked for. `votes`: of this
        rank's hooks."""
        with recipe.parallel_loss(self.world.dims):
            fault = detect.fault_of_step(self.state, agreed, gradients.shares, gradients.again)
        return fault or detect.fault_of_hooks(self.state, agreed, votes)

    def _step_optimizer(self, left_out: Tensor | None = None) -> None:
        """Step the optimizer. Its step changes nothing if `left_out`, on the device, is 1."""
        heartbeat.at(heartbeat.OPTIMIZER)
        self.clock.to("optimizer")
        flagged: Any = self.optimizer
        if left_out is not None:
            flagged.grad_scale, flagged.found_inf = None, left_out
        try:
            self.optimizer.step()
        finally:
            if left_out is not None:
                del flagged.grad_scale, flagged.found_inf
        if self._gathers_float8:
            float8.prepare_scales(self.model)
        if left_out is not None:
            self._free_gradients()

    def _free_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.clock.to("host")
        heartbeat.at(heartbeat.OUTSIDE)

    def _verified_if_due(self, *tensors: Tensor) -> Tensor:
        """Forward and backward of a step; twice if it is verified."""
        step, work = self.position.step + 1, partial(self.forward_backward, *tensors)
        if not self.config.fault.verifies(step):
            return work()
        trial = work
        if in_backward := self.config.optimizer.in_backward:
            trial = partial(self._forward_backward, *tensors, completes=False)
        graphed = self.config.train.cuda_graph
        return verifying.twice(self.model, self.optimizer, step, trial, work, in_backward, graphed)

    def _forward_backward(self, weights: Tensor, *tensors: Tensor, completes: bool = True) -> Tensor:
        """Return the tensors of one micro-batch after another, see `tensors_of`; returns the losses summed over the
        tokens: cross-entropy, then the auxiliary ones, float64 [1 + auxiliaries].

        Unless it `completes` the step, the last micro-batch is as those before it.
        """
        train = self.config.train
        batches = batches_of(tensors, self.dataset.train.separate)
        loss_sums = self.losses.zeros()
        to = self.clock.to if not train.cuda_graph else lambda part: None
        for number, batch in enumerate(batches):
            last = number + 1 == len(batches)
            reduced = last or train.accumulate == "communicate"
            if self.facts.draws:
                torch.manual_seed(self.feed.seed(self.position, number))
            part = 0 if self.world.context is None else self.world.context.rank
            adapters.set_samples(self.model, self.feed.samples(self.position, number), part)
            heartbeat.at(heartbeat.MODEL)
            with self.engine.gradient_sync(self.model, synchronise=reduced, last=last and completes):
                to("forward")
                sums = self.losses.sums(batch)
                to("backward")
                (sums * weights).sum().backward()
            loss_sums += sums.detach()
        return loss_sums

    # -- between steps

    @heartbeat.during(heartbeat.SAVE)
    def save(self, saves: Saves, last: bool = False) -> None:
        saves.save(self.model, self.optimizer, self.position, last, self.hooks.state_dict())

    @heartbeat.during(heartbeat.LOAD)
    def load(self, folder: RunFolder, reporter: Reporter) -> LoadedRun:
        """Go on from the run's newest whole checkpoint, with the documents that were appended to its data since.

        Returns the checkpoint, from which hooks and random generators go on in `open_hooks`.
        """
        self.close()
        checkpoints = checkpoints_of(folder, self.config.checkpoint)
        loaded = loading.load_newest(checkpoints, self.model, self.optimizer, reporter.say)
        self.position = loaded.position
        dataset, lines = extended(self.config.for_data, self.dataset, self.position.samples)
        steps = self.config.train.steps
        self._set_data(self.config, dataset)
        if (now := self.config.train.steps) != steps:
            lines.append(
                f"train.epochs = {self.config.train.epochs:g} makes {now:,} steps in all, {steps:,} before"
            )
        for line in lines:
            reporter.say(line)
        return loaded

    def skip(self) -> None:
        """Leave the samples of the next step out."""
        self.close()  # its loader ends where no sample was left out
        self.position = self.position.after_skip(self.config.train.global_batch)

    def rewind(self, checkpoints: FolderOrUrl, reporter: Reporter, latest: int, stop: int) -> None:
        """Go back to the newest whole checkpoint of step `latest` at most, and go on with sample `stop`."""
        self.close()
        loaded = loading.load_newest(checkpoints, self.model, self.optimizer, reporter.say, latest)
        self.position = loaded.position.after_rewind(self.position, stop)
        self._load_rest(loaded, reporter, goes_back=True)
        if self._gathers_float8:
            float8.prepare_scales(self.model)

    def _load_rest(self, loaded: LoadedRun, reporter: Reporter, goes_back: bool = False) -> None:
        """Let hooks and random generators go on from a checkpoint, of which the rest is loaded.

        Generators are last, since the model and the setup of hooks draw from them. Unless the run `goes_back`, the
        checkpoint need not have states of hooks, since hooks can be new.
        """
        if present_states := self.hooks.state_dict():
            states = loading.hook_states(loaded, present_states)
            missing = next((name for name in present_states if name not in states), None)
            if goes_back and missing is not None:
                raise UserError(
                    f"run.hooks: expected a state of hook {missing!r} in the checkpoint of step {self.position.step}, "
                    "to which the run goes back, found none; the hook was added later"
                )
            self.hooks.load_state_dict(states)
        if line := loading.continue_generators(loaded, self.config.run.seed, RankGroup()):
            reporter.say(line)
