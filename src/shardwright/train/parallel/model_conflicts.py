"""Settings that a model cannot be trained with, where only the model that was built shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardwright.train.config import Config
from shardwright.train.config.catalog.kinds import model_in_words
from shardwright.train.config.conflicts.table import Conflict, refuse
from shardwright.train.config.schema import toml_value
from shardwright.train.config.sections.data import ONE_OR_UNMASKED, UNMASKED

if TYPE_CHECKING:
    from shardwright.train.models.language_model import LanguageModel


class BuiltJob(NamedTuple):
    """A job with its model, before an engine has it.

    Attributes:
        validation_metrics: of the hooks of `run.hooks`.
    """

    config: Config
    model: LanguageModel
    validation_metrics: Sequence[str] = ()

    @property
    def numbers_padding(self) -> bool:
        """Whether forward must know padding as a document, since losses beside the cross-entropy are over all its
        tokens. Models of other libraries leave padding out themselves."""
        model = self.model
        unseparated = self.config.data.packing == "none" and bool(model.auxiliary)
        return unseparated and not model.foreign and model.separates


def _would_mix(key: str, expected: str, best_fit: bool) -> Conflict[BuiltJob]:
    return Conflict(
        (key, "model.kind"),
        lambda job: (
            job.config.data.separates
            and not job.model.separates
            and (job.config.data.packing == "best_fit") is best_fit
        ),
        lambda job: (
            f"expected {expected} with model.kind {job.config.model.kind!r}, whose tokens would see other documents of "
            f"their sample, found {toml_value(job.config.value_at(key))}; set {ONE_OR_UNMASKED}"
        ),
    )


def _output_layer(job: BuiltJob) -> object:
    # A module of another class may lack it, see `language_model.NEEDED`.
    find = getattr(job.model, "output_layer", None)
    return None if find is None else find()


BUILT: tuple[Conflict[BuiltJob], ...] = (
    # A graph captures one step: it cannot have other numbers, documents or padding in the next one.
    Conflict(
        ("train.cuda_graph", "model.kind"),
        lambda job: job.config.train.cuda_graph and job.model.draws,
        lambda job: (
            "expected false with a model that may draw random numbers (model.kind "
            f"{job.config.model.kind!r}), found true; a graph cannot draw from another seed in each step"
        ),
    ),
    Conflict(
        ("train.cuda_graph", "data.packing"),
        lambda job: job.config.train.cuda_graph and job.config.data.separates,
        lambda job: (
            "expected false with documents that are kept apart in a sample, whose number changes in every step, found "
            # With "none" such a model numbers its padding, and the amount of padding changes in every step.
            f"true; or set {UNMASKED if job.model.auxiliary and not job.model.foreign else ONE_OR_UNMASKED}"
        ),
    ),
    Conflict(
        ("train.cuda_graph", "data.packing"),
        lambda job: job.config.train.cuda_graph and job.numbers_padding,
        lambda job: (
            "expected false with data.packing 'none' and a model with losses beside the cross-entropy, which must not "
            f"count padding, found true; its amount changes in every step. Or set {UNMASKED}"
        ),
    ),
    Conflict(
        ("train.loss_chunks", "model.kind"),
        lambda job: bool(job.config.train.loss_chunks) and (job.model.has_loss or _output_layer(job) is None),
        lambda job: (
            f"expected 0 with {model_in_words(job.config.model.shape(), job.config.model.kind)}, "
            + (
                "which computes its own loss"
                if job.model.has_loss
                else f"a {type(getattr(job.model, 'model', job.model)).__name__} without an output layer that is known "
                "(output_layer())"
            )
            + f", found {toml_value(job.config.train.loss_chunks)}"
        ),
    ),
    _would_mix("data.packing", "'none' or 'split'", best_fit=True),
    _would_mix("data.document_mask", "false", best_fit=False),
    Conflict(
        ("run.hooks", "validation.every"),
        lambda job: job.config.validation.every > 0 and bool(job.validation_metrics) and job.model.has_loss,
        lambda job: (
            "expected hooks without validation_metrics with "
            f"{model_in_words(job.config.model.shape(), job.config.model.kind)}, which computes its own loss and "
            f"returns no logits, found {', '.join(map(repr, job.validation_metrics))}; remove them, or set "
            "validation.every to 0"
        ),
    ),
)


def check_model_goes_with(
    config: Config, model: LanguageModel, validation_metrics: Sequence[str] = ()
) -> None:
    """Refuse settings that this model cannot be trained with. Raises UserError."""
    refuse(BUILT, BuiltJob(config, model, validation_metrics))
