"""Models of transformers that get one line of refusal before anything is allocated; and names on the hub."""

from __future__ import annotations

import importlib
import json
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.train.config import Config, load_config
from shardwright.train.config.shapes import foreign as shapes, hub as hub_module
from shardwright.train.config.shapes.foreign import HuggingFaceShape
from shardwright.train.errors import UserError
from shardwright.train.models.hf import transformers_model
from shardwright.train.parallel.checks import check_ranks
from tests.train.kit.jobs import config_file, losses, train_here
from tests.train.models.kit.architectures import SIZES, folder_with, reloaded
from tests.train.models.kit.foreign import JOB
from tests.train.models.kit.hub import COMMIT, hub

pytest.importorskip("transformers", reason="needs transformers")
OWN = ("--model.kind", "hf", "--model.path")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with("llama", tmp_path_factory.mktemp("llama") / "llama")


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def changed(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text())
    content.update(values)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}})
    )


def as_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def another_shape(folder: Path) -> None:
    changed(folder, intermediate_size=48)


def one_more_layer(folder: Path) -> None:
    changed(folder, num_hidden_layers=4)


def stray_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    header["model.stray"] = {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :] + bytes(8))


CONFIG = "model.path: expected a folder with a config.json, found none in "
#: What happens to the folder of a Llama, and the error.
DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (without("config.json"), CONFIG),
    "no JSON": (lambda f: (f / "config.json").write_text("{") and None, r"cannot read .*config.json: JSONDecodeError"),
    "a list": (lambda f: (f / "config.json").write_text("[]") and None, "expected a JSON object in .*, found list"),
    "no type": (lambda f: changed(f, model_type=None), "expected a model_type in the config.json of .*found None"),
    "no vocabulary": (lambda f: changed(f, vocab_size=None), "expected a vocab_size in the config.json"),
    "unknown type": (
        lambda f: changed(f, model_type="nowhere", architectures=None),
        "expected a model type that transformers has, found 'nowhere'",
    ),
    "remote code": (
        lambda f: changed(f, model_type="nowhere", auto_map={"AutoModelForCausalLM": "modeling_x.X"}),
        r"its code is in files of .*\(trust_remote_code\), and shardwright executes no code of models",
    ),
    "encoder": (
        lambda f: changed(f, model_type="bert", architectures=None),
        r"expected a causal language model, found .*, an encoder \(bert\): its tokens see the tokens",
    ),
    "masked": (
        lambda f: changed(f, model_type="bert", architectures=["BertForMaskedLM"]),
        r"expected a causal language model \(an architecture .*\), found BertForMaskedLM",
    ),
    "permuted": (lambda f: changed(f, model_type="xlnet", architectures=None), r"an encoder \(xlnet\)"),
    "two parts": (
        lambda f: changed(f, model_type="t5", is_encoder_decoder=True),
        r"expected a causal language model, found .*, an encoder with a decoder \(t5\)",
    ),
    "of images": (
        lambda f: changed(f, model_type="vit", architectures=None),
        "expected a causal language model, found model type 'vit' in .*, of which transformers has none",
    ),
    "with images": (lambda f: changed(f, vision_config={"a": 1}), "a model of text alone, found .* a vision_config"),
    "quantised": (
        lambda f: changed(f, quantization_config={"quant_method": "gptq"}),
        r"expected weights in floating point, found .* with quantised weights \(method gptq\)",
    ),
    "odd sizes": (
        lambda f: changed(f, hidden_size="wide"), r"the config.json of .* is not one of a llama: .*hidden_size"
    ),
    "impossible sizes": (
        lambda f: changed(f, num_attention_heads=3, head_dim=None), r"model.path: .*(not one of a llama|cannot build)"
    ),
    "no weights": (
        without("model.safetensors"), r'expected weights \(.*model.safetensors\) in .*, found none; .*"random"'
    ),
    "other weights": (as_bin, r"expected weights \(.*model.safetensors\) in .*, found pytorch_model.bin"),
    "cut weights": (cut, r"model.path: .*model.safetensors"),
    "index": (index, "the index names files that are missing: model-00001-of-00002.safetensors"),
    "another shape": (
        another_shape,
        r"does not fit the model.*\(9\): .*gate_proj.weight.* expected shape \(48, 16\), found.* and 5 more; take",
    ),
    "one more layer": (one_more_layer, r"Missing in the files \(9\): 'model.model.layers.3.* and 5 more; take"),
    "stray tensor": (stray_tensor, r"Unexpected, not in the model \(1\): 'model.stray'"),
    "vocabulary": (
        lambda f: changed(f, vocab_size=100),
        "model.path: expected a model with a vocabulary of at least the tokenizer's 256, found 100",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(DAMAGED))
def test_damaged_folders_are_one_error(
    llama: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGED[name]
    damage(copied(llama, tmp_path / "model"))
    job = config_file(tmp_path, JOB)
    assert train_here(job, *OWN, tmp_path / "model", "--run.dir", tmp_path / "run") == 2
    out, error = capsys.readouterr()
    assert re.search(message, error), error
    assert error.startswith("error: ") and error.count("\n") == 1 and "step 1/" not in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"tensor": 2}}, "parallel.tensor: expected 1 with model.kind 'hf', found 2"),
        ({"parallel": {"expert": 2}}, "parallel.expert: expected 1 with model.kind 'hf', found 2"),
        ({"train": {"cuda_graph": True}}, "train.cuda_graph: expected false with model.kind 'hf', found true"),
        ({"train": {"seq_len": 65}}, "train.seq_len: expected at most 64, the positions that the model has, found 65"),
        ({"model": {"preset": "8B"}}, "preset: kind 'hf' has no presets; expected none, found '8B'"),
        ({"model": {"dim": 8}}, "dim: kind 'hf' has none; expected it with kind 'llama' or 'hybrid' only"),
        ({"model": {"path": None}}, "path: expected the folder of a model with a config.json, or its name on the"),
        ({"model": {"path": "./nowhere"}}, "path: .* or a name on the hub such as owner/model, found './nowhere'"),
        ({"model": {"blocks": "model"}}, r"model.blocks: .*\(model.layers \(3 x LlamaDecoderLayer\)\), found 'model'"),
    ],
    ids=lambda value: "_".join(next(iter(value.values()))) if isinstance(value, dict) else "",
)  # fmt: skip
def test_wrong_keys(llama: Path, sections: dict[str, dict[str, Any]], message: str) -> None:
    values = {**sections, "train": {"seq_len": 64, **sections.get("train", {})}}
    values["model"] = {"kind": "hf", "path": str(llama), **sections.get("model", {})}
    with pytest.raises((UserError, ValueError), match=message):
        check_ranks(Config.model_validate(values), 2)


def test_layers_that_transformers_does_not_compile(tmp_path: Path) -> None:
    values = {
        "model": {"kind": "hf", "path": str(folder_with("mamba", tmp_path / "mamba"))},
        "train": {"compile": "aot_eager"},
    }
    with pytest.raises(UserError, match=r"train.compile: expected 'none' with a model of type 'mamba'"):
        check_ranks(Config.model_validate(values), 2)


@pytest.mark.parametrize("package", ["transformers", "huggingface_hub"])
def test_missing_packages(llama: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.errors", None)
    path = str(llama) if package == "transformers" else "owner/model"
    with pytest.raises(
        (UserError, ValueError), match=rf"{package}, which is not installed; install the extra hf"
    ):
        check_ranks(
            Config.model_validate({"model": {"kind": "hf", "path": path}, "train": {"seq_len": 64}}), 1
        )


def test_an_old_transformers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(UserError, match=r"'hf' needs transformers 5 or later, found 4.57.1; install"):
        transformers_model.config_of(HuggingFaceShape(str(llama)))


def test_lists_of_layers_that_are_not_found(llama: Path) -> None:
    """The candidates are named."""
    from shardwright.train.models.foreign.units import find_units

    model = transformers_model.HuggingFaceModel(HuggingFaceShape(str(llama))).model
    with pytest.raises(
        UserError, match=r"one list of layers of Nowhere .* found model.layers \(3 x LlamaDec"
    ):
        find_units(model, classes=["Nowhere"])


# ---------------------------------------------------------------------------------------------------------------
# The hub


@pytest.fixture
def server(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The requests of a hub with a Llama, by HF_ENDPOINT. Its cache is empty."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    shapes._read.cache_clear()
    (tmp_path / "hub" / "owner").mkdir(parents=True)
    copied(llama, tmp_path / "hub" / "owner" / "llama")
    copied(llama, tmp_path / "hub" / "owner" / "bare")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "hub" / "owner" / "bare" / name).unlink()
    (tmp_path / "hub" / "owner" / "llama" / "modeling_llama.py").write_text("raise SystemExit('executed')")
    with hub(tmp_path / "hub") as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield asked


@pytest.mark.extensive("a hub and a run")
def test_a_name_on_the_hub_trains(
    server: list[str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the folder does, and without the hub from the cache. The run keeps the commit."""
    job = config_file(tmp_path, JOB)
    assert train_here(job, *OWN, "owner/llama", "--run.dir", tmp_path / "named") == 0
    assert train_here(job, *OWN, llama, "--run.dir", tmp_path / "folder") == 0
    assert losses(tmp_path / "named") == losses(tmp_path / "folder")
    assert fetched(server) == {"config.json", "model.safetensors"}
    stored = load_config(tmp_path / "named" / "config.toml")
    assert stored.model.path == f"owner/llama@{COMMIT}"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    shapes._read.cache_clear()
    assert train_here(job, *OWN, stored.model.path, "--run.dir", tmp_path / "cached") == 0
    assert losses(tmp_path / "named") == losses(tmp_path / "cached")


def fetched(asked: list[str]) -> set[str]:
    return {path.rpartition("/")[2] for path in asked if path.startswith("GET") and "/resolve/" in path}


@pytest.mark.extensive("a hub")
def test_only_the_files_of_the_index_are_fetched(server: list[str], llama: Path, tmp_path: Path) -> None:
    """Some models have the same weights in other files, too."""
    folder = tmp_path / "hub" / "owner" / "several"
    reloaded(llama).save_pretrained(folder, max_shard_size="20KB")
    (folder / "consolidated.safetensors").write_bytes(b"the same in another form")
    (folder / "model.safetensors").write_bytes(b"left from before")
    names = {file.name for file in folder.glob("model-*.safetensors")}
    assert len(names) > 1
    job = config_file(tmp_path, JOB)
    assert train_here(job, *OWN, "owner/several", "--run.dir", tmp_path / "named") == 0
    assert fetched(server) == {"config.json", "model.safetensors.index.json", *names}
    assert train_here(job, *OWN, folder, "--run.dir", tmp_path / "folder") == 0
    assert losses(tmp_path / "named") == losses(tmp_path / "folder")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/nothing", "found nothing at owner/nothing here, and no model owner/nothing on http"),
        ("owner/bare", "owner/bare on .* has no config.json"),
        ("owner/llama@v9", "owner/llama on .* has no revision v9; set another one after @"),
        (
            "closed/model",
            "access to closed/model on .* is restricted; accept its licence there and set HF_TOKEN",
        ),
    ],
)
def test_wrong_names(
    server: list[str], tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = config_file(tmp_path, JOB)
    assert train_here(job, *OWN, name, "--run.dir", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert re.search(f"model.path: {message}", error), error
    assert error.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_hub_that_does_not_answer(
    server: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    http = importlib.import_module("huggingface_hub.utils._http")
    sleeps: list[float] = []
    monkeypatch.setattr(http, "time", SimpleNamespace(**{**vars(time), "sleep": sleeps.append}))
    monkeypatch.setattr(hub_module, "PAUSE", 0.0)
    job = config_file(tmp_path, JOB)
    assert train_here(job, *OWN, "owner/llama", "--run.dir", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert (
        "config.json of owner/llama is not in the local cache, and http://127.0.0.1:9 does not answer"
        in error
    )
    assert error.count("\n") == 1 and "Traceback" not in error
    assert sleeps == []  # huggingface_hub waits 23 s for a hub


def test_names(tmp_path: Path) -> None:
    for name in ("gpt2", "owner/model", "owner/model@main", "a.b/c-d_e@refs/pr/1"):
        assert hub_module.is_hub_name(name), name
    for name in ("./a", "/a/b", "a/b/c", "~/a", "a b", ""):
        assert not hub_module.is_hub_name(name), name
    assert hub_module.pinned("a/b@main", Path("x") / COMMIT / "config.json") == f"a/b@{COMMIT}"
    assert hub_module.pinned("a/b", Path("x") / "config.json") == "a/b"
    assert SIZES["vocab_size"] == 256


@pytest.mark.parametrize("path", ["hf_lama", "sub/models/hf_lama", "./hf_lama"])
def test_a_folder_with_nearly_that_name(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub is asked for a path that is certainly none of its names."""
    near = f"{path.rpartition('/')[0]}/hf_llama".lstrip("/")
    (tmp_path / near).mkdir(parents=True)
    (tmp_path / near / "config.json").write_text("{}")
    (tmp_path / "hf_lamas").mkdir()  # without a model
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwright.train.config.shapes.foreign.fetch_file", None)
    with pytest.raises(ValueError, match=rf"path: .*{re.escape(path)}.*did you mean {re.escape(near)}\?"):
        HuggingFaceShape(path)
