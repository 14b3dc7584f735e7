"""Jobs with models of transformers: memory of construction, dropout, compilation, float8, resume, other commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import cli
from shardwright.engine import has_no_values
from shardwright.train.config.shapes.foreign import HuggingFaceShape
from shardwright.train.data.samples.batch import Batch
from shardwright.train.errors import UserError
from shardwright.train.models.build import build_model
from shardwright.train.models.hf import transformers_model
from shardwright.train.models.language_model import sees_later_tokens
from shardwright.train.parallel import recipe
from shardwright.train.parallel.float8 import convert
from shardwright.train.step.evaluation import validate
from shardwright.train.step.trainer import Trainer
from tests.engine.kit.models import full
from tests.support import multirank
from tests.train.kit.jobs import config_file, losses, ranks, records, train_here
from tests.train.kit.parallel import next_step, take_steps
from tests.train.models.kit.architectures import folder_with, made, reloaded
from tests.train.models.kit.foreign import JOB, job_of
from tests.train.parallel.kit.float8 import emulated

pytest.importorskip("transformers", reason="needs transformers")
OWN = ("--model.kind", "hf", "--model.path")


def parameters(job: Trainer) -> dict[str, torch.Tensor]:
    return {name: full(p).detach().clone() for name, p in job.model.named_parameters()}


@pytest.mark.extensive("a measurement in processes of their own")
def test_no_rank_holds_the_whole(tmp_path: Path) -> None:
    """Counted are the bytes of one of 256 ranks, in a process without others, while it builds a model and reads it."""
    command = [sys.executable, "-m", "tests.train.models.kit.one_of_many", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0 and ended.stdout.split()[-1:] == ["passed"], ended.stdout + ended.stderr


@pytest.mark.extensive("each way of drawing")
@multirank(2)
def test_values_are_read_or_drawn_into_shards(rank: int, world_size: int, tmp_path: Path) -> None:
    """Read ones are those of the files, drawn ones those of a model that is built at once."""
    if rank == 0:
        folder_with("llama", tmp_path / "llama")
    dist.barrier()
    plain = reloaded(tmp_path / "llama")
    for weights in ("pretrained", "random"):
        job = job_of(tmp_path / "llama", rank, world_size, model={"weights": weights}, layout="ragged")
        config, values = job.config, plain.state_dict()
        assert all(has_no_values(p) for p in recipe.build_for(config.for_building, 256).parameters())
        if weights == "random":
            torch.manual_seed(config.run.seed)
            values = build_model(config.model, 256).model.state_dict()
        for name, parameter in parameters(job).items():
            assert torch.equal(parameter, values[name.removeprefix(transformers_model.PREFIX)]), name
        for name, buffer in plain.named_buffers():
            assert torch.equal(dict(job.model.named_buffers())[transformers_model.PREFIX + name], buffer)


@multirank(2, timeout=40)
@pytest.mark.parametrize(
    ("damage", "engine"),
    [
        ("truncated", "shardwright"),
        ("missing", "shardwright"),
        ("missing", "ddp"),
        ("truncated", "fsdp1"),
        ("missing", "fsdp2"),
    ],
)
def test_files_that_are_damaged_on_one_host(
    rank: int, world_size: int, damage: str, engine: str, tmp_path: Path
) -> None:
    """Every rank ends with one error. None waits for the rank that cannot read."""
    if rank == 0:
        for number in range(world_size):
            folder_with("llama", tmp_path / str(number))
        file = tmp_path / "1" / "model.safetensors"
        os.truncate(file, file.stat().st_size - 100) if damage == "truncated" else file.unlink()
    dist.barrier()
    message = {
        "truncated": "model.safetensors: the header does not fit a complete safetensors file",
        "missing": "model.path: expected weights",
    }[damage]
    own = f"Rank 1 failed, so all ranks stop. UserError: .*{message}" if rank == 0 else message
    with pytest.raises(UserError, match=own):
        job_of(tmp_path / str(rank), rank, world_size, engine=engine)


@pytest.mark.extensive("a job of processes of its own")
def test_ranks_may_have_the_model_in_other_folders(tmp_path: Path) -> None:
    """The folders are compared by their content. One has other values in the same tensors then."""
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for folder in folders:
        path = folder_with("llama", folder / "llama")
        config_file(folder, f'{JOB}\n[model]\nkind = "hf"\npath = "{path}"\n')
    arguments = ("train", "tiny.toml", "--train.steps", "1", "--run.dir")
    ended = ranks(2, *arguments, tmp_path / "run", folders=folders)
    assert [status for status, _ in ended] == [0, 0], ended
    other = reloaded(folders[1] / "llama")
    torch.nn.init.zeros_(other.lm_head.weight)
    other.save_pretrained(folders[1] / "llama")
    ended = ranks(2, *arguments, tmp_path / "other", folders=folders)
    assert [status for status, _ in ended] == [2, 2], ended
    found = (
        "found the model of model.path: sha256 [0-9a-f]{12} on rank 0, sha256 [0-9a-f]{12} on rank 1; start"
    )
    assert re.search(found, "".join(text for _, text in ended)), ended


@multirank(2)
def test_weights_that_transformers_keeps_in_float32(rank: int, world_size: int, tmp_path: Path) -> None:
    """With bfloat16 the routers of ERNIE are gathered in float32, as transformers loads them."""
    if rank == 0:
        folder_with("ernie4_5_moe", tmp_path / "ernie")
    dist.barrier()
    job = job_of(tmp_path / "ernie", rank, world_size, param_dtype="bfloat16")
    dtypes = {}
    for name, module in job.model.named_modules():
        if name.endswith(("mlp.gate", "self_attn.q_proj")):
            module.register_forward_pre_hook(
                lambda module, _, name=name: dtypes.update({name.rpartition(".")[2]: module.weight.dtype})
            )
    loss = take_steps(job, 1)[0][0]
    assert dtypes == {"gate": torch.float32, "q_proj": torch.bfloat16}
    plain = take_steps(job_of(tmp_path / "ernie", rank, world_size), 1)[0][0]
    assert loss == pytest.approx(plain, rel=1e-2)


@pytest.mark.extensive("each way of recomputing")
@multirank(2)
def test_dropout_is_the_same_whatever_is_recomputed(rank: int, world_size: int, tmp_path: Path) -> None:
    """It is on in training alone, differs between ranks and steps, and follows the samples after a resume."""
    changes = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    if rank == 0:
        folder_with("gpt2", tmp_path / "gpt2", **changes)
        folder_with("gpt2", tmp_path / "none")
    dist.barrier()
    found = []
    for options in ({}, {"activations": {"checkpoint": "full"}, "layout": "ragged"}):
        job = job_of(tmp_path / "gpt2", rank, world_size, **options)
        assert job.facts.draws
        found.append((take_steps(job, 2), parameters(job)))
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name
    job, plain = (job_of(tmp_path / name, rank, world_size) for name in ("gpt2", "none"))
    assert validate(job).loss == validate(plain).loss
    torch.manual_seed(9)  # whatever was drawn before
    assert take_steps(job, 2) == found[0][0] != take_steps(plain, 2)
    seeds = {job.feed.seed(job.position, number) for number in range(2)}
    job.position = type(job.position)(7, 28)
    assert len(seeds | {job.feed.seed(job.position, number) for number in range(2)}) == 4
    assert not plain.facts.draws


@pytest.mark.extensive("compiled graphs")
@multirank(2)
def test_compiled_blocks_and_bfloat16(rank: int, world_size: int, tmp_path: Path) -> None:
    torch._dynamo.reset()
    if rank == 0:
        folder_with("llama", tmp_path / "llama")
    dist.barrier()
    steps = {}
    for name, options in {
        "plain": {},
        "compiled": {"train": {"compile": "aot_eager"}},
        "bfloat16": {"param_dtype": "bfloat16"},
    }.items():
        steps[name] = [
            loss for loss, _ in take_steps(job_of(tmp_path / "llama", rank, world_size, **options), 3)
        ]
    assert steps["compiled"] == pytest.approx(steps["plain"], rel=1e-6)
    assert steps["bfloat16"] == pytest.approx(steps["plain"], rel=1e-2)
    assert steps["bfloat16"] != steps["plain"]
    torch._dynamo.reset()


@multirank(2)
def test_the_balance_loss_of_experts(rank: int, world_size: int, tmp_path: Path) -> None:
    """The config asks for the loss: it is the one that transformers adds to its loss."""
    if rank == 0:
        folder_with("mixtral", tmp_path / "mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    dist.barrier()
    job = job_of(tmp_path / "mixtral", rank, world_size)
    assert dict(job.losses.auxiliary) == {"balance": 0.5}
    # Tokens that use each pair of the four experts alike.
    pairs = torch.tensor(list(combinations(range(4), 2)))
    gates = torch.zeros(6, 4).scatter(1, pairs, 20.0)
    alike = transformers_model.balance_loss(type(job.model.model))((gates,), 4, 2)
    assert job.losses.meanings["balance"] == f"load of the experts; {float(alike):g}: all equal"
    _, inputs, targets, *_ = next_step(job)
    sums = job.losses.sums(Batch(inputs, targets, None, None))
    model = reloaded(tmp_path / "mixtral").train()
    labels = torch.cat((inputs[:, :1], targets), 1)
    theirs = model(input_ids=inputs, labels=inputs, use_cache=False)
    torch.testing.assert_close(sums[1] / targets.numel(), theirs.aux_loss)
    assert labels.shape[1] == 17
    loss = nn.functional.cross_entropy(theirs.logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(sums[0] / targets.numel(), loss)


def test_float8_converts_linear_layers_of_blocks(tmp_path: Path) -> None:
    wide = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 4}
    folder = folder_with("llama", tmp_path / "llama", **wide)
    from shardwright.train.config import Config

    config = Config.model_validate(
        {
            "model": {"kind": "hf", "path": str(folder)},
            "train": {"float8": "rowwise", "seq_len": 64},
            "parallel": {"param_dtype": "bfloat16"},
        }
    )
    with emulated():
        model = build_model(config.model, 256)
        convert(model, config.for_building)
        names = [name for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"]
        assert len(names) == 3 * 7 and not any("lm_head" in name for name in names)


def test_float8_leaves_routers_alone(tmp_path: Path) -> None:
    """Those of JetMoE are linear layers inside a module that is named router."""
    from transformers import JetMoeConfig, JetMoeForCausalLM

    from shardwright.train.config import Config

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2}
    experts = {"num_local_experts": 16, "num_experts_per_tok": 2, "vocab_size": 256, "kv_channels": 16}
    folder = tmp_path / "jetmoe"
    JetMoeForCausalLM(JetMoeConfig(**sizes, **experts)).save_pretrained(folder)
    values = {"model": {"kind": "hf", "path": str(folder)}, "train": {"float8": "rowwise", "seq_len": 64}}
    config = Config.model_validate({**values, "parallel": {"param_dtype": "bfloat16"}})
    with emulated():
        model = build_model(config.model, 256)
        convert(model, config.for_building)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    routers = {kinds[name] for name in kinds if name.endswith("router.layer")}
    assert routers == {"Linear"} and "Float8Linear" in kinds.values()


def test_a_run_its_resume_and_the_other_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with("qwen3", tmp_path / "qwen3")
    job = config_file(tmp_path, JOB)
    options = (*OWN, folder)
    assert train_here(job, *options, "--run.dir", tmp_path / "one", "--train.steps", "4") == 0
    sharded = ("--run.dir", tmp_path / "two", "--parallel.memory", "arena", "--train.steps", "2")
    ended = ranks(2, "train", job, *options, *sharded)
    assert [status for status, _ in ended] == [0, 0], ended
    capsys.readouterr()
    resume = ["train", "--resume", str(tmp_path / "two"), "--train.steps", "4"]
    assert cli.main([*resume, "--parallel.memory", "dynamic"]) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert records(tmp_path / "one")[0]["flops_per_second"] > 0
    stored = (tmp_path / "two" / "config.toml").read_text()
    assert f'path = "{folder}"' in stored
    assert cli.main(["generate", str(tmp_path / "two"), "--prompt", "The", "--tokens", "2"]) == 0
    assert cli.main(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    capsys.readouterr()
    assert cli.main(["layout", str(job), *map(str, options), "--world-size", "2,64"]) == 0
    out = capsys.readouterr().out
    assert (
        "model.model.layers.0..2 (3 units)" in out and "model.model.norm, model.lm_head: 2 parameters" in out
    )
    assert cli.main(["extensions", "models"]) == 0
    assert "Keys of [model]: path, weights, blocks" in capsys.readouterr().out


@pytest.mark.extensive("each engine")
@pytest.mark.parametrize("engine", ["none", "ddp", "fsdp2", "fsdp1"])
def test_the_other_engines_read_weights_too(tmp_path: Path, engine: str) -> None:
    folder = folder_with("gemma2", tmp_path / "gemma2")
    job = config_file(tmp_path, JOB)
    found = []
    for name in dict.fromkeys(("shardwright", engine)):
        path = tmp_path / name
        assert train_here(job, *OWN, folder, "--run.dir", path, "--parallel.engine", name) == 0
        found.append(losses(path))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_an_encoder_would_be_seen() -> None:
    """The check of causality, with a model that has no causal mask, and with one that has."""
    tokens = torch.arange(8)[None]

    class Logits(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=tokens_BS).logits
            return logits

    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=256, **sizes))
    assert sees_later_tokens(Logits(encoder.eval()), tokens, 256)
    assert not sees_later_tokens(Logits(made("llama").eval()), tokens, 256)


def test_names_and_config_of_an_export(tmp_path: Path) -> None:
    """transformers' own names of stored tensors: experts one by one."""
    folder = folder_with("mixtral", tmp_path / "mixtral", torch_dtype="bfloat16")
    shape = HuggingFaceShape(str(folder))
    keys = transformers_model.key_map(shape)
    with torch.device("meta"):
        assert keys.keys() == dict(build_model_on_meta(shape).state_dict()).keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in str(
        keys["model.model.layers.0.mlp.experts.down_proj"]
    )
    config = transformers_model.config_json(shape)
    assert config["architectures"] == ["MixtralForCausalLM"] and config["dtype"] == "float32"
    assert config["num_local_experts"] == 4 and "torch_dtype" not in config


def build_model_on_meta(shape: HuggingFaceShape) -> nn.Module:
    return transformers_model.HuggingFaceModel(shape)
