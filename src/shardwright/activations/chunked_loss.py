"""Cross-entropy whose logits are never whole: of a few rows at a time, with their gradients, in forward.

The gradients of the hidden states and of the head exist from forward on, and backward scales them. Sources: "Liger
Kernel" (Hsu et al., 2024) and torchtune's chunked losses, which hold gradients or logits in this way. Nothing here
knows which engine shards the head: ``head_call`` does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shardwright.activations.head_call import call_once, computing_piece
from shardwright.activations.held_gradients import HeldGradients
from shardwright.activations.token_loss import TokenLoss, cross_entropy, losses_of_tokens
from shardwright.activations.token_rows import TokenRows
from shardwright.engine.compat import keeps_graph

AUTO_BYTES = 256 << 20  #: of a chunk's logits in float32 with ``chunks="auto"``

LogitsFunction = Callable[[Tensor], Tensor]


def chunked_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    chunks: int | str = "auto",
    weights: Tensor | None = None,
    logits: LogitsFunction | None = None,
    ignore_index: int = -100,
    loss: TokenLoss = cross_entropy,
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of ``head(hidden)`` without all logits in memory at once.

        loss_sum, losses = sw.chunked_cross_entropy(hidden, model.lm_head, targets)
        (loss_sum / number_of_tokens).backward()

    The head's weights are gathered once. The logits, losses and gradients of each chunk of tokens are computed in
    forward, and its logits are freed. So forward also takes the time that backward takes without chunks. The sum of the
    weight's gradients over the chunks is float32 and exists until backward; :func:`memory_report` calls it "head
    gradient". Without gradients (``torch.no_grad``, frozen parameters) none is computed.

    Call it where ``head(hidden)`` may be called. The head may be sharded by itself, with others, or with a model around
    it, and may share its weight with an embedding.

    Args:
        hidden: float [..., D].
        head: the module that makes logits [..., V] of it. It computes each token by itself.
        targets: int64 [...], the class of each token.
        chunks: number of chunks, 1 or more. "auto": a chunk's logits in float32 take at most 256 MiB.
        weights: float [...], factors of the losses in the sum; None: 1. They get no gradient.
        logits: a function from the head's result to the logits, such as a soft cap; it computes each token by itself.
            Parameters that it trains belong to the head.
        ignore_index: the target of tokens without a loss. Their loss is 0.
        loss: another function from logits [T, V], float32 or wider, and targets [T] to the loss of each token, float
            [T]. It computes each token by itself and gets those of one chunk.

    Returns:
        The sum of the losses, float32 without dimensions, from which backward may start; and the loss of each token,
        float32 [...], without a graph.

    Raises:
        TypeError: ``head`` is no module.
        ValueError: the shapes do not fit, ``chunks`` is no number of chunks, or a gradient would be lost: of weights,
            or of a tensor that the logits depend on and that is no parameter of the head.
    """
    if not isinstance(head, nn.Module):
        raise TypeError(
            f"head: expected the module that makes the logits, such as model.lm_head, got a {type(head).__name__}; a "
            "module gathers its weights"
        )
    return ChunkedLoss(head, targets, chunks, weights, logits, ignore_index, loss).of(hidden)


class ChunkedLoss(NamedTuple):
    """The arguments of one loss, see :func:`chunked_cross_entropy`."""

    head: nn.Module
    targets: Tensor
    chunks: int | str = "auto"
    weights: Tensor | None = None
    logits: LogitsFunction | None = None
    ignore_index: int = -100
    loss: TokenLoss = cross_entropy

    def of(self, hidden: Tensor, prepared: bool = False) -> tuple[Tensor, Tensor]:
        """Return the sum and the losses.

        ``prepared``: the head's hooks that prepare its input have run on ``hidden``.
        """
        self._check(hidden)
        head: nn.Module = getattr(self.head, "_orig_mod", self.head)  # of torch.compile
        loss_sum, losses = call_once(head, hidden, self._replace(head=head).compute, prepared)
        return loss_sum, losses.view(self.targets.shape)

    def _check(self, hidden: Tensor) -> None:
        chunks, targets, weights = self.chunks, self.targets, self.weights
        if chunks != "auto" and (not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1):
            raise ValueError(f'chunks: expected a number of chunks, 1 or more, or "auto", got {chunks!r}')
        # A sequence that tensor parallelism has cut becomes whole in the hooks of the head.
        if hidden.ndim != targets.ndim + 1 or targets.ndim < 1 or targets.is_floating_point():
            raise ValueError(
                f"targets: expected an integer for each token of hidden, whose shape is {list(hidden.shape)}; got "
                f"shape {list(targets.shape)} and dtype {str(targets.dtype).removeprefix('torch.')}"
            )
        if weights is not None and weights.shape != targets.shape:
            raise ValueError(
                f"weights: expected a factor for each target, of shape {list(targets.shape)}, got {list(weights.shape)}"
            )
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "weights: expected factors that require no gradient, since they would get none; pass weights.detach(), "
                "or compute the loss of whole logits"
            )

    def compute(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum, and the losses of all tokens: float32 [T]. Called while the head's weights are there."""
        parameters = [p for p in self.head.parameters() if p.requires_grad]
        if hidden.shape[:-1] != self.targets.shape:
            raise ValueError(
                f"targets: expected an integer for each token of hidden, whose shape is {list(hidden.shape)} in the "
                f"head; got shape {list(self.targets.shape)}"
            )
        if torch.is_grad_enabled() and (parameters or hidden.requires_grad):
            return _InForward.apply(self, hidden, *parameters)  # type: ignore[no-any-return]
        if torch.is_grad_enabled() and self.logits is not None and hidden.shape[:-1].numel():
            _check_leaves(self._losses(TokenRows(hidden).part(0, 1), self.targets.flatten()[:1]), ())
        with torch.no_grad():
            return self.run(hidden, None)

    def run(self, hidden: Tensor, held: HeldGradients | None) -> tuple[Tensor, Tensor]:
        """Compute the loss of one chunk after another, and add its gradients to the held ones."""
        rows, targets_T = TokenRows(hidden), self.targets.flatten()
        weights_T = None if self.weights is None else self.weights.flatten().float()
        losses = []
        for start, stop in itertools.pairwise(self._bounds(rows, held)):
            weights_R = None if weights_T is None else weights_T[start:stop]
            losses.append(self._chunk(rows, start, stop, targets_T[start:stop], weights_R, held))
        losses_T = torch.cat(losses) if len(losses) > 1 else losses[0]
        return (losses_T if weights_T is None else losses_T * weights_T).sum(), losses_T

    def _chunk(
        self,
        rows: TokenRows,
        start: int,
        stop: int,
        targets_R: Tensor,
        weights_R: Tensor | None,
        held: HeldGradients | None,
    ) -> Tensor:
        """Return the losses of some rows. Their logits are freed at the end."""
        if held is None:
            with computing_piece(start, rows.number):
                return self._losses(rows.part(start, stop), targets_R)
        with torch.enable_grad(), _plainly_saved(), computing_piece(start, rows.number):
            hidden = rows.part(start, stop).requires_grad_(held.hidden is not None)
            losses_R = self._losses(hidden, targets_R)
        if start == 0:
            _check_leaves(losses_R, held.leaves(hidden))
        factors_R = torch.ones_like(losses_R) if weights_R is None else weights_R.to(losses_R.dtype)
        held.add(start, stop, losses_R, hidden, factors_R)
        return losses_R.detach()

    def _losses(self, hidden: Tensor, targets_R: Tensor) -> Tensor:
        logits = self.head(hidden)
        if self.logits is not None:
            logits = self.logits(logits)
        return losses_of_tokens(logits, targets_R, self.loss, self.ignore_index)

    def _bounds(self, rows: TokenRows, held: HeldGradients | None) -> list[int]:
        """Return the first row of each chunk, and the number of all."""
        chunks = self.chunks
        if chunks == "auto":
            most = max(1, AUTO_BYTES // (4 * self._width(rows)))
            chunks = math.ceil(rows.number / most)
        size = math.ceil(rows.number / max(1, int(chunks))) or 1
        return [*range(0, rows.number, size), rows.number] if rows.number else [0, 0]

    def _width(self, rows: TokenRows) -> int:
        """Return the number of logits of a row on the rank that has the most: all ranks make the same chunks."""
        weight = getattr(self.head, "weight", None)
        if isinstance(self.head, nn.Linear) and isinstance(weight, Tensor):
            return _largest(weight, 0)
        with torch.no_grad():
            logits = self.head(rows.part(0, min(1, rows.number)))
        return _largest(logits, logits.ndim - 1)


def _largest(tensor: Tensor, dim: int) -> int:
    """Return the size of a dimension on the rank that has the most of it, 1 or more."""
    size = tensor.shape[dim]
    if isinstance(tensor, DTensor):
        for ranks, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            size = math.ceil(size / ranks) if placement.is_shard(dim) else size
    return max(1, size)


class _InForward(torch.autograd.Function):
    """A loss whose gradients are computed in forward."""

    @staticmethod
    def forward(ctx: Any, loss: ChunkedLoss, hidden: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        held = HeldGradients(loss.head, TokenRows(hidden), ctx.needs_input_grad[1], parameters)
        with held.computing(loss.head):
            loss_sum, losses = loss.run(hidden, held)
        ctx.held = held
        ctx.mark_non_differentiable(losses)
        ctx.set_materialize_grads(False)
        return loss_sum, losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        held: HeldGradients = ctx.held
        if factor is None:
            return (None,) * len(ctx.needs_input_grad)
        return (None, *held.scaled(factor, keeps_graph()))


def _check_leaves(losses_R: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raise ValueError if losses depend on a leaf that requires a gradient and is none of these."""
    known = {id(leaf) for leaf in leaves}
    nodes, seen = [losses_R.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the node that accumulates a leaf's gradient
        if isinstance(variable, Tensor) and id(variable) not in known:
            raise ValueError(
                f"logits: a tensor of shape {list(variable.shape)} requires a gradient, which would be lost, since it "
                "is no parameter of the head. Make it a parameter of the head, detach it, or compute the loss of whole "
                "logits"
            )
        nodes.extend(following for following, _ in node.next_functions)


@contextmanager
def _plainly_saved() -> Iterator[None]:
    """Inside the context autograd saves tensors as they are: the graph of a chunk ends before its forward does.

    Hooks of a checkpoint would compute the forward again, those of an offload would move the logits.
    """
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor
