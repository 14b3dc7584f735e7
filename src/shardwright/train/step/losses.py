"""The losses of a model over a batch: that of its tokens and those beside it, as sums over tokens.

The losses of a step are the sums of all micro-batches and ranks by the number of trained tokens. Nothing here steps,
draws samples or communicates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.activations import (
    DeferredLogits,
    LossInForward,
    TokenLoss,
    cross_entropy,
    losses_of_tokens,
    z_loss,
)
from shardwright.context import shard
from shardwright.engine.extend import ExtensionError, call
from shardwright.train.config import TrainConfig
from shardwright.train.config.catalog.figures import CROSS_ENTROPY
from shardwright.train.config.catalog.losses import AUTO
from shardwright.train.data.samples.batch import Batch
from shardwright.train.models import outputs
from shardwright.train.models.language_model import LanguageModel
from shardwright.train.models.packed import whole, within_trained
from shardwright.train.parallel.engines import Engine
from shardwright.train.parallel.world import World

Result = TypeVar("Result")

_BUILT_IN: dict[str, Callable[..., Tensor]] = {
    AUTO: cross_entropy, "cross_entropy": cross_entropy, "z_loss": z_loss
}  # fmt: skip


def loss_of(settings: TrainConfig) -> TokenLoss:
    """Return the function that `[train] loss` names, with `loss_arguments`. A user's errors name it."""
    entry = settings.loss_entry
    arguments = dict(settings.loss_arguments)
    if entry.function is None:
        function = _BUILT_IN[entry.name]
        return partial(function, **arguments) if arguments else function
    users = partial(entry.function, **arguments)

    def checked(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        # Whole logits: inside ``loss_parallel`` a log_softmax of cut ones has wrong gradients for most losses.
        return call(f"train.loss: {entry.name!r}", users, whole(logits_TV), targets_T)  # type: ignore[no-any-return]

    checked.__qualname__ = repr(entry.name)
    return checked


class Losses:
    """The losses of a model on one rank.

    Attributes:
        auxiliary: weights of the losses beside the cross-entropy, by name.
        meanings: what such a loss is, in words, by name, where the model says so.
        has_loss: whether the model computes its own loss.
    """

    def __init__(
        self,
        train: TrainConfig,
        in_words: str,
        numbers_padding: bool,
        world: World,
        engine: Engine,
        model: nn.Module,
        plain: LanguageModel,
        vocab_size: int,
        chunked: LossInForward | None,
    ) -> None:
        """`model` is `plain` after `engine` has spread it, and `chunked` its forward, or None for whole logits.
        `vocab_size` is the tokenizer's, `in_words` the model in messages, and `numbers_padding` that of `BuiltJob`."""
        self._in_words = in_words
        self._engine, self._world = engine, world
        self._model, self._vocab_size, self._chunked = model, vocab_size, chunked
        self.has_loss, self._auxiliary_sums = plain.has_loss, plain.auxiliary_sums
        self._loss = loss_of(train)
        self._name = train.loss
        self._numbers_padding = numbers_padding
        #: Whether forward takes the edges of documents, so that the host need not wait for their number.
        self._takes_edges = "edges" in inspect.signature(plain.forward).parameters
        self.auxiliary = plain.auxiliary
        #: The factor of each loss in the gradients, float64 [1 + auxiliaries].
        self._factors = world.figures([1.0, *self.auxiliary.values()])
        # A module of another class may lack them, see `language_model.NEEDED`.
        self.meanings: Mapping[str, str] = getattr(plain, "meanings", {})

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss that is trained is the cross-entropy, in nats."""
        return self._loss is cross_entropy and not self.has_loss

    def in_words(self) -> dict[str, str]:
        """Return the words for the loss that is trained and for the one that validation measures, see `RunFacts`."""
        if self.is_cross_entropy:
            return {}
        if self.has_loss:
            return {"loss": "the model's own loss per token"}
        return {"loss": f"the loss {self._name!r} per token", "validated": CROSS_ENTROPY}

    def counts(self, trained: int) -> Tensor:
        """Return the number of trained tokens of a step, over which each loss is a mean: float64 [1 + auxiliaries]."""
        return torch.full_like(self._factors, trained)

    def weights(self, counts: Tensor) -> Tensor:
        """Factors of a rank's sums in its backward: float32 [1 + auxiliaries].

        Engines average gradients over the ranks; the sums of all ranks by their counts are wanted.
        """
        return (self._factors * (self._world.dims.averaging / counts)).float()

    def zeros(self) -> Tensor:
        """Sums over no batch: float64 [1 + auxiliaries]."""
        return torch.zeros_like(self._factors)

    def sums(self, batch: Batch) -> Tensor:
        """Return the loss that is trained, then those named in `auxiliary`, summed over tokens: float32 [1 +
        auxiliaries]."""
        if self.has_loss:
            return self.of_tokens(batch).sum()[None]
        if not self.auxiliary:
            own, arguments = self.own_part(batch, self._documents_of(batch))
            return self._computed(
                own, arguments, lambda returned: self._losses_of(returned, own, self._loss)[0][None]
            )
        documents = padding_of(batch) if self._numbers_padding else self._documents_of(batch)
        own, arguments = self.own_part(batch, documents)
        return self._computed(own, {"extras": True, **arguments}, lambda returned: self._all(returned, own))

    def _all(self, returned: Any, batch: Batch) -> Tensor:
        logits, extras = outputs.check_pair(self._in_words, returned)
        outputs.check_logits(self._in_words, logits, batch.targets, self._vocab_size)
        sums = outputs.auxiliary_sums(
            self._in_words, self._auxiliary_sums, self.auxiliary, extras, batch.targets
        )
        return torch.stack([self._losses_of(logits, batch, self._loss)[0], *map(whole, sums)])

    def _computed(
        self,
        batch: Batch,
        arguments: Mapping[str, Any],
        function: Callable[[Any], Result],
        chunks: bool = True,
    ) -> Result:
        """Return the result of `function` on the model's logits; with `train.loss_chunks` they are a record, if
        `chunks`."""
        precision = self._engine.compute_precision(self._world.device)
        if self._chunked is None or not chunks:
            with precision:
                returned = self._model(batch.inputs, **arguments)
            return function(returned)
        with precision, self._chunked.computing(function):
            return self._model(batch.inputs, **arguments)  # type: ignore[no-any-return]

    def _losses_of(self, logits: Any, batch: Batch, loss: TokenLoss = cross_entropy) -> tuple[Tensor, Tensor]:
        """Return the sum of a loss over tokens, and the loss of every token, float32 [B * S]."""
        logits = outputs.check_logits(self._in_words, logits, batch.targets, self._vocab_size)
        if isinstance(logits, DeferredLogits):
            loss_sum, losses = logits.losses(batch.targets, loss=loss)
            return loss_sum, losses.flatten()
        if self._chunked is not None and self._chunked.runs:
            raise ExtensionError(
                f"train.loss_chunks: forward of {self._in_words} returned other logits than those of its output layer, "
                f"a {type(self._chunked.head).__name__}; call that layer once, at the end of forward, or set "
                "train.loss_chunks to 0"
            )
        losses = losses_of_tokens(logits, batch.targets, loss)
        return losses.sum(), losses

    def _documents_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return the arguments of :func:`documents_of`, and the edges if the model takes them."""
        edges = {"edges": batch.edges} if self._takes_edges and batch.edges is not None else {}
        return {**documents_of(batch), **edges}

    def own_part(self, batch: Batch, arguments: Mapping[str, Tensor]) -> tuple[Batch, dict[str, Tensor]]:
        """Return the batch and the arguments of forward beside its tokens, for the tokens of them that this rank has.

        Where ranks divide samples, positions are those in the whole sample, and `documents` are whole.
        """
        split = self._world.context
        if split is None or not split.divides:
            return batch, dict(arguments)
        positions_BS = arguments.get("positions")
        if positions_BS is None:
            positions_BS = torch.arange(batch.inputs.shape[1], device=batch.inputs.device).expand_as(
                batch.inputs
            )
        own_BS, inputs, targets = (shard(each, split) for each in (positions_BS, batch.inputs, batch.targets))
        own = replace(batch, inputs=inputs, targets=targets, positions=own_BS)
        return own, {**arguments, "positions": own_BS}

    def of_tokens(self, batch: Batch) -> Tensor:
        """Cross-entropy of every token, float32 [B * S]; of a model with its own loss their sum, float32 [1]. With
        `train.loss_chunks` it has no graph."""
        if self.has_loss:
            own, arguments = self.own_part(batch, {})
            with self._engine.compute_precision(self._world.device):
                return self._model(own.inputs, batch=own, **arguments).float()[None]  # type: ignore[no-any-return]
        own, arguments = self.own_part(batch, self._documents_of(batch))
        return self._computed(own, arguments, lambda returned: self._losses_of(returned, own)[1])

    def of_tokens_and_logits(self, batch: Batch, logits: bool) -> tuple[Tensor, Tensor | None]:
        """Return the losses of `of_tokens`, and the whole logits [B, S, V] if these are asked for. A model with its own
        loss has none."""
        if self.has_loss or not logits:
            return self.of_tokens(batch), None
        own, arguments = self.own_part(batch, self._documents_of(batch))
        return self._computed(
            own,
            arguments,
            lambda returned: (self._losses_of(returned, own)[1], whole(returned)),
            chunks=False,
        )


def documents_of(batch: Batch) -> dict[str, Tensor]:
    """Arguments of forward beside the tokens of a batch with several documents in a sample."""
    if batch.documents is None or batch.positions is None:
        return {}
    return {"documents": batch.documents, "positions": batch.positions}


def padding_of(batch: Batch) -> dict[str, Tensor]:
    """Arguments of forward beside the tokens of a batch with one document in a sample: padding is another document, on
    which no loss of the first one depends."""
    padding_BS = ~within_trained(batch.targets)
    samples, length = padding_BS.shape
    index_S = torch.arange(length, device=padding_BS.device)
    length_B1 = (~padding_BS).sum(1, keepdim=True)
    begins_B1 = torch.arange(0, samples * length, length, device=padding_BS.device)[:, None]
    edges = F.pad(torch.cat((begins_B1, begins_B1 + length_B1), 1).flatten(), (0, 1), value=samples * length)
    return {
        "documents": padding_BS.int(),
        "positions": index_S - length_B1 * padding_BS,
        "edges": edges.to(torch.int32),
    }
