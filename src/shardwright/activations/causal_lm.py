"""The loss that a causal language model of transformers computes itself, from ``labels=``, in chunks.

The model's own forward runs, with :class:`DeferredLogits` for logits. Nothing here imports transformers.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwright.activations.deferred_logits import DeferredLogits, LogitsSource
from shardwright.activations.head_call import prepare_once

M = TypeVar("M", bound=nn.Module)
_LOSS = "ForCausalLMLoss"  #: the name of transformers' function, the only one whose result is computed here


def chunk_causal_lm_loss(model: M, *, chunks: int | str = "auto") -> M:
    """Let a causal language model of transformers compute its loss by :func:`chunked_cross_entropy`, in place.

        model = sw.chunk_causal_lm_loss(AutoModelForCausalLM.from_pretrained(folder))
        loss = model(input_ids=tokens, labels=tokens).loss

    It changes calls with ``labels`` in training mode: the output has no ``logits`` then. Other calls are as before.
    Call it before or after ``fully_shard`` and PEFT's ``get_peft_model``, and before a framework gets the model. Copies
    of the model compute their own loss in chunks, too. A second call changes the number of chunks.

    Args:
        model: a model whose ``loss_function`` is transformers' ``ForCausalLMLoss``, or a ``PeftModel`` of it.
        chunks: as of :func:`chunked_cross_entropy`.

    Raises:
        ValueError: the model has another loss, or no output layer. If its forward does more with logits than
            docs/activations.md allows, its call raises TypeError.
    """
    owner = _owner_of_loss(model)
    whole_loss: Any = getattr(owner, "loss_function", None)
    chunked = getattr(whole_loss, "__self__", None)
    if isinstance(chunked, _LossInChunks):
        chunked.chunks = chunks
        return model
    if owner is None or _head_of(owner) is None or getattr(whole_loss, "__name__", None) != _LOSS:
        raise ValueError(
            f"model: expected a causal language model of transformers, with an output layer and the loss {_LOSS}; got "
            f"a {type(model).__name__} with the loss {getattr(whole_loss, '__name__', whole_loss)}. Compute its loss "
            "with shardwright.chunked_cross_entropy in your own loop"
        )
    chunked = _LossInChunks(owner, chunks)
    owner.forward = chunked
    owner.loss_function = chunked.loss  # type: ignore[assignment]
    return model


def _owner_of_loss(model: nn.Module) -> nn.Module | None:
    """Return the module whose forward calls ``loss_function``: the model, or the one to which a wrapper passes the name
    on, as a ``PeftModel`` does. A name that a wrapper got would not reach that forward."""
    if not hasattr(model, "loss_function"):
        return None
    return next(
        (m for m in model.modules() if "loss_function" in m.__dict__ or hasattr(type(m), "loss_function")),
        None,
    )


def _head_of(model: nn.Module) -> nn.Module | None:
    """Return the module that makes logits. An adapter may take its place at any time."""
    output_layer: Any = getattr(model, "get_output_embeddings", None)
    head = output_layer() if output_layer is not None else None
    return head if isinstance(head, nn.Module) else None


class _LossInChunks:
    """The forward that replaces a model's own. Its method ``loss`` replaces the model's loss function.

    It is an object, not a closure, so that a copy of the model refers to the copy. Functions are not copied.
    """

    def __init__(self, model: nn.Module, chunks: int | str) -> None:
        self._model, self.chunks = model, chunks
        self._forward = model.__dict__.get(
            "forward"
        )  #: the forward that a framework set on the model; None: the class has it
        self._whole_loss: Any = model.loss_function
        self._recording = ExitStack()  #: while calls of the head give records

    @property
    def __wrapped__(self) -> Any:
        """The forward of whole logits. Frameworks read its signature through this name."""
        return self._forward or MethodType(type(self._model).forward, self._model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        whole_forward = self.__wrapped__
        if not self._model.training or _labels(whole_forward, args, kwargs) is None:
            return whole_forward(*args, **kwargs)
        head = _head_of(self._model)
        assert head is not None
        with self._recording:
            self._recording.enter_context(prepare_once(head, LogitsSource(head, self.chunks).record))
            output = whole_forward(*args, **kwargs)
        if isinstance(output, tuple):
            return tuple(each for each in output if not isinstance(each, DeferredLogits))
        return type(output)(**{name: each for name, each in output.items() if name != "logits"})

    def loss(self, logits: Any, labels: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of whole logits, or of a record of them."""
        if isinstance(logits, DeferredLogits):
            self._recording.close()  # the loss calls the head
            return _loss(logits, labels, *args, **kwargs)
        return self._whole_loss(logits, labels, *args, **kwargs)  # type: ignore[no-any-return]


def _labels(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument ``labels`` of a call, by name or by position."""
    if "labels" in kwargs or not args:
        return kwargs.get("labels")
    return dict(zip(inspect.signature(forward).parameters, args, strict=False)).get("labels")


def _loss(
    logits: DeferredLogits,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the value of ``ForCausalLMLoss``, with its arguments: each token predicts the next one."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(logits.hidden.device)
    loss_sum, _losses = logits.losses(targets, ignore_index=ignore_index)
    if num_items_in_batch is None:
        count = (targets != ignore_index).sum()
        # Without targets torch's mean is NaN and its gradients are zeros, where those of a quotient 0 / 0 are NaN.
        return (loss_sum / count.clamp(min=1)).where(count > 0, torch.nan)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss_sum.device)
    return loss_sum / num_items_in_batch
