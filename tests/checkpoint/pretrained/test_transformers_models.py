"""Weights saved by transformers go into sharded models: renamed weights, experts that are stored one by one."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.checkpoint.kit.architectures import MARIAN, MODELS, make, shard
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh


@pytest.mark.extensive("each layout")
@multirank(2)
@pytest.mark.parametrize("part", range(3))
def test_every_layout_gets_what_was_saved(rank: int, world_size: int, part: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    mesh = world_mesh(world_size)
    for number, name in list(enumerate(MODELS))[part::3]:
        torch.manual_seed(0)
        saved = make(name)
        for p in saved.parameters():
            nn.init.normal_(p)
        if rank == 0:
            saved.save_pretrained(tmp_path / name)
        dist.barrier()
        values = saved.state_dict()
        nbytes = sum(t.nbytes for t in {id(p): p for p in saved.parameters()}.values())
        ragged = "ragged" if number % 2 else sw.Ragged("element")
        for layout in ["per_parameter", ragged] if number < 7 else [ragged]:
            with torch.device("meta") if layout is ragged else sw.deferred_init():
                model = make(name)
            shard(model, mesh=mesh, layout=layout)
            loaded = sw.load_pretrained(model, tmp_path / name)
            assert not loaded.unexpected
            # A little is on every rank: the parameters of one element, and buffers.
            assert loaded.bytes_read < 0.56 * nbytes + 2000, (name, loaded.bytes_read, nbytes)
            state = model.state_dict()
            assert state.keys() == values.keys()
            for key, value in values.items():
                if key not in loaded.missing:
                    assert torch.equal(full(state[key]), value), (name, layout, key)


@multirank(2)
def test_what_transformers_does_not_store_comes_from_the_constructor(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Marian's sinusoidal positions: exact in built and deferred models, missing on the meta device."""
    transformers = pytest.importorskip("transformers")
    warnings.simplefilter("ignore")
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in MARIAN.items()}
    config = transformers.MarianConfig(
        d_model=16,
        vocab_size=40,
        max_position_embeddings=32,
        pad_token_id=0,
        decoder_start_token_id=1,
        **sizes,
    )
    torch.manual_seed(0)
    saved = transformers.MarianMTModel(config)
    assert saved._keys_to_ignore_on_save
    if rank == 0:
        saved.save_pretrained(tmp_path)
    dist.barrier()
    for build in (nullcontext, sw.deferred_init):
        for layout in ("per_parameter", "ragged", None):
            torch.manual_seed(1)
            with build():
                model = transformers.MarianMTModel(config)
            if layout is not None:
                shard(model, mesh=world_mesh(world_size), layout=layout)
            loaded = sw.load_pretrained(model, tmp_path)
            assert set(loaded.missing) == saved._keys_to_ignore_on_save
            sw.materialize(model)
            state = model.state_dict()
            for key, value in saved.state_dict().items():
                assert torch.equal(full(state[key]), value), (build, layout, key)
    with torch.device("meta"):
        models = [transformers.MarianMTModel(config) for _ in range(2)]
    shard(models[0], mesh=world_mesh(world_size))
    for model in models:
        with pytest.raises(ValueError, match=r"encoder\.embed_positions.*its constructor computes it"):
            sw.load_pretrained(model, tmp_path)


@multirank(2)
def test_errors_name_what_is_missing(rank: int, world_size: int, tmp_path: Path) -> None:
    """And a key map of the user's goes before transformers' list."""
    safetensors = pytest.importorskip("safetensors.torch")
    warnings.simplefilter("ignore")
    saved = make("mixtral")
    if rank == 0:
        saved.save_pretrained(tmp_path)
        tensors = safetensors.load_file(tmp_path / "model.safetensors")
        del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
        tensors["model.nowhere"] = torch.zeros(2)
        safetensors.save_file(tensors, tmp_path / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = shard(make("mixtral"), mesh=world_mesh(world_size))
    with pytest.raises(ValueError) as error:
        sw.load_pretrained(model, tmp_path)
    text = str(error.value)
    assert "model.layers.1.mlp.experts.gate_up_proj" in text and "'model.nowhere'" in text
    assert "layers.0" not in text
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts.gate_up_proj"):
        sw.load_pretrained(model, tmp_path, key_map={})
