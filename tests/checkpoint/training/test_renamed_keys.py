"""A state-dict hook that gives tensors other names: a save says so, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardwright as sw
from tests.support import multirank


def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[prefix + "q"] = state.pop(prefix + "weight")


@multirank(2)
def test_a_renamed_parameter_is_named(rank: int, world_size: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = model[0]._register_state_dict_hook(rename)
    sw.fully_shard(model)
    with pytest.raises(Exception, match=r"has '0\.q', which is no parameter.*state-dict hook has renamed it"):
        sw.save_checkpoint(tmp_path / "c", model)
    sw.checkpoint.save_state(tmp_path / "s", model.state_dict())
    handle.remove()
    sw.save_checkpoint(tmp_path / "c", model)
    assert "0.q" in sw.open_checkpoint(tmp_path / "s").state()
