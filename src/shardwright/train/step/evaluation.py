"""A model in training, looked at between steps: validation, a sample of text, and whether its code fits the trainer.

Every function is called by all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.activations import losses_of_tokens
from shardwright.context import Split, shard, whole_samples
from shardwright.engine import heartbeat
from shardwright.engine.comm import noted
from shardwright.engine.extend import ExtensionError
from shardwright.train.config.catalog.records import of_sets
from shardwright.train.data.dataset import validation_samples
from shardwright.train.data.samples.batch import Batch
from shardwright.train.data.samples.stream import Stream
from shardwright.train.models import outputs
from shardwright.train.models.language_model import sees_later_tokens
from shardwright.train.models.sampling import NonFiniteLogitsError, sample
from shardwright.train.parallel import recipe
from shardwright.train.step.hooks import means
from shardwright.train.step.numerics.not_finite import marks, wrong_ranks
from shardwright.train.step.trainer import Trainer

CHECKED_TOKENS = 8
"""Length of the sample that shows whether a model is causal."""
ABOUT_ZERO, NOISE = 1e-4, 0.02
"""The values of parameters that hide what a model computes, such as scales of layers, and the size of those instead."""


class Sample(NamedTuple):
    """A prompt of the data, the text that the model puts after it, and the one in the data if that is to be learnt."""

    prompt: str
    generated: str
    expected: str | None


class Validation(NamedTuple):
    """The mean loss over the validation samples, the losses on sets by their names, the metrics of hooks by theirs, and
    by the names of figures the ranks in words whose part is nan or infinite."""

    loss: float
    losses: dict[str, float]
    metrics: dict[str, float]
    not_finite: dict[str, str]


@torch.no_grad()
def check_model(trainer: Trainer) -> None:
    """Run a model whose code is not ours on a few tokens. Raises ExtensionError if it returns no logits, if its own
    loss cannot be used, if a token sees a later one, which is the target that it shall predict, or if its tokens have
    other results where ranks divide samples."""
    if not trainer.facts.foreign:
        return
    _check_alone(trainer)
    if trainer.world.context is not None:
        _check_divided(trainer, trainer.world.context)


def _check_alone(trainer: Trainer) -> None:
    """Run it on this rank alone."""
    if trainer.losses.has_loss:
        _check_loss(trainer)
        if not trainer.config.run.sample_tokens:
            return
    owner, vocabulary = trainer.facts.in_words, trainer.dataset.vocab_size
    length = min(CHECKED_TOKENS, trainer.config.train.seq_len)
    tokens = torch.arange(length, device=trainer.world.device).remainder(vocabulary).unsqueeze(0)
    precision = trainer.engine.compute_precision(trainer.world.device)
    # Another length than in training.
    with _tried(trainer.model), precision, whole_samples(trainer.world.context):
        try:
            logits = outputs.called(f"forward of {owner}", trainer.model, tokens)
            outputs.check_logits(owner, logits, tokens, vocabulary)
        except ExtensionError as error:
            if not trainer.losses.has_loss:
                raise
            raise ExtensionError(
                f"{error}. A model with its own loss needs logits only for the sample after the last step: or set "
                "run.sample_tokens to 0"
            ) from error
        if trainer.config.train.loss_chunks:
            _check_chunks(trainer, tokens, logits)
        # A loss of its own may have other targets than the next token.
        later = (
            length > 1
            and not trainer.losses.has_loss
            and sees_later_tokens(trainer.model, tokens, vocabulary)
        )
    trainer.engine.free_gathered(trainer.model)
    if later:
        raise ExtensionError(
            f"{owner} is not causal: another last token changes the logits of tokens before it. Each token would "
            "see the token that it shall predict, and the loss would mean nothing. Give its attention a causal mask"
        )


def _check_chunks(trainer: Trainer, tokens: Tensor, logits: Tensor) -> None:
    """Compare the losses of logits that are never whole with those of the whole ones."""
    owner = trainer.facts.in_words
    batch = Batch(tokens, tokens, None, None)
    found = outputs.called(f"train.loss_chunks: forward of {owner}", trainer.losses.of_tokens, batch)
    expected = losses_of_tokens(logits, tokens)
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2):
        raise ExtensionError(
            f"train.loss_chunks: the losses of {owner} differ if its logits are computed in chunks, by "
            f"{(found - expected).abs().max().item():.3g}. Its code must use the result of its output layer for "
            "nothing but the logits; or set train.loss_chunks to 0"
        )


def _check_divided(trainer: Trainer, split: Split) -> None:
    """Compare the losses of a few tokens that ranks divide with those of a rank that has all of them."""
    world, length = trainer.world, trainer.config.train.seq_len
    length = min(CHECKED_TOKENS // 2, length // split.ranks) * split.ranks
    tokens = torch.arange(length + 1, device=world.device).remainder(trainer.dataset.vocab_size)
    batch = Batch(tokens[None, :-1], tokens[None, 1:], None, None)
    forward = f"forward of {trainer.facts.in_words}"
    with _tried(trainer.model), _noise_for_zeros(trainer.model):
        own = outputs.called(forward, trainer.losses.of_tokens, batch).float().flatten()
        with whole_samples(split):
            whole = trainer.losses.of_tokens(batch).float().flatten()
        trainer.engine.free_gathered(trainer.model)
    if trainer.losses.has_loss:  # a sum
        with noted("all-reduce of checked losses", split.group):
            dist.all_reduce(own, group=split.group)
    else:
        whole = shard(whole, split, dim=0)
    rounding = 1e-5 if trainer.config.parallel.param_dtype == "float32" else 0.01
    differs = (own - whole).abs().max() > rounding * whole.abs().max()
    differs = differs.float()
    with noted("all-reduce of a check", None):
        dist.all_reduce(differs)
    if differs.item():
        raise ExtensionError(
            f"{trainer.facts.in_words} has other losses where {split.ranks} ranks divide a sample than where one rank "
            "has it: its tokens see others outside of torch.nn.functional.scaled_dot_product_attention and "
            "shardwright.context.attention, or it counts positions from the first token of a rank. Take the argument "
            "positions in forward, or call shardwright.context.positions; or set parallel.context to 1"
        )


def _check_loss(trainer: Trainer) -> None:
    """Compute the model's own loss once, of samples of the size that steps have."""
    batch = trainer.dataset.train.batch(0, trainer.config.train.micro_batch).to(trainer.world.device)
    with _tried(trainer.model):
        outputs.called(f"loss(batch) of {trainer.facts.in_words}", trainer.losses.of_tokens, batch)
    trainer.engine.free_gathered(trainer.model)


@contextmanager
def _tried(model: nn.Module) -> Iterator[None]:
    """The model in eval mode. Nothing is compiled for one pass."""
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train()


@contextmanager
def _noise_for_zeros(model: nn.Module) -> Iterator[None]:
    """Parameters have noise inside where they are about 0: a head that begins at 0 hides what layers compute.

    Afterwards each has its values again. Until then those with such values have a copy.
    """
    before: list[tuple[Tensor, Tensor]] = []
    locals_ = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    floats = [(number, own) for number, own in enumerate(locals_) if own.is_floating_point()]
    about_zero = [(own.detach().abs() <= ABOUT_ZERO).any() for _, own in floats]
    hidden = torch.stack(about_zero).tolist() if about_zero else []  # one read for all of them
    for (number, own), is_hidden in zip(floats, hidden, strict=True):
        if not is_hidden:
            continue
        before.append((own, own.detach().clone()))
        zeros = own.detach().abs() <= ABOUT_ZERO
        # Ranks with the same values draw the same noise.
        generator = torch.Generator(own.device).manual_seed(number)
        own.add_(torch.randn(own.shape, generator=generator, device=own.device).to(own.dtype) * zeros * NOISE)
    try:
        yield
    finally:
        for own, values in before:
            own.copy_(values)


@heartbeat.during(heartbeat.VALIDATION)
@torch.no_grad()
def validate(trainer: Trainer) -> Validation:
    """Mean loss over the validation samples, the same on each set, and the metrics of hooks over all samples. The
    samples are the same ones every time and for any number of ranks."""
    world, dataset, names = trainer.world, trainer.dataset, trainer.hooks.validation_metrics
    assert dataset.validation is not None
    streams = [dataset.validation, *dataset.validation_sets.values()]
    trainer.model.eval()
    whole, *sets = (
        _totals(trainer, stream, () if number else names) for number, stream in enumerate(streams)
    )
    trainer.model.train()
    trainer.engine.free_gathered(trainer.model)
    totals = torch.cat([whole[:1], *sets, whole[1:]])
    row = torch.cat([totals.flatten(), marks(totals, world.rank)])
    with noted("all-reduce of the validation loss", None):
        dist.all_reduce(row)
        figures = row.tolist()
    sums, marked = figures[: totals.numel()], figures[totals.numel() :]
    losses = [
        loss_sum
        / world.dims.with_same_loss
        / stream.trained(0, validation_samples(trainer.config.for_data, stream))
        for stream, loss_sum in zip(streams, sums[::2], strict=False)  # the sums of metrics follow
    ]
    by_set = dict(zip(dataset.validation_sets, losses[1:], strict=True))
    words = ["validation loss", *of_sets(by_set), *(f"validation {name}" for name in names)]
    return Validation(
        losses[0],
        by_set,
        means(names, sums[2 * len(streams) :]),
        wrong_ranks(words, marked, world.size),
    )


def _totals(trainer: Trainer, stream: Stream, names: Sequence[str]) -> Tensor:
    """Return this rank's sums and counts over the validation samples of a stream, float64 [1 + metrics, 2]: of the
    loss, then of the metrics. The count of the loss stays 0: all ranks know it."""
    train, world = trainer.config.train, trainer.world
    samples = validation_samples(trainer.config.for_data, stream)
    rounds = math.ceil(samples / (world.data_size * train.micro_batch))
    totals = torch.zeros(1 + len(names), 2, dtype=torch.float64, device=world.device)
    for number in range(rounds):
        heartbeat.at(heartbeat.VALIDATION)
        first = (number * world.data_size + world.data_rank) * train.micro_batch
        # Every rank runs the same number of passes, as sharded engines must; beyond the end on samples that
        # do not count.
        count = max(0, min(train.micro_batch, samples - first))
        batch = stream.batch(first if count else 0, count or 1)
        if world.device.type != "cpu":  # from other memory of the host the copy would make it wait
            batch = batch.pinned()
        batch = batch.to(world.device, non_blocking=True)
        with recipe.parallel_loss(trainer.world.dims):
            losses, logits = trainer.losses.of_tokens_and_logits(batch, logits=bool(names))
        if not count:
            continue
        totals[:1, 0] += losses.double().sum()
        if logits is not None:
            targets = batch.targets if world.context is None else shard(batch.targets, world.context)
            totals[1:] += world.figures(trainer.hooks.validate(logits, targets)).view(-1, 2)
    return totals


@heartbeat.during(heartbeat.SAMPLE)
@torch.no_grad()
def sample_text(trainer: Trainer) -> Sample:
    """Return a prompt from the data and what the model makes of it. Ranks run in step, so any size of model fits.

    The text may end early, see `sample`. It is the reason in brackets if the logits are not finite.
    """
    tokenizer, (ids, answer) = trainer.dataset.tokenizer, trainer.dataset.question()
    if answer and answer[-1] in tokenizer.ends:
        answer = answer[:-1]
    prompt, expected = tokenizer.decode(ids), None if answer is None else tokenizer.decode(answer)
    try:
        # Every text is of another length. Ranks that divide samples compute the same one.
        with torch.compiler.set_stance("force_eager"), whole_samples(trainer.world.context):
            tokens = sample(
                trainer.model, torch.tensor(ids), count=trainer.config.run.sample_tokens, temperature=0.8,
                top_k=50, seed=0, context=trainer.config.train.seq_len, device=trainer.world.device,
                multiple=trainer.world.dims.sequence_multiple, ends=tokenizer.ends,
            )  # fmt: skip
    except NonFiniteLogitsError as error:
        return Sample(prompt, f"(none: {error})", expected)
    finally:
        trainer.engine.free_gathered(trainer.model)
    return Sample(prompt, tokenizer.decode(tokens), expected)
