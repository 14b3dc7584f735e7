"""The axes of a job's ranks: how many there are of each, and which ranks share data, tokens and losses.

Nobody else divides the ranks into axes. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.train.config.sections.parallel import ParallelConfig
from shardwright.train.errors import UserError

TENSOR = "tensor"
"""The axis over which layers are cut."""
EXPERT = "expert"
"""The axis over which experts are spread."""
CONTEXT = "context"
"""The axis over which each sample is cut."""


def check_divisor(key: str, value: int, whole: int, what: str = "the number of ranks") -> None:
    """Raise UserError if the value of a key does not divide a whole number, with the values that do."""
    if whole % value:
        *others, last = (str(n) for n in range(1, whole + 1) if not whole % n)
        use = f"{', '.join(others)} or {last}" if others else last
        raise UserError(f"{key}: expected a divisor of {what}, {whole}, found {value}; use {use}")


@dataclass(frozen=True)
class ParallelDims:
    """The sizes of the axes. Ranks are counted through them, `tensor` first.

    Attributes:
        replicate: replicas of the model, which have parameters of their own and reduce gradients.
        shard: ranks that divide the parameters of a replica.
        tensor: ranks that divide each layer.
        expert: ranks that divide the experts, a divisor of `shard`.
        context: ranks that divide each sample, a divisor of `shard`.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1

    @classmethod
    def of(cls, config: ParallelConfig, ranks: int) -> ParallelDims:
        """The axes of so many ranks.

        Raises:
            UserError: the sizes in the configuration do not divide them.
        """
        check_divisor("parallel.tensor", config.tensor, ranks)
        data = ranks // config.tensor
        check_divisor("parallel.replicas", config.replicas, data)
        shard = data // config.replicas
        check_divisor("parallel.context", config.context, shard, "the number of ranks that share a replica")
        return cls(config.replicas, shard, tensor=config.tensor, expert=config.expert, context=config.context)

    @classmethod
    def near(cls, config: ParallelConfig, ranks: int) -> ParallelDims:
        """As `of`, rounded down where the sizes do not divide the ranks: for checks before these are refused."""
        replicas, context = max(1, config.replicas), config.context
        shard = max(1, ranks // config.tensor // replicas // context) * context
        return cls(replicas, shard, tensor=config.tensor, expert=config.expert, context=context)

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """Ranks, or groups of them, that have samples of their own."""
        return self.replicate * self.shard // self.context

    @property
    def sharing_data(self) -> int:
        """Ranks of such a group, which are next to one another."""
        return self.context * self.tensor

    @property
    def averaging(self) -> int:
        """Ranks over which engines average gradients: those whose tokens are not the same."""
        return self.replicate * self.shard

    @property
    def with_same_loss(self) -> int:
        """Ranks that compute the loss of the same tokens."""
        return self.tensor

    @property
    def with_same_experts(self) -> int:
        """Ranks of a replica that have the same experts."""
        return self.shard // self.expert

    @property
    def cuts_layers(self) -> bool:
        """Whether ranks divide layers, and with them the logits."""
        return self.tensor > 1

    @property
    def sequence_multiple(self) -> int:
        """A divisor that a sequence needs if it is not cut out of the data: such ranks divide it between layers."""
        return self.tensor

    def data_groups_on(self, devices: int) -> int:
        """Groups with samples of their own on so many neighbouring devices, such as a node; at least 1."""
        return max(1, devices // self.sharing_data)

    def data_rank(self, rank: int) -> int:
        """The number of the group of this rank, from 0 to before `data`."""
        return rank // self.sharing_data % self.data

    @property
    def axes(self) -> dict[str, int]:
        """The mesh of the ranks: names and sizes, the outermost first."""
        return {**self.data_axes, **self._tensor_axis}

    @property
    def data_axes(self) -> dict[str, int]:
        """The axes of the mesh over which samples and parameters are divided."""
        if self.replicate > 1:
            return {"replicate": self.replicate, "shard": self.shard}
        return {"data": self.shard}

    @property
    def context_axes(self) -> dict[str, int]:
        """The mesh of the same ranks for parts of samples."""
        return {"samples": self.data, CONTEXT: self.context, **self._tensor_axis}

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
        return {EXPERT: self.expert, **self._tensor_axis}

    @property
    def _tensor_axis(self) -> dict[str, int]:
        return {TENSOR: self.tensor} if self.tensor > 1 else {}
