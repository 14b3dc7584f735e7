"""Settings and patterns: each mistake is one line that names the key and the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.train.config import Config, load_config
from shardwright.train.errors import UserError
from shardwright.train.finetune.adapters import adapt, adapted_layers, statement, trained_names
from tests.train.finetune.kit import build, settings
from tests.train.kit.jobs import tiny

LORA: dict[str, Any] = {"method": "lora", "rank": 4}


def test_settings_load_without_torch() -> None:
    code = "import sys, shardwright.train.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank = 8", "finetune.rank: found 8 with method 'full', which trains all parameters"),
        ('method = "lora"\nrank = 0', "finetune.rank: expected an integer >= 1, found 0"),
        ('method = "lora"\ndropout = 1.0', "finetune.dropout: expected a number >= 0 and < 1, found 1.0"),
        ('method = "dora"\ndropout = 0.1', "finetune.dropout: expected 0 with method 'dora', found 0.1"),
        ('method = "qlora"', "finetune.method: expected one of full, lora, dora, found \"qlora\""),
        ('method = "lora"\ntarget = ["wq"]', "unknown key finetune.target; did you mean finetune.targets?"),
        ('method = "lora"\ntargets = "wq"', "finetune.targets: expected a list of strings, found \"wq\""),
        ('method = "lora"\n[parallel]\ntensor = 2', "parallel.tensor: expected 1 with finetune.method = 'lora'"),
        ('method = "lora"\n[parallel]\nengine = "fsdp1"', "parallel.engine: expected 'shardwright', 'fsdp2', 'ddp'"),
        (
            'method = "lora"\nbase_dtype = "bfloat16"\n[parallel]\nengine = "ddp"',
            "finetune.base_dtype: expected 'float32' with parallel.engine 'ddp'",
        ),
        ('method = "lora"\n[train]\nfloat8 = "rowwise"\n[parallel]\nparam_dtype = "bfloat16"',
         "train.float8: expected 'none' with finetune.method = 'lora'"),
        ('method = "lora"\ndropout = 0.1\n[train]\ncuda_graph = true',
         "train.cuda_graph: expected false with finetune.dropout"),
    ],
)  # fmt: skip
def test_wrong_values(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"[finetune]\n{text}\n")
    with pytest.raises(UserError) as caught:
        load_config(file)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_configuration_is_written_and_read_back(tmp_path: Path) -> None:
    config = tiny(finetune={**LORA, "targets": ["wq", "*.w1"], "alpha": 8, "rslora": True})
    (tmp_path / "job.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "job.toml") == config
    assert config.finetune.scale == 8 / 2
    assert Config().finetune.method == "full"


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 8, 16))


class Odd(nn.Module):
    """Blocks with a fused layer, a linear one, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"experts": Fused(), "proj": nn.Linear(8, 8)}) for _ in range(2)
        )
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("llama", {"targets": ["q_proj"]}, "found 'q_proj', which fits none; there are wq, wk, wv, wo"),
        ("llama", {"targets": ["wqq"]}, "found 'wqq', which fits none; near names: wq"),
        ("llama", {"targets": ["attention"]}, "write 'attention.*' for all of them"),
        ("llama", {"targets": ["attention_norm"]}, "a RMSNorm without a matrix; adapters need torch.nn.Linear"),
        ("llama", {"targets": ["tok_embeddings"]}, "a Embedding with weight [64, 32]"),
        ("llama", {"train_also": ["norms.weight"]}, "finetune.train_also: expected patterns of parameters"),
        ("llama", {"train_also": ["atention_norm.weight"]}, "near names: attention_norm.weight"),
        ("llama", {"rank": 17}, "expected at most 16, the smaller side of 'layers.0.attention.wk' (16 x 32)"),
        ("hybrid", {"targets": ["router"]}, "fits the router 'layers.3.mixer.router'; its weight is used directly"),
        ("odd", {"targets": ["experts"]}, "'layers.0.experts', a Fused with up [4, 8, 16]"),
        ("odd", {"targets": ["head"]}, "which shares its weight with 'embed.weight'"),
        ("gpt2", {}, "their matrices are in Conv1D, which can have no adapters here"),
        ("gpt2", {"targets": ["c_attn"]}, "a Conv1D with weight [32, 96]; adapters need torch.nn.Linear"),
    ],
)  # fmt: skip
def test_patterns_that_do_not_fit(kind: str, values: dict[str, Any], words: str) -> None:
    if kind == "gpt2":
        transformers = pytest.importorskip("transformers", reason="needs a model with Conv1D")
        config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
        model = transformers.GPT2LMHeadModel(config)
    else:
        model = Odd() if kind == "odd" else build(kind)
    before = {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    with pytest.raises(UserError) as caught:
        adapt(model, settings(**values), seed=0)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert before == {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    assert not list(adapted_layers(model))


def test_default_targets_are_the_linear_layers_of_blocks_without_routers() -> None:
    names = [name for name, _ in adapted_layers(build("hybrid", settings()))]
    ends = {name.rpartition(".")[2] for name in names}
    assert ends == {"in_proj", "wq", "wk", "wv", "wo", "up", "down"} and "output" not in names
    odd = Odd()
    adapt(odd, settings(), seed=0)
    assert [name for name, _ in adapted_layers(odd)] == ["layers.0.proj", "layers.1.proj"]
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    adapt(plain, settings(targets=["*"]), seed=0)
    assert [name for name, _ in adapted_layers(plain)] == ["0", "2"]


def test_patterns_choose_layers_and_parameters() -> None:
    own = settings(targets=["wq", "layers.1.feed_forward.*"], train_also=["*norm.weight", "output.weight"])
    model = build("llama", own, tied_embeddings=True)
    assert [name for name, _ in adapted_layers(model)] == [
        "layers.0.attention.wq", "layers.1.attention.wq", "layers.1.feed_forward.w1", "layers.1.feed_forward.w2",
        "layers.1.feed_forward.w3",
    ]  # fmt: skip
    also = [name for name in trained_names(model) if "lora" not in name]
    norms = [f"layers.{n}.{which}_norm.weight" for n in (0, 1) for which in ("attention", "ffn")]
    assert sorted(also) == sorted(["tok_embeddings.weight", *norms, "norm.weight"])
    assert "wq x 2, w1 x 1" in statement(model) and "and 6 parameters of the base" in statement(model)


def test_adapt_happens_once() -> None:
    with pytest.raises(RuntimeError, match="has adapters already"):
        adapt(build("llama", settings()), settings(), seed=0)
