"""`shardwright export` of runs with models of transformers: what `from_pretrained` computes from the folder."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import cli
from shardwright.train.finetune import adapters
from shardwright.train.models.build import model_of
from shardwright.train.step import loading
from tests.train.kit.jobs import config_file, ranks, run_config, train_here
from tests.train.kit.logs import heard
from tests.train.models.kit.architectures import folder_with, reloaded
from tests.train.models.kit.foreign import JOB

pytest.importorskip("transformers", reason="needs transformers")

KINDS = ("llama", "gpt2", "gemma2", "mixtral", "deepseek_v3", "nemotron_h", "jamba")
"""Two are tied (gpt2, gemma2), three have experts, two are hybrids."""
ADAPTED = ("llama", "gemma2", "mixtral", "deepseek_v3", "nemotron_h")
QUICK = (
    *("--train.steps", "2", "--train.seq_len", "16", "--train.global_batch", "4", "--validation.every", "0"),
    *("--run.sample_tokens", "0", "--optimizer.lr", "0.02"),
)
LORA = ("--finetune.method", "lora", "--finetune.rank", "4")
FILES = {
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small model of a type."""
    return functools.cache(lambda kind: folder_with(kind, tmp_path_factory.mktemp(kind) / "base"))


@pytest.fixture(scope="module")
def trained(base: Callable[[str], Path]) -> Callable[..., Path]:
    """A run of two steps with a model of a type, on one rank or two."""

    @functools.cache
    def run(kind: str, *options: str, count: int = 1) -> Path:
        folder = base(kind).parent / f"run{count}{len(options)}"
        job = config_file(base(kind).parent, JOB)
        arguments = ("--model.kind", "hf", "--model.path", base(kind), *QUICK, *options, "--run.dir", folder)
        if count == 1:
            assert train_here(job, *arguments, "--parallel.engine", "none") == 0
        else:
            ended = ranks(count, "train", job, *arguments, "--parallel.layout", "ragged")
            assert [status for status, _ in ended] == [0] * count, ended
        return folder

    return run


def model_of_run(run: Path) -> Any:
    """The model with the values of the run's checkpoint, in evaluation."""
    config = run_config(run)
    model = model_of(config.model.shape())
    model.read_weights()
    adapters.adapt(model, config.finetune, config.run.seed)
    loading.load_weights(run / "checkpoints" / "step-2", model)
    return model.eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))


def exported(run: Path, out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """The model that transformers loads from the folder. Every tensor is there, and none is left over."""
    capsys.readouterr()
    assert cli.main(["export", *options, str(run), str(out)]) == 0
    line, error = capsys.readouterr()
    assert line.startswith(f"{out}: step 2, ") and line.count("\n") == 1 and error == ""
    assert "from_pretrained reads it" in line
    assert {path.name for path in out.iterdir()} == FILES
    return reloaded(out).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    output = model(tokens())
    return getattr(output, "logits", output)


@pytest.mark.extensive("architectures of transformers", but=("llama", "gpt2"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_computes_the_logits_of_the_run(
    kind: str,
    base: Callable[[str], Path],
    trained: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import transformers

    run = trained(kind)
    theirs = exported(run, tmp_path / "out", capsys)
    assert torch.equal(logits(theirs), logits(model_of_run(run)))
    assert not torch.equal(logits(theirs), logits(reloaded(base(kind)).eval()))  # the run has changed it
    tied = theirs.get_input_embeddings().weight is theirs.get_output_embeddings().weight
    assert tied == (kind in ("gpt2", "gemma2"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("für 漢")["input_ids"] == list("für 漢".encode())
    if kind == "llama":
        longer = torch.randint(3, 256, (1, 20))  # than the samples of the run
        with heard("transformers") as messages:
            theirs.generate(longer, attention_mask=torch.ones_like(longer), max_new_tokens=2)
        assert messages == []


@pytest.mark.extensive("a run of two ranks")
def test_a_run_of_two_ranks_is_exported_by_one(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("gemma2", count=2)
    theirs = exported(run, tmp_path / "out", capsys)
    assert torch.equal(logits(theirs), logits(model_of_run(run)))


@pytest.mark.extensive("architectures of transformers", but=("llama*",))
@pytest.mark.parametrize("kind", ADAPTED)
def test_merged_adapters_compute_the_logits_of_the_run(
    kind: str,
    base: Callable[[str], Path],
    trained: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The bits are those of the merged model. Without merging, a layer adds two products, each rounded; merged, the sum
    of the weights is rounded once, in float32. So logits differ by a few roundings of 6e-8 in each layer."""
    run = trained(kind, *LORA)
    theirs, ours = exported(run, tmp_path / "out", capsys), model_of_run(run)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-5, atol=1e-5)
    assert (logits(theirs) - logits(reloaded(base(kind)).eval())).abs().max() > 1e-3  # what was trained
    adapters.merge(ours)
    assert torch.equal(logits(theirs), logits(ours))


ATTENTION = ("--finetune.targets", '["*self_attn.*"]')


@pytest.mark.parametrize(
    ("kind", "targets"), [("llama", ()), ("gemma2", ()), ("mixtral", ()), ("deepseek_v3", ATTENTION)]
)
def test_peft_computes_the_logits_of_the_run(
    kind: str,
    targets: tuple[str, ...],
    trained: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft", reason="needs peft, to compare with")
    run, out = trained(kind, *LORA, *targets), tmp_path / "adapters"
    capsys.readouterr()
    assert cli.main(["export", "--adapters", str(run), str(out)]) == 0
    assert "peft.AutoPeftModelForCausalLM.from_pretrained" in capsys.readouterr().out
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of missing or unexpected keys
        theirs = peft.AutoPeftModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(logits(theirs.eval()), logits(model_of_run(run)))


@pytest.mark.extensive("a run of two ranks")
def test_adapters_of_two_ranks_are_merged(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("llama", *LORA, count=2)
    theirs, ours = exported(run, tmp_path / "out", capsys), model_of_run(run)
    adapters.merge(ours)
    assert torch.equal(logits(theirs), logits(ours))


def test_adapters_that_peft_would_give_to_experts_are_refused(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers outside of the experts, which have the names of layers of experts."""
    run = trained("deepseek_v3", *LORA)
    capsys.readouterr()
    assert cli.main(["export", "--adapters", str(run), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: finetune.targets: peft takes adapters on 'model.model.layers.0.mlp.gate_proj'"
    )
    assert "export the merged model instead" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
