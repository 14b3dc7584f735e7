"""Activation checkpointing and compiled blocks: the same losses, less memory, no further gathers, plain names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.engine.compat import compiled_graphs, set_activation_memory_budget
from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.models.build import build_model
from shardwright.train.models.native.llama import Rope
from shardwright.train.parallel import activations
from shardwright.train.parallel.activations import prepare_blocks
from shardwright.train.parallel.checks import check_division
from shardwright.train.parallel.recipe import parallelize
from shardwright.train.report import jsonl
from tests.engine.kit.counting import counted
from tests.support import multirank, world_mesh
from tests.support.storages import Storages
from tests.train.kit.jobs import config_file, ranks, tiny, train_here
from tests.train.parallel.kit.activations import KINDS

#: The bits are those of the plain model, unless a compiler has changed the order of sums.
MODES: dict[str, dict[str, Any]] = {
    "full": {"checkpoint": "full"},
    "layers": {"checkpoint": "layers", "every": 3},
    "ops": {"checkpoint": "ops"},
}


def config(
    kind: str = "llama", activation: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Config:
    return tiny(model=KINDS[kind], activations=activation or {}, **sections)


def job(kind: str, dtype: str = "float32", **sections: dict[str, Any]) -> Config:
    return config(kind, parallel={"engine": "shardwright", "param_dtype": dtype}, **sections)


def build(settings: Config) -> Any:
    torch.manual_seed(0)
    model = build_model(settings.model, 256)
    prepare_blocks(model, settings.activations, settings.train.compile)
    return model


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, settings: Config, seed: int) -> torch.Tensor:
    if settings.model.kind == "llama":
        return model(tokens(seed)).float().logsumexp(-1).mean()
    logits, extras = model(tokens(seed), extras=True)
    more = extras.imbalance_B.mean() + extras.mtp_logits_BSV.float().logsumexp(-1).mean()
    return logits.float().logsumexp(-1).mean() + more


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(settings: Config, rank: int, world_size: int, steps: int = 3) -> dict[str, Any]:
    """Losses and gradients of some steps on every rank's own data, how often weights were gathered, and graphs made."""
    model = parallelize(build(settings), settings.parallel, world_mesh(world_size))
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    found: dict[str, Any] = {"losses": [], "gradients": [], "graphs": []}
    with counted() as calls:
        for step in range(steps):
            loss = loss_of(model, settings, step * world_size + rank)
            loss.backward()
            found["losses"].append(loss.detach())
            found["gradients"] += [full(p.grad).clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            found["graphs"].append(compiled_graphs())
    found["calls"] = dict(calls)
    found["names"] = list(model.state_dict())
    return found


@pytest.mark.extensive("each model", but=("llama-*",))
@multirank(2)
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes_and_nothing_more_is_gathered(rank: int, world_size: int, kind: str) -> None:
    expected = trained(job(kind), rank, world_size)
    for mode in MODES.values():
        found = trained(job(kind, activation=mode), rank, world_size)
        assert found["names"] == expected["names"]
        assert found["calls"] == expected["calls"]
        for key in ("losses", "gradients"):
            assert all(map(torch.equal, found[key], expected[key])), (key, mode)


def kept(settings: Config) -> int:
    """Bytes that live from forward to backward."""
    model = build(settings)
    with Storages(lambda frame: "kept") as storages:
        inputs = tokens(0)
        for tensor in (inputs, *model.parameters(), *model.buffers()):
            storages.know(tensor.untyped_storage())
        storages.settle()
        logits = model(inputs)
        nbytes = storages.settle()
    del logits
    return nbytes


def test_what_is_kept() -> None:
    settings = config()
    batch, length, dim = 2, 32, settings.model.shape().dim
    none = kept(settings)
    by_mode = {name: kept(config(activation=mode)) for name, mode in MODES.items()}
    assert by_mode["full"] < by_mode["ops"] < none
    assert by_mode["full"] < by_mode["layers"] < none
    # Every second block more: its input alone, which is the output of the block before.
    fewer = tiny(model={"n_layers": 2}, activations=MODES["full"])
    assert by_mode["full"] - kept(fewer) == 2 * batch * length * dim * 4
    # Of four blocks two are kept as they are, and each of the others as its input.
    assert by_mode["layers"] == (none + by_mode["full"]) // 2
    one = config(activation={"checkpoint": "layers", "every": 100})
    assert kept(one) == (3 * none + by_mode["full"]) // 4


@pytest.mark.extensive("many compiled graphs")
@multirank(2)
@pytest.mark.parametrize(
    ("kind", "mode", "memory"),
    [
        ("llama", None, "dynamic"),
        ("llama", "full", "arena"),
        ("llama", "ops", "max_pool"),
        ("hybrid", "full", "dynamic"),
    ],
)
def test_blocks_are_compiled_whole_and_once(
    rank: int, world_size: int, kind: str, mode: str | None, memory: str
) -> None:
    """fullgraph=True makes a break of the graph an error."""
    torch._dynamo.reset()
    dtype = "float32" if kind == "llama" else "bfloat16"
    plain = job(kind, dtype, activation=MODES[mode] if mode else {})
    compiled = copy.deepcopy(plain)
    compiled = compiled.model_copy(
        update={"train": compiled.train.model_copy(update={"compile": "aot_eager"})}
    )
    compiled = compiled.model_copy(
        update={"parallel": compiled.parallel.model_copy(update={"memory": memory})}
    )
    expected = trained(plain, rank, world_size, 5)
    before = compiled_graphs()
    found = trained(compiled, rank, world_size, 5)
    different = 1 if kind == "llama" else len(set("M*E-m"))
    assert [made - before for made in found["graphs"]] == [different] * 5
    assert found["names"] == expected["names"]
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for key in ("losses", "gradients"):
        for ours, theirs in zip(found[key], expected[key], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    torch._dynamo.reset()


@pytest.mark.extensive("many compiled graphs")
@pytest.mark.parametrize("mode", ["full", "ops"])
def test_unlike_blocks_may_have_many_graphs(mode: str) -> None:
    """Checkpoints of all blocks are one function of torch, of which it makes 8 graphs by itself."""
    torch._dynamo.reset()
    settings = job("hybrid", "bfloat16", activation=MODES[mode], train={"compile": "aot_eager"})
    model, before = build(settings).to(torch.bfloat16), compiled_graphs()
    loss_of(model, settings, 0).backward()
    with torch.no_grad():
        model.eval()
        loss_of(model, settings, 1)
    assert compiled_graphs() - before > 8
    torch._dynamo.reset()


def test_recompiles_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    monkeypatch.setattr(activations, "compiled_graphs", lambda: made)
    count = activations.Recompiles()
    for by_step, outside in ((2, 1), (1, 0), (0, 3), (1, 5), (0, 0), (3, 0)):
        with count.step():
            made += by_step
        made += outside
    assert count.later == 4


@pytest.mark.extensive("compiled graphs")
def test_what_the_compiler_keeps_within_a_budget() -> None:
    torch._dynamo.reset()
    nbytes = []
    for budget in (0.0, 0.5, 1.0):
        settings = config(
            activation={"checkpoint": "budget", "budget": budget}, train={"compile": "inductor"}
        )
        partitions = settings.train.model_copy(update={"compile": "aot_eager_decomp_partition"})
        model = build(settings.model_copy(update={"train": partitions}))
        hidden = torch.randn(2, 32, settings.model.shape().dim, requires_grad=True)
        graph: Any = model.layers[0](hidden, Rope(model.rope_cos[:32], model.rope_sin[:32])).grad_fn
        nbytes.append(sum(tensor.nbytes for tensor in graph.saved_tensors))
        torch._dynamo.reset()
    set_activation_memory_budget(1.0)
    assert nbytes[0] < nbytes[1] < nbytes[2]


def test_a_budget_is_that_of_one_job() -> None:
    """A later job in the same process keeps all that it saves: torch cannot compile "ops" with a budget."""
    import torch._functorch.config as functorch

    for mode, compiler, expected in (("budget", "inductor", 0.25), ("ops", "aot_eager", 1.0)):
        own = {"checkpoint": mode} | ({"budget": 0.25} if mode == "budget" else {})
        build(config(activation=own, train={"compile": compiler}))
        assert functorch.activation_memory_budget == expected


@pytest.mark.extensive("compiled graphs")
def test_a_compiled_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    run = ["--parallel.engine", "shardwright", "--train.steps", "5"]
    assert train_here(config_file(tmp_path), "--run.dir", tmp_path / "plain", *run) == 0
    options = ["--train.compile", "aot_eager", "--activations.checkpoint", "ops"]
    assert train_here(config_file(tmp_path), "--run.dir", tmp_path / "run", *run, *options) == 0
    assert "compiled        2 graphs, 0 of them after step 3" in capsys.readouterr().out  # one for validation
    losses = [
        [r["loss"] for r in jsonl.read_records(tmp_path / d / "metrics.jsonl")] for d in ("plain", "run")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    torch._dynamo.reset()


@pytest.mark.extensive("each engine")
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_other_engines_keep_their_losses(tmp_path: Path, engine: str) -> None:
    file = config_file(tmp_path)
    losses = []
    for mode in ("none", "full"):
        arguments = ["train", file, "--parallel.engine", engine, "--activations.checkpoint", mode]
        arguments += ["--run.dir", tmp_path / mode, "--train.steps", "2", "--train.global_batch", "4"]
        done = ranks(2, *arguments)
        assert [status for status, _ in done] == [0, 0], done
        losses.append([r["loss"] for r in jsonl.read_records(tmp_path / mode / "metrics.jsonl")])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--activations.checkpoint", "budget"],
            "activations.checkpoint: expected train.compile = 'inductor'",
        ),
        (["--activations.every", "3"], "activations.every: only for checkpoint = 'layers'"),
        (["--activations.checkpoint", "budget", "--activations.budget", "2"], "activations.budget"),
        (["--train.compile", "aot_eager", "--parallel.engine", "fsdp1"], "train.compile: expected 'none'"),
        (["--train.compile", "aot_eager", "--model.kind", "hybrid", "--model.n_layers", "none"], "n_layers"),
    ],
)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert train_here(config_file(tmp_path), "--run.dir", tmp_path / "run", *options) != 0
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_experts_in_float32_are_not_compiled() -> None:
    compiled = config("hybrid", train={"compile": "aot_eager"})
    with pytest.raises(UserError, match="param_dtype"):
        check_division(compiled, 1)
