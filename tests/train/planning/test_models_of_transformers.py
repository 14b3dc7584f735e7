"""Plans of models of transformers from their config.json alone: peaks beside real steps, the command, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import main
from shardwright.train.config import Config
from shardwright.train.config.plans.job_of_model import assumed_job
from shardwright.train.models.hf.layers import described, shape_with_layers
from shardwright.train.planning.programs import composed_program, program_of, traced_program
from shardwright.train.planning.shorter_jobs import series_of
from tests.train.models.kit.architectures import ARCHITECTURES
from tests.train.models.kit.hub import hub
from tests.train.planning.kit import compare, plain

transformers = pytest.importorskip("transformers", reason="needs transformers")

LARGER = {
    "hidden_size": 128, "intermediate_size": 256, "vocab_size": 1024, "max_position_embeddings": 8192, "n_embd": 128,
    "n_positions": 8192, "head_dim": 32, "num_hidden_layers": 4, "n_layer": 4,
}  # fmt: skip

MAMBA = {"mamba2": {"num_heads": 8}, "bamba": {"mamba_n_heads": 8, "mamba_d_head": 32}}


def folder_of(kind: str, folder: Path, **changes: Any) -> Path:
    """A folder with a config.json alone."""
    values = {key: LARGER.get(key, value) for key, value in ARCHITECTURES[kind].items()} | MAMBA.get(kind, {})
    transformers.AutoConfig.for_model(kind, **{**values, **changes}).save_pretrained(folder)
    return folder


def config_of(folder: Path, words: str = "", ranks: int = 2) -> Config:
    overrides = [(key, value) for key, _, value in (word.partition("=") for word in words.split())]
    return assumed_job(f"hf:{folder}", overrides, ranks)(())


ON_CPU = "train.seq_len=256 parallel.param_dtype=float32"
STEPS = {
    "llama": "", "qwen3": "train.micro_batch=2", "gpt2": "activations.checkpoint=full", "gemma2": "",
}  # fmt: skip
MORE_STEPS = {
    "qwen2": "finetune.method=lora", "gemma3_text": "", "mistral": "", "gpt_neox": "", "phi3": "", "olmo2": "",
    "falcon": "", "opt": "", "mamba2": "", "bamba": "", "nemotron_h": "",
}  # fmt: skip


@pytest.mark.extensive("a real step of each", but=("gpt2", "gemma2"))
@pytest.mark.parametrize("kind", STEPS)
def test_a_plan_has_the_peak_of_the_step(kind: str, tmp_path: Path) -> None:
    compare(config_of(folder_of(kind, tmp_path), f"{ON_CPU} {STEPS[kind]}"), kind, 0.005)


@pytest.mark.extensive("each architecture")
@pytest.mark.parametrize("kind", MORE_STEPS)
def test_a_plan_has_the_peak_of_the_step_of_each_architecture(kind: str, tmp_path: Path) -> None:
    compare(config_of(folder_of(kind, tmp_path), f"{ON_CPU} {MORE_STEPS[kind]}"), kind, 0.005)


#: Changes of config.json for many layers, and how often their pattern repeats.
LONG: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({"num_hidden_layers": 20}, 20),
    "gpt2": ({"n_layer": 20}, 20),
    "gemma2": ({"num_hidden_layers": 42}, 21),
    "opt": ({"num_hidden_layers": 20}, 20),
    "mamba2": ({"num_hidden_layers": 20}, 20),
    "nemotron_h": ({"layers_block_type": ["mamba", "attention", "mlp"] * 14 + ["attention"]}, 14),
}


@pytest.mark.extensive("four or more traces of each")
@pytest.mark.parametrize(
    ("kind", "words"), [*((kind, "") for kind in LONG), ("gemma2", "train.compile=inductor")]
)
def test_a_composed_plan_is_the_traced_one(kind: str, words: str, tmp_path: Path) -> None:
    changes, parts = LONG[kind]
    config = config_of(folder_of(kind, tmp_path, **changes), f"train.seq_len=256 {words}")
    *_, layers = series_of(config, 2)
    assert (layers.parts, layers.saves(layers.least)) == (parts, True)
    composed, traced = composed_program(config, 2), traced_program(config, 2)
    assert composed is not None
    assert plain(composed) == plain(traced)


def test_layers_that_differ_are_not_repeated(tmp_path: Path) -> None:
    """The lists of config.json say which layers slide. A key that its class reads for itself is seen in the layers."""
    kinds = ["sliding_attention", "full_attention"] * 12
    folder = folder_of("gemma2", tmp_path / "a", num_hidden_layers=24, layer_types=kinds)
    shape: Any = config_of(folder).model.shape()
    layers = described(shape).layers
    assert layers[0] == layers[2] != layers[1] == layers[23]
    shorter = shape_with_layers(shape, [0, 1, 2, 3])
    assert shorter is not None and described(shorter).layers == layers[:4]
    assert shape_with_layers(shape, range(24)) == shape
    assert shape_with_layers(shape, [1, 0]) is not None
    other = folder_of("bamba", tmp_path / "b", num_hidden_layers=8, attn_layer_indices=[6])
    shape = config_of(other).model.shape()
    assert shape_with_layers(shape, [0, 6]) is None  # its second layer has no attention
    assert shape_with_layers(shape, [0, 1]) is not None


def test_a_long_sample_is_one_document_and_needs_no_mask(tmp_path: Path) -> None:
    """Positions of many tokens are computed, so that transformers sees one document in a sample."""
    program = program_of(config_of(folder_of("llama", tmp_path), "train.seq_len=4096"), 2)
    made = {owner.what.partition(" ")[0] for owner in program.owners}
    assert "_scaled_dot_product_flash_attention" in made
    assert "_scaled_dot_product_efficient_attention" not in made


@pytest.mark.extensive("two plans of each", but=("llama",))
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_job_with_documents_that_stay_apart(kind: str, tmp_path: Path) -> None:
    """The model looks how its class does it, with a small model on real tensors."""
    folder = folder_of(kind, tmp_path, num_hidden_layers=8)
    words = "train.seq_len=512 data.document_mask=true"
    config = config_of(folder, words)
    assert config.data.separates
    program = program_of(config, 2)
    assert program.peak().nbytes == program_of(config_of(folder, "train.seq_len=512"), 2).peak().nbytes


def test_the_command_prints_what_it_assumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of("llama", tmp_path, max_position_embeddings=512)
    words = ("--train.micro_batch", "2", "--optimizer.name", "adamw8bit")
    assert main(["plan", f"hf:{folder}", "--on", "2xh100", *words]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    model, job, batch, *lines = out.splitlines()
    assert model.startswith(f"the model of {str(folder)!r} (")
    assert "bfloat16, adamw8bit" in job and batch.startswith(
        "global batch 4 in 1 micro-batch of 2 x 512 tokens"
    )
    options = " ".join(
        lines[lines.index(next(line for line in lines if line.startswith("assumed"))) + 1 :]
    ).split()
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    assert pairs["--train.seq_len"] == "512" and pairs["--train.global_batch"] == "4"
    assert pairs["--activations.checkpoint"] == "none"
    assert not {"--train.micro_batch", "--optimizer.name"} & set(pairs)
    # Every option may be given as it is printed, and then nothing is assumed.
    assert main(["plan", f"hf:{folder}", "--on", "2xh100", *words, *options]) == 0
    again, error = capsys.readouterr()
    assert error == ""
    assert again.splitlines() == [model, job, batch, *lines[: len(again.splitlines()) - 3]]


@pytest.mark.extensive("a plan for each edit")
def test_edits_of_an_assumed_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of("llama", tmp_path / "model")
    (tmp_path / "small.toml").write_text("gib = 3.1")
    on = f"2x{tmp_path / 'small.toml'}"
    status = main(["plan", f"hf:{folder}", "--on", on, "--json", "--train.micro_batch", "4"])
    figures = json.loads(capsys.readouterr().out)
    assert (status, figures["fits"]) == (3, "no")
    assert figures["assumed"]["train.seq_len"] == 4096 and "train.micro_batch" not in figures["assumed"]
    assert "--train.micro_batch 2" in [edit["keys"] for edit in figures["edits"]]


def test_a_name_on_the_hub_needs_config_json_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of("llama", tmp_path / "models" / "owner" / "tiny")
    with hub(tmp_path / "models") as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        assert main(["plan", "hf:owner/tiny", "--on", "2xh100", "--train.seq_len", "64"]) == 0
        assert "fits?    YES" in capsys.readouterr().out
        assert {path.rpartition("/")[2] for path in asked} == {"config.json"}
        assert main(["plan", "hf:owner/other", "--on", "2xh100"]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and "no model owner/other" in error


#: Changes of config.json, or of the command, and the error.
MISTAKES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "encoder": ({"model_type": "bert"}, [], "an encoder (bert)"),
    "other architecture": ({"architectures": ["BertForMaskedLM"]}, [], "found BertForMaskedLM"),
    "unknown type": ({"model_type": "nowhere"}, [], "found 'nowhere'"),
    "images": ({"vision_config": {"depth": 1}}, [], "found"),
    "too long": ({}, ["--train.seq_len", "8193"], "train.seq_len: expected at most 8192"),
    "tensor parallel": ({}, ["--parallel.tensor", "2"], "parallel.tensor"),
    "a wrong key": ({}, ["--train.seqlen", "8"], "did you mean train.seq_len?"),
    "no micro-batch": ({}, ["--train.micro_batch", "0"], "train.micro_batch"),
    "no number": ({}, ["--train.micro_batch", "many"], "train.micro_batch"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, words, message = MISTAKES[name]
    folder = folder_of("llama", tmp_path)
    content = {**json.loads((folder / "config.json").read_text()), "architectures": None, **changes}
    (folder / "config.json").write_text(json.dumps(content))
    status = main(["plan", f"hf:{folder}", "--on", "2xh100", *words])
    out, error = capsys.readouterr()
    assert (status, out) == (2, "")
    assert len(error.splitlines()) == 1 and message in error


@pytest.mark.parametrize(
    "path, message",
    [
        ("", "expected the folder of a model"), ("{folder}", "expected a folder with a config.json, found none"),
        ("{folder}/none", "which is neither"),
    ],
)  # fmt: skip
def test_a_place_without_a_model_is_one_line(
    path: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["plan", f"hf:{path.format(folder=tmp_path)}", "--on", "2xh100"])
    out, error = capsys.readouterr()
    assert (status, out) == (2, "")
    assert len(error.splitlines()) == 1 and message in error
