"""The recipes in examples/configs: each has the verdict of its plan in its comments, and trains scaled down."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import main
from shardwright.train.config import load_config
from tests.train.kit.jobs import losses, run
from tests.train.kit.qwen3 import QWEN3_8B, SMALL_QWEN3, folder_of_model

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
RECIPES = sorted(path.name for path in CONFIGS.glob("*.toml"))
CHAT = {"messages": [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong " * 9}]}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
)
#: Sizes with which two ranks of a CPU train two steps in seconds.
SCALED = {
    "run.device": "cpu", "run.sample_tokens": 0, "train.steps": 2, "train.seq_len": 64, "train.global_batch": 4,
    "train.micro_batch": 1, "train.compile": "none", "validation.every": 2, "checkpoint.every": 2,
    "optimizer.warmup_steps": 1, "fault.max_restarts": 0,
}  # fmt: skip
SHAPES = {
    "llama": {
        "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 300, "max_seq_len": 64
    },
    "hybrid": {
        "dim": 32, "pattern": "M-*-", "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 64, "vocab_size": 300,
        "max_seq_len": 64, "mamba_heads": 4, "mamba_head_dim": 8, "mamba_groups": 2, "mamba_state": 8, "chunk_size": 16,
    },
}  # fmt: skip


def is_foreign(text: str) -> bool:
    return 'kind = "hf"' in text


def said(values: dict[str, Any]) -> str:
    """The verdict of a plan, as a recipe has it."""
    assert values["fits"] == "yes", values
    reserved, whole = (f"{values[key] / 2**30:.1f}" for key in ("reserved_bytes", "room_bytes"))
    tokens = values["speed"]["tokens_per_second"][1]
    return f"{reserved} GiB reserved of {whole}, {tokens:,.0f} tokens/s on each device."


@pytest.mark.extensive("a plan of each recipe", but=("llama_1b_muon.toml",))
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "cpu_debug.toml"])
def test_a_recipe_has_the_verdict_of_its_plan(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (CONFIGS / name).read_text()
    found = re.findall(
        rf"^# (.*)\n#   shardwright plan examples/configs/{name} (--on .*)$", text, re.MULTILINE
    )
    assert found
    command = ["plan", str(CONFIGS / name), "--json", "--no-edits", "--no-cache"]
    if is_foreign(text):
        pytest.importorskip("transformers", reason="needs transformers")
        folder = folder_of_model(QWEN3_8B, tmp_path / "model")
        command += ["--model.path", str(folder), "--model.weights", "random", "--data.tokenizer", "bytes"]
    for verdict, options in found:
        assert main([*command, *options.split()]) == 0
        assert verdict.endswith(said(json.loads(capsys.readouterr().out)))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_it_is_started(name: str) -> None:
    text = (CONFIGS / name).read_text()
    assert f"shardwright train examples/configs/{name}" in text
    table = (CONFIGS / "README.md").read_text()
    assert f"[{name}]({name})" in table
    if not is_foreign(text):
        load_config(CONFIGS / name, (), ranks=int((re.search(r"--on (\d+)x", text) or [1, 2])[1]))


@pytest.mark.extensive("a job of one or two ranks for each recipe")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_scaled_down(name: str, tmp_path: Path) -> None:
    text = (CONFIGS / name).read_text()
    kind = "hf" if is_foreign(text) else "hybrid" if 'kind = "hybrid"' in text else "llama"
    keys: dict[str, object] = SCALED | {"run.dir": tmp_path / "run"}
    keys |= {f"model.{key}": value for key, value in SHAPES.get(kind, {}).items()}
    for key, value in (("replicas", 2), ("tensor", 2), ("context", 2)):
        if f"\n{key} = " in text:
            keys[f"parallel.{key}"] = value
    if kind == "hf":
        pytest.importorskip("transformers", reason="needs transformers")
        folder = folder_of_model(SMALL_QWEN3, tmp_path / "model")
        keys |= {"model.path": folder, "model.weights": "random", "data.tokenizer": "bytes"}
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(CHAT | {"text": "word " * 40}) + "\n" for _ in range(64)))
        (tmp_path / "template.jinja").write_text(TEMPLATE)
        if "conversations" in text:
            keys |= {"data.source": data, "data.chat_template": tmp_path / "template.jinja"}
        else:
            text = re.sub(r'path = "(my-documents|general-text).jsonl"', f'path = "{data}"', text)
            text = text.replace("Qwen/Qwen3-8B", str(folder))
    (tmp_path / name).write_text(text)
    options = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    ranks = "1" if re.search(r"--on [a-z]", text) else "2"
    status, out, err = run("train", tmp_path / name, *options, "--nproc", ranks, cwd=tmp_path)
    assert status == 0, out + err
    assert len(losses(tmp_path / "run")) == 2
