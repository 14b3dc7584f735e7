"""The axes along which a job's ranks divide its work, and which ranks share data, tokens and losses.

`AXES` has a row for each axis. Messages, checks, searches of plans and meshes follow from the rows, and no other file
divides the ranks. How a model is divided along an axis is said by the Offers of its kind. Nothing here imports torch
or pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from shardwright.train.config.catalog.engines import EngineFacts
from shardwright.train.errors import UserError

Divided = Literal["layers", "experts", "samples"]


@dataclass(frozen=True, kw_only=True)
class ParallelAxis:
    """A way in which neighbouring ranks divide the work of a model.

    Attributes:
        name: the key in `[parallel]`, and the name of a dimension of a mesh.
        divides: what its ranks divide: each layer, the experts of a layer, or the tokens of each sample. Ranks that
            divide layers are ranks of their own; the others are also among the ranks that shard parameters.
        title: what the field calls it, for messages.
        description: of the key.
        fact: the field of `EngineFacts` that is true for an engine which supports it. Empty: every engine does.
        offer: the field of `Offers` that a kind of model has if its models can be divided so.
        needs: keys that a job with this axis must leave at their default, with the reason. Checked when it starts.
        excludes: keys beside whose other values the axis is refused in any configuration, with the reason.
        assumption: what a plan assumes about it, for the lines below the plan.
    """

    name: str
    divides: Divided
    title: str
    description: str
    offer: str
    fact: str = ""
    needs: Mapping[str, str] = field(default_factory=dict)
    excludes: Mapping[str, str] = field(default_factory=dict)
    assumption: str = ""

    @property
    def key(self) -> str:
        return f"parallel.{self.name}"

    def is_known_to(self, engine: EngineFacts) -> bool:
        """Return whether an engine supports this axis."""
        return not self.fact or bool(getattr(engine, self.fact))


AXES = (
    ParallelAxis(
        name="tensor",
        divides="layers",
        title="tensor parallelism",
        description=(
            "Number of neighbouring ranks that share every layer and the sequence: tensor and sequence parallelism. "
            "These groups divide the data."
        ),
        fact="divides_layers",
        offer="tensor_plan",
        needs={"train.cuda_graph": ""},
        excludes={
            "finetune.method": "adapters are not cut over tensor-parallel ranks",
            **dict.fromkeys(("finetune.freeze", "finetune.train_only", "train.float8"), ""),
        },
    ),
    ParallelAxis(
        name="expert",
        divides="experts",
        title="expert parallelism",
        description=(
            "Number of neighbouring ranks that share the experts of every layer: expert parallelism. Each rank has "
            "different data. Only for the engine shardwright."
        ),
        fact="has_own_keys",
        offer="expert_layers",
        needs=dict.fromkeys(("train.cuda_graph", "train.compile"), "sizes depend on the routing"),
        excludes={"train.float8": ""},
        assumption="each expert gets as many tokens; a rank whose experts get more needs more",
    ),
    ParallelAxis(
        name="context",
        divides="samples",
        title="context parallelism",
        description=(
            "Number of neighbouring ranks that share every sample, each with a part of its tokens: context "
            "parallelism. They divide the parameters, too. These groups divide the data."
        ),
        offer="divide_samples",
        needs={"train.cuda_graph": ""},
    ),
)
"""All axes, in the order in which errors about them are reported. A mesh has them in this order, too."""


def axes_that_divide(*what: Divided) -> tuple[ParallelAxis, ...]:
    """Return the axes whose ranks divide one of these things."""
    return tuple(axis for axis in AXES if axis.divides in what)


def check_divisor(key: str, value: int, whole: int, what: str = "the number of ranks") -> None:
    """Raise UserError if the value of a key does not divide a whole number, with the values that do."""
    if whole % value:
        *others, last = (str(n) for n in range(1, whole + 1) if not whole % n)
        use = f"{', '.join(others)} or {last}" if others else last
        raise UserError(f"{key}: expected a divisor of {what}, {whole}, found {value}; use {use}")


@dataclass(frozen=True)
class ParallelDims:
    """The sizes of all axes of a job. Ranks are counted through those that divide layers first.

    Attributes:
        replicate: replicas of the model, which have parameters of their own and reduce gradients.
        shard: ranks that divide the parameters of a replica.
        sizes: the size of each axis of `AXES`, by its name.
    """

    replicate: int
    shard: int
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, replicas: int, sizes: Mapping[str, int], ranks: int) -> ParallelDims:
        """Return the axes of this many ranks.

        Raises:
            UserError: a size does not divide the ranks.
        """
        data = ranks
        for axis in axes_that_divide("layers"):
            check_divisor(axis.key, sizes[axis.name], data)
            data //= sizes[axis.name]
        check_divisor("parallel.replicas", replicas, data)
        shard = data // replicas
        for axis in axes_that_divide("samples"):
            check_divisor(axis.key, sizes[axis.name], shard, "the number of ranks that share a replica")
        return cls(replicas, shard, sizes)

    @classmethod
    def near(cls, replicas: int, sizes: Mapping[str, int], ranks: int) -> ParallelDims:
        """Return the same, rounded down where a size does not divide the ranks, for checks before that is refused."""
        dims = cls(max(1, replicas), 1, sizes)
        of_sample = dims.parts_of("samples")
        shard = max(1, ranks // dims.parts_of("layers") // dims.replicate // of_sample) * of_sample
        return cls(dims.replicate, shard, sizes)

    def parts_of(self, what: Divided) -> int:
        """Return the number of ranks that divide this."""
        return prod(self.axes_of(what).values())

    def axes_of(self, what: Divided) -> dict[str, int]:
        """Return the sizes of the axes that divide this, by their names. Axes of one rank are left out."""
        return {
            axis.name: self.sizes[axis.name] for axis in axes_that_divide(what) if self.sizes[axis.name] > 1
        }

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.parts_of("layers")

    @property
    def data(self) -> int:
        """The number of ranks, or of groups of them, that have samples of their own."""
        return self.replicate * self.shard // self.parts_of("samples")

    @property
    def sharing_data(self) -> int:
        """The number of ranks in such a group, which are next to one another."""
        return self.parts_of("samples") * self.parts_of("layers")

    @property
    def averaging(self) -> int:
        """The number of ranks over which engines average gradients: those whose tokens are not the same."""
        return self.replicate * self.shard

    @property
    def with_same_loss(self) -> int:
        """The number of ranks that compute the loss of the same tokens."""
        return self.parts_of("layers")

    @property
    def with_same_experts(self) -> int:
        """The number of ranks of a replica that have the same experts."""
        return self.shard // self.parts_of("experts")

    @property
    def sequence_multiple(self) -> int:
        """A divisor that a sequence needs if it is not cut out of the data, because ranks that divide layers divide it
        between them."""
        return self.parts_of("layers")

    def data_groups_on(self, devices: int) -> int:
        """Return how many groups with samples of their own are on `devices` neighbouring devices, such as a node; at
        least 1."""
        return max(1, devices // self.sharing_data)

    def data_rank(self, rank: int) -> int:
        """Return the number of the group of this rank, from 0 to before `data`."""
        return rank // self.sharing_data % self.data

    @property
    def axes(self) -> dict[str, int]:
        """The mesh of the ranks: names and sizes, the outermost first."""
        return {**self.data_axes, **self.axes_of("layers")}

    @property
    def data_axes(self) -> dict[str, int]:
        """The axes of the mesh over which samples and parameters are divided."""
        if self.replicate > 1:
            return {"replicate": self.replicate, "shard": self.shard}
        return {"data": self.shard}

    @property
    def context_axes(self) -> dict[str, int]:
        """The mesh of the same ranks for parts of samples."""
        return {"samples": self.data, **self.axes_of("samples"), **self.axes_of("layers")}

    @property
    def expert_axes(self) -> dict[str, int]:
        """The mesh of the same ranks for experts."""
        return {**self.same_expert_axes, **self.spread_axes}

    @property
    def same_expert_axes(self) -> dict[str, int]:
        """The axes of the mesh for experts whose ranks have the same experts."""
        replicate = {"replicate": self.replicate} if self.replicate > 1 else {}
        return {**replicate, "edp": self.with_same_experts}

    @property
    def spread_axes(self) -> dict[str, int]:
        """The axes of the mesh for experts whose ranks divide the experts, and each expert."""
        return {**self.axes_of("experts"), **self.axes_of("layers")}
