"""Notices about settings that are allowed and look like a mistake: before step 1, and about the first loss.

Each notice names what was found, what it changes and what to do. Errors are elsewhere; nothing here ends a run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.train.config import DataConfig, ModelConfig
from shardwright.train.config.catalog.hooks import TrainerHook
from shardwright.train.config.catalog.kinds import base_of
from shardwright.train.config.catalog.losses import AUTO
from shardwright.train.config.catalog.records import StepRecord
from shardwright.train.config.shapes.foreign import HuggingFaceShape
from shardwright.train.config.values import BuildSettings
from shardwright.train.data.dataset import Dataset
from shardwright.train.data.samples.validation import cuts_document
from shardwright.train.data.statement import escaped
from shardwright.train.data.tokens import byte_tokenizer
from shardwright.train.data.tokens.tokenizers import Bytes, FromFile, Tokenizer
from shardwright.train.errors import UserError
from shardwright.train.finetune.peft_files import base_in
from shardwright.train.models.generation_settings import ends_of_export, tokenizer_beside
from shardwright.train.report.reporter import Reporter

if TYPE_CHECKING:
    from shardwright.train.step.trainer import Trainer

FAR = 3.0
"""Multiple of ln(V) from which a first loss is implausible. Logits of random weights with the standard deviation s add
about s^2 / 2 to ln(V): three times ln(256) needs s = 4.7, and usual initial values give less than 1."""
LOW = 0.1
"""A mean loss below this part of ln(V) is implausible in a first step: trained models of text have about 0.2 of it."""


def before_steps(settings: BuildSettings, data: DataConfig, dataset: Dataset, resumes: bool) -> Iterator[str]:
    """Yield the notices of a run before its first step. The process of the first rank calls it."""
    notices = [_other_tokenizer(settings.model, data, dataset.tokenizer)]
    notices.append(_unknown_end_of_turns(settings.model, data, dataset))
    notices.append(_cut_conversation(data, dataset))
    if not resumes:
        notices.append(_other_base(settings))
    yield from filter(None, notices)


# -- the first loss ----------------------------------------------------------------------------------------------------


def of_first_loss(trainer: Trainer, loss: float) -> str | None:
    """Return the notice about the loss of step 1. None if there is nothing to explain."""
    train = trainer.config.train
    if train.loss not in (AUTO, "cross_entropy"):
        return None  # another loss of equally likely tokens is not known
    first = trainer.position.samples - train.global_batch
    trained = trainer.dataset.train.trained(first, train.global_batch)
    per_micro_batch = trained * train.micro_batch / train.global_batch
    model = trainer.facts.in_words if trainer.losses.has_loss else None
    shape = trainer.config.model.shape()
    trained_before = _pretrained_base(shape) is not None
    return first_loss_in_words(loss, shape.vocab_size, model, per_micro_batch, trained_before)


class FirstLoss(TrainerHook):
    """Says what an unusual loss of step 1 may mean."""

    def __init__(self, trainer: Trainer, reporter: Reporter) -> None:
        self._trainer, self._reporter = trainer, reporter

    def after_step(self, record: StepRecord) -> None:
        if record.step == 1 and (note := of_first_loss(self._trainer, record.loss)):
            self._reporter.say(note)


def first_loss_in_words(
    loss: float,
    tokens: int,
    model: str | None = None,
    per_micro_batch: float = 1.0,
    pretrained: bool = False,
) -> str | None:
    """Return the reason why the first loss is above ln(tokens), the loss of equally likely tokens. None if it is not
    above.

    Args:
        loss: the first loss.
        tokens: of the vocabulary.
        model: in words, if it has a loss of its own.
        per_micro_batch: the targets of a micro-batch that its loss is a mean over.
        pretrained: the model began with weights that were trained before.
    """
    alike = math.log(tokens)
    if loss <= alike:
        return None
    above = f"the first loss is above ln({tokens}) = {alike:.4f}"
    equal = f"A model that gives all {tokens} tokens the same probability has that loss"
    if pretrained:
        return (
            f"{above}. {equal}, and pretrained weights usually have a lower one: check that data.tokenizer is the one "
            "beside the model, and that the text is of the kind that the model was trained on"
        )
    if loss <= FAR * alike:
        return f"{above}. {equal}; random weights prefer some tokens by chance, so their loss is higher"
    above = f"the first loss, {loss:.4f}, is {loss / alike:.3g} times ln({tokens}) = {alike:.4f}"
    if model is not None and LOW * alike <= loss / per_micro_batch <= FAR * alike:
        return (
            f"{above}. loss(batch) of {model} seems to be a sum over the targets, where their mean is expected: "
            f"{loss:.4f} = {per_micro_batch:g} targets of a micro-batch x {loss / per_micro_batch:.4f}. Gradients and "
            "norms have this factor, too. Return the mean over the targets that are not -100, or the loss of each"
        )
    way = "look at the initial values, above all those of the embedding and the output layer"
    if model is not None:
        way = f"look at loss(batch) of {model}, which returns a mean over targets, and at the initial values"
    return f"{above}. {equal}. Random weights with usual initial values have a loss near it: {way}"


def _pretrained_base(shape: Any) -> HuggingFaceShape | None:
    """Return the model of whose weights training begins, if any."""
    base = base_of(shape)
    return base if base is not None and base.weights == "pretrained" else None


def _cut_conversation(data: DataConfig, dataset: Dataset) -> str | None:
    """Return a conversation or a completion whose end alone is in validation."""
    fraction = data.split_fraction
    for source, material in zip(data.training, dataset.materials, strict=False):
        if fraction and source.kind != "documents" and cuts_document(material.parts()[0], fraction):
            return (
                f"data.validation_fraction = {fraction:g} cuts one of the {source.kind} of {material.name} in two: its "
                "begin is trained and its end is validated, because validation would take more than it alone. Use more "
                f"{source.kind}, raise data.validation_fraction, or name another file with data.validation_source"
            )
    return None


# -- tokenizers --------------------------------------------------------------------------------------------------------


def _other_tokenizer(model: ModelConfig, data: DataConfig, tokenizer: Tokenizer) -> str | None:
    """Pretrained weights know the ids of their own tokenizer alone."""
    base = _pretrained_base(model.shape())
    beside = None if base is None else tokenizer_beside(base)
    if beside is None or beside.fingerprint == tokenizer.fingerprint:
        return None
    if isinstance(tokenizer, Bytes) and _is_of_bytes(beside):
        return None
    return (
        f"data.tokenizer = {data.tokenizer} ({tokenizer.vocab_size:,} ids) is not the tokenizer beside the "
        f"model, {beside.file} ({beside.vocab_size:,} ids), with whose ids the weights were trained. If you did not "
        f"change the tokenizer on purpose, set data.tokenizer to {model.path}"
    )


def _is_of_bytes(tokenizer: FromFile) -> bool:
    """Return whether a tokenizer is the one that an export of ours has written for bytes."""
    return bool(json.loads(tokenizer.file.read_bytes()) == byte_tokenizer.tokenizer_json())


def _unknown_end_of_turns(model: ModelConfig, data: DataConfig, dataset: Dataset) -> str | None:
    """Return the token that ends a turn in the data, if a generation does not end there."""
    tokenizer = dataset.tokenizer
    last = _end_of_turn(data, dataset)
    if last is None or tokenizer.file is None or last in (ends := ends_of_export(model, tokenizer)):
        return None
    names = ", ".join(_token(tokenizer, each) for each in ends) or "none"
    way = "Write the tokenizer's end token after each turn in the template"
    if last in tokenizer.special:
        way = f"Add id {last} to eos_token_id in the generation_config.json beside the tokenizer"
    return (
        f"turns of the assistant end with {_token(tokenizer, last)}, which is not an end token of the tokenizer "
        f"(end tokens: {names}). shardwright generate, and generate of transformers with the exported folder, will not "
        f"stop there. {way}"
    )


def _end_of_turn(data: DataConfig, dataset: Dataset) -> int | None:
    """Return the last trained token of the first conversation that has one: as the template writes it. None without."""
    for source, material in zip(data.training, dataset.materials, strict=True):
        tokens = material.tokens
        if source.kind != "conversations" or tokens.trained is None:
            continue
        start = 0
        for stop in tokens.ends[:LOOKED_AT].tolist():
            trained = np.flatnonzero(np.asarray(tokens.trained[start:stop]))
            if len(trained):
                return int(np.asarray(tokens.ids[start : start + int(trained[-1]) + 1])[-1])
            start = stop
    return None


LOOKED_AT = 100
"""Conversations of a source that are searched for one with a trained token."""


def _token(tokenizer: Tokenizer, number: int) -> str:
    return f"{escaped(tokenizer.decode([number]))!r} (id {number})"


# -- adapters ----------------------------------------------------------------------------------------------------------


def _other_base(settings: BuildSettings) -> str | None:
    """Adapters to start from that name another base than the run's. Paths move, so this is no error."""
    if settings.finetune.method == "full" or not settings.finetune.adapters:
        return None
    try:
        named = base_in(settings.finetune.adapters)
    except UserError:
        return None  # which the run has said
    base = settings.source
    if not named or _same_base(named, str(getattr(settings.model, "path", "") or "")):
        return None
    return (
        f"the adapters in {settings.finetune.adapters} were trained on {named} (base_model_name_or_path in their "
        f"adapter_config.json), and the base of this run comes from {base}. On another base they mean nothing. Ignore "
        "this if it is the same model at another place"
    )


def _same_base(named: str, base: str) -> bool:
    if os.path.isdir(base):
        return os.path.isdir(named) and os.path.samefile(named, base)
    return named == base.partition("@")[0]
