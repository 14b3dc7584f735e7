"""The loss that a causal language model of transformers computes itself, from ``labels=``, in chunks.

The model's own forward runs, with :class:`DeferredLogits` for logits. Nothing here imports transformers.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any, TypeVar

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
    Call it before or after ``fully_shard``, and before a framework gets the model.

    Args:
        model: a model whose ``loss_function`` is transformers' ``ForCausalLMLoss``.
        chunks: as of :func:`chunked_cross_entropy`.

    Raises:
        ValueError: the model has another loss, or no output layer. If its forward does more with logits than
            docs/activations.md allows, its call raises TypeError.
    """
    output_layer: Any = getattr(model, "get_output_embeddings", None)
    head = output_layer() if output_layer is not None else None
    whole_loss: Any = getattr(model, "loss_function", None)
    if not isinstance(head, nn.Module) or getattr(whole_loss, "__name__", None) != _LOSS:
        raise ValueError(
            f"model: expected a causal language model of transformers, with an output layer and the loss {_LOSS}; got "
            f"a {type(model).__name__} with the loss {getattr(whole_loss, '__name__', whole_loss)}. Compute its loss "
            "with shardwright.chunked_cross_entropy in your own loop"
        )
    whole_forward, source = model.forward, LogitsSource(head, chunks)
    recording = ExitStack()  # while calls of the head give records

    @functools.wraps(whole_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is None or not model.training:
            return whole_forward(*args, **kwargs)
        with recording:
            recording.enter_context(prepare_once(head, source.record))
            output = whole_forward(*args, **kwargs)
        if isinstance(output, tuple):
            return tuple(each for each in output if not isinstance(each, DeferredLogits))
        return type(output)(**{name: each for name, each in output.items() if name != "logits"})

    @functools.wraps(whole_loss)
    def loss(logits: Any, labels: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(logits, DeferredLogits):
            recording.close()  # the loss calls the head
            return _loss(logits, labels, **kwargs)
        return whole_loss(logits, labels, *args, **kwargs)  # type: ignore[no-any-return]

    model.forward = forward
    model.loss_function = loss  # type: ignore[assignment]
    return model


def _loss(
    logits: DeferredLogits,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The value of ``ForCausalLMLoss``: each token predicts the next one."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(logits.hidden.device)
    loss_sum, _losses = logits.cross_entropy(targets, ignore_index=ignore_index)
    if num_items_in_batch is None:
        return loss_sum / (targets != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss_sum.device)
    return loss_sum / num_items_in_batch
