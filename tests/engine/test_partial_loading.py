"""State dicts that lack some parameters, loaded into a model without values: the others get theirs, as in FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import shardwright as sw
from tests.support import multirank

OPTIONS: list[dict[str, bool]] = [{}, {"broadcast_from_rank0": True}, {"cpu_offload": True}]


@multirank(2)
def test_parameters_that_a_state_dict_lacks_stay_without_values(rank: int, world_size: int) -> None:
    for layout in ("per_parameter", "ragged", sw.Ragged("element")):
        for options in OPTIONS:
            with torch.device("meta"):
                model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(2, 1))
            for i in (0, 1):
                sw.fully_shard(model[i], layout=layout)
            sw.fully_shard(model, layout=layout)

            def load(strict: bool, *names: str, options: Any = options, model: Any = model) -> Any:
                everywhere = rank == 0 or "broadcast_from_rank0" not in options
                state = {n: torch.ones(model.get_parameter(n).shape) for n in names} if everywhere else {}
                given = StateDictOptions(full_state_dict=True, strict=strict, **options)
                return set_model_state_dict(model, state, options=given)

            known = ("0.weight", "0.bias", "1.bias", "2.bias")
            assert set(load(False, *known).missing_keys) == {"1.weight", "2.weight"}
            for name in known:
                assert (model.get_parameter(name).full_tensor() == 1).all()
            with pytest.raises(RuntimeError, match=r"weight' of unit .* no values yet"):
                model(torch.ones(2, 4))
            with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*\"1.weight\""):
                load(True, "2.weight")
            assert not load(False, "1.weight", "2.weight").missing_keys
            assert (model(torch.ones(2, 4)) == 63).all()
