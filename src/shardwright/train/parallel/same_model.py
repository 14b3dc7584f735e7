"""Whether all ranks have built the same model: compared once, before it is sharded and any collective depends on it.

The engine finds ranks that diverge later, before each collective. `rank/startup_check.py` compares what the ranks have
before a model exists.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.engine import TakenTensor, check_states
from shardwright.train.errors import as_user_errors


def check_same_model(model: nn.Module, mesh: DeviceMesh, owner: str) -> None:
    """Compare names, shapes, dtypes and hashes of the values of a plain model over all ranks. Each of them calls this.

    Tensors that get their values later are compared by the operations and random numbers that make the values.

    Args:
        owner: the model in messages.

    Raises:
        UserError: they differ; on every rank the same, which names the ranks and the tensors.
    """
    if mesh.size() == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    remedy = "The code of the model, its files and the numbers that it draws must not depend on the rank."
    with as_user_errors(ValueError):
        check_states(mesh, [TakenTensor(name, tensor) for name, tensor in tensors], owner, remedy)
