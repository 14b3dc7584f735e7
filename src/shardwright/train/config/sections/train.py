"""The section `[train]`."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.train.config.catalog.losses import AUTO, NamedLoss, losses
from shardwright.train.config.catalog.registry_names import OneOf, summaries
from shardwright.train.config.sections.base import Section
from shardwright.train.errors import UserError


class TrainConfig(Section):
    """Steps, batch sizes and compilation."""

    steps: int = Field(default=300, ge=1, description="Optimizer steps in all.")
    epochs: float = Field(
        default=0.0,
        ge=0,
        description="Passes over the training data, in place of steps: their number follows from the data. 0: steps.",
    )
    seq_len: int = Field(default=256, ge=1, description="Tokens per sequence.")
    global_batch: int = Field(default=16, ge=1, description="Sequences per optimizer step, over all ranks.")
    micro_batch: int = Field(
        default=8, ge=1,
        description="Sequences per rank and forward pass. global_batch / (ranks x micro_batch) passes are "
        "accumulated per step; this must be a whole number.",
    )  # fmt: skip
    max_norm: float = Field(
        default=1.0,
        ge=0,
        description=(
            "Gradients are scaled down to this global norm. 0: the norm is measured, but gradients are never scaled."
        ),
    )
    accumulate: Literal["communicate", "hold"] = Field(
        default="communicate",
        description=(
            "When to reduce the gradients of micro-batches. communicate: after each one (least memory). hold: only "
            "after the last one (least communication)."
        ),
    )
    loss: Annotated[str, OneOf(losses)] = Field(
        default=AUTO,
        description=(
            f"The loss of tokens to train with: a name, or the import path of a function. {summaries(losses)} "
            "Validation measures the cross-entropy with every one of these."
        ),
    )
    loss_arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Further arguments of the loss, by name, such as { label_smoothing = 0.1 }.",
    )
    loss_chunks: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default=0,
        description=(
            "Compute the logits and the loss of a micro-batch, and their gradients, in this many chunks of tokens, so "
            "that the logits are never whole. 0: whole. auto: the logits of a chunk take at most 256 MiB in float32. "
            "Gradients then differ in rounding."
        ),
    )
    deterministic: bool = Field(
        default=False,
        description=(
            "Use only operations that give the same bits each time on the same device: sums of a GPU in a fixed order. "
            "An operation without such a kernel is an error that names it. Slower on GPUs."
        ),
    )
    cuda_graph: bool = Field(
        default=False,
        description=(
            "Capture forward and backward of a step in a CUDA graph and replay it, so that the host does not launch "
            "each kernel. Needs GPUs, the engine shardwright, and a model whose shapes do not depend on values."
        ),
    )
    compile: Literal["none", "inductor", "aot_eager", "eager"] = Field(
        default="none",
        description=(
            "Compile each block with torch.compile and this backend, as one graph. Only inductor makes the block "
            "faster."
        ),
    )
    float8: Literal["none", "tensorwise", "rowwise"] = Field(
        default="none",
        description=(
            "Multiply in float8 in the linear layers of blocks, by this recipe of torchao. tensorwise: one scale for "
            "each tensor; weights are also gathered in float8. rowwise: one scale for each row. Needs a GPU with "
            "float8, parallel.param_dtype = bfloat16, and the extra float8."
        ),
    )
    memory_snapshot: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = Field(
        default=(),
        description=(
            "Steps, such as [3], in which every rank records the history of its GPU memory. Open the files in the "
            "run's folder at pytorch.org/memory_viz."
        ),
    )

    @property
    def loss_entry(self) -> NamedLoss:
        """The loss in the registry."""
        return losses.get(self.loss)

    @model_validator(mode="after")
    def _arguments_belong_to_the_loss(self) -> TrainConfig:
        if self.loss_arguments and (problem := self.loss_entry.arguments_problem(self.loss_arguments)):
            raise ValueError(problem)
        return self

    @property
    def micro_batch_tokens(self) -> int:
        """The number of tokens in a micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def knows_steps(self) -> bool:
        """Whether `steps` is the length of the run. With `epochs` it is so after `with_steps_of`."""
        return not self.epochs or "steps" in self.model_fields_set

    def with_steps_of(self, samples_of: Callable[[Fraction], Fraction]) -> TrainConfig:
        """Return the same with the steps that `epochs` asks for. `samples_of`: the sequences of a number of epochs."""
        if not self.epochs:
            return self
        samples = samples_of(Fraction(str(self.epochs)))  # the decimal number: 1.1 x 100 sequences are 110
        return self.model_copy(update={"steps": max(1, math.ceil(samples / self.global_batch))})

    def accumulation_steps(self, ranks: int, *, tensor: int = 1, resumes: bool = False) -> int:
        """Micro-batches per rank and optimizer step. Raises UserError where that is not a whole number.

        The arguments are those of :meth:`batch_problem`.
        """
        problem = self.batch_problem(ranks, tensor=tensor, resumes=resumes)
        if problem:
            raise UserError(problem)
        return self.global_batch // (ranks * self.micro_batch)

    def batch_problem(self, ranks: int, *, tensor: int = 1, resumes: bool = False) -> str | None:
        """Return the mistake in the batch sizes, in a line; `None` without one.

        Args:
            ranks: that have different data.
            tensor: ranks that share the same data, for each of these.
            resumes: whether a run continues, whose global batch is fixed.
        """
        unit = ranks * self.micro_batch
        if self.global_batch % unit == 0:
            return None
        below, above = self.global_batch // unit * unit, -(-self.global_batch // unit) * unit
        ways = [] if resumes else [f"{below} or {above}" if below else f"{above}"]
        if self.global_batch % ranks == 0:
            share = self.global_batch // ranks
            micro = max(m for m in range(1, min(share, self.micro_batch) + 1) if share % m == 0)
            ways.append(f"train.micro_batch = {micro}")
        if resumes:
            if counts := self._numbers_of_ranks(ranks):
                ways.append(f"{' or '.join(str(count * tensor) for count in counts)} ranks")
            elif not ways:
                ways.append(
                    "train.micro_batch = 1 on another number of ranks that divides train.global_batch"
                )
        fixed = ", which a resume cannot change; what fits" if resumes else "; nearest that fit"
        who = "one rank" if ranks == 1 else f"{ranks} ranks"
        return (
            f"train.global_batch: expected a multiple of {who} x train.micro_batch = {self.micro_batch} "
            f"(that is {unit}), found {self.global_batch}{fixed}: {', or '.join(ways)}"
        )

    def _numbers_of_ranks(self, near: int) -> list[int]:
        """At most four numbers of ranks that fit the batch sizes, the nearest ones."""
        passes, rest = divmod(self.global_batch, self.micro_batch)
        fitting = [] if rest else [count for count in range(1, passes + 1) if passes % count == 0]
        return sorted(sorted(fitting, key=lambda count: abs(count - near))[:4])
