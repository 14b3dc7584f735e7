"""Files of adapters: peft reads what is written here and is read, and a wrong file is one line."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.checkpoint import open_stored
from shardwright.train.errors import UserError
from shardwright.train.finetune import peft_files
from shardwright.train.finetune.adapters import merge
from shardwright.train.finetune.peft_files import read_adapters, write_adapters
from shardwright.train.models import hugging_face
from tests.support import multirank, world_mesh
from tests.train.finetune.kit import HYBRID, LLAMA, build, randomised, settings, tokens

SHAPES = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied_embeddings=True),
    "hybrid": replace(HYBRID, pattern="M*-M", tied_embeddings=False),
}
KIND = {"llama": "llama", "tied": "llama", "hybrid": "hybrid", "transformers": "transformers"}
CHANGES: dict[str, dict[str, Any]] = {
    "tied": {"tied_embeddings": True}, "hybrid": {"pattern": "M*-M", "tied_embeddings": False},
}  # fmt: skip
NORMS = {"train_also": ["norm.weight", "output.weight"]}


def key_map(name: str) -> Any:
    if name == "transformers":
        return lambda own: own.removeprefix("inner.")
    return hugging_face.key_map(SHAPES[name])


def model(name: str, own: Any = None) -> Any:
    return build(KIND[name], own, **CHANGES.get(name, {}))


def save_base(name: str, folder: Path) -> Path:
    base = model(name)
    if name == "transformers":
        base.inner.save_pretrained(folder)
    else:
        config = hugging_face.config_json(SHAPES[name])
        sw.save_pretrained(base, folder, key_map=key_map(name), config=config)
    return folder


def theirs(folder: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers, to compare with")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


def peft() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft", reason="needs peft, to compare with")


CASES = [
    ("llama", {}), ("llama", {"rslora": True, "targets": ["wq", "layers.1.*.w1"]}), ("llama", {"method": "dora"}),
    ("llama", NORMS), ("tied", {"train_also": ["tok_embeddings.weight"]}), ("hybrid", {}),
    ("transformers", {"train_also": ["*layernorm.weight"]}),
]  # fmt: skip


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "finetuning.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "finetuning.md", "exec"), {"model": model("llama"), "shape": LLAMA})
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()


@pytest.mark.parametrize(("name", "values"), CASES, ids=[f"{n}-{'-'.join(v)}" for n, v in CASES])
def test_peft_reads_it_with_the_same_logits(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    own = settings(**values)
    base = save_base(name, tmp_path / "base")
    ours = randomised(model(name, own))
    write_adapters(ours, tmp_path / "adapters", own, key_map=key_map(name), base=str(base))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of missing or unexpected keys
        other = peft().PeftModel.from_pretrained(theirs(base), tmp_path / "adapters")
    logits = ours(tokens(0)).detach()
    # The formula of a layer with lora is the same, operation by operation. The formulas of dora and of the scan differ.
    close = {"rtol": 0, "atol": 0 if name != "hybrid" and own.method == "lora" else 2e-5}
    torch.testing.assert_close(other(tokens(0)).logits, logits, **close)
    merged = other.merge_and_unload()
    merge(ours)
    torch.testing.assert_close(merged(tokens(0)).logits, ours(tokens(0)), **close)
    if own.method == "lora" and name == "llama" and not own.train_also:
        keys = key_map(name)
        weights = merged.state_dict()
        for mine, p in ours.named_parameters():
            assert torch.equal(weights[keys[mine]], p), mine  # merged weights, bit by bit


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def failing(*_: object) -> None:
        raise error

    own = settings()
    monkeypatch.setattr(peft_files, "write_json", failing)
    with pytest.raises((UserError, KeyboardInterrupt), match=r"cannot write: .*No space left|^$"):
        write_adapters(randomised(model("llama", own)), tmp_path / "adapters", own, key_map=key_map("llama"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_peft_merges_a_bfloat16_base_to_the_same_weights(tmp_path: Path, method: str) -> None:
    own = settings(method=method, base_dtype="bfloat16")
    ours = randomised(build("llama", own))
    # One dtype, as transformers loads it; norms of ones are exact in both.
    config = hugging_face.config_json(LLAMA)
    plain = build("llama").to(torch.bfloat16)
    sw.save_pretrained(plain, tmp_path / "base", key_map=key_map("llama"), config=config)
    write_adapters(ours, tmp_path / "adapters", own, key_map=key_map("llama"))
    base = theirs(tmp_path / "base", dtype=torch.bfloat16)
    merged = peft().PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload().state_dict()
    merge(ours)
    for name, p in ours.named_parameters():
        if p.dtype is torch.bfloat16:
            # lora: both round once. dora: peft takes the lengths of rows in bfloat16.
            tolerance = 0 if method == "lora" else 2**-6
            torch.testing.assert_close(merged[key_map("llama")[name]], p.detach(), rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    "values", [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["norm"]}]
)
def test_adapters_of_peft_are_read(tmp_path: Path, values: dict[str, Any]) -> None:
    other = theirs(save_base("llama", tmp_path / "base"))
    config = peft().LoraConfig(
        r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **values
    )
    other = randomised(peft().get_peft_model(other, config))
    other.save_pretrained(tmp_path / "adapters")
    also = ["norm.weight"] if "modules_to_save" in values else []
    method = "dora" if "use_dora" in values else "lora"
    own = settings(method=method, rslora="use_rslora" in values, targets=["wq", "w2"], train_also=also)
    if also:  # peft takes every module whose name ends so
        own = own.model_copy(
            update={"train_also": ("norm.weight", "attention_norm.weight", "ffn_norm.weight")}
        )
    ours = build("llama", own)
    read_adapters(ours, tmp_path / "adapters", own, key_map=key_map("llama"))
    other.eval()
    close = {"rtol": 0, "atol": 2e-5 if "use_dora" in values else 0}
    torch.testing.assert_close(ours(tokens(0)), other(tokens(0)).logits, **close)


@multirank(2)
def test_sharded_models_write_and_read_the_same_files(rank: int, world_size: int, tmp_path: Path) -> None:
    own = settings(method="dora", train_also=["norm.weight"])

    def sharded(layout: str) -> Any:
        with sw.deferred_init():
            made = build("llama", own)
        for block in made.blocks():
            sw.fully_shard(block, mesh=world_mesh(2), layout=layout)
        return sw.materialize(sw.fully_shard(made, mesh=world_mesh(2), layout=layout))

    plain = randomised(build("llama", own))
    if rank == 0:
        write_adapters(plain, tmp_path / "plain", own, key_map=key_map("llama"))
    dist.barrier()
    one, two = sharded("ragged"), sharded("per_parameter")
    read_adapters(one, tmp_path / "plain", own, key_map=key_map("llama"))
    torch.testing.assert_close(one(tokens(rank)), plain(tokens(rank)))
    write_adapters(one, tmp_path / "sharded", own, key_map=key_map("llama"))
    assert sorted(f.name for f in (tmp_path / "sharded").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "sharded" / file).read_bytes()
    read_adapters(two, tmp_path / "sharded", own, key_map=key_map("llama"))
    torch.testing.assert_close(two(tokens(rank)), plain(tokens(rank)))
    with pytest.raises(UserError, match="expected a new or empty folder"):
        write_adapters(one, tmp_path / "sharded", own, key_map=key_map("llama"))


def test_names_and_settings_in_the_file(tmp_path: Path) -> None:
    own = settings(targets=["wq", "layers.1.*.wv"], train_also=["ffn_norm.weight"])
    write_adapters(build("llama", own), tmp_path / "a", own, key_map=key_map("llama"), base="my/base")
    stored, config = (
        open_stored(tmp_path / "a" / "adapter_model.safetensors"),
        json.loads((tmp_path / "a" / "adapter_config.json").read_text()),
    )
    layer = "base_model.model.model.layers"
    assert set(stored) == {
        *(f"{layer}.{n}.self_attn.q_proj.lora_{m}.weight" for n in (0, 1) for m in "AB"),
        *(f"{layer}.1.self_attn.v_proj.lora_{m}.weight" for m in "AB"),
        *(f"{layer}.{n}.post_attention_layernorm.weight" for n in (0, 1)),
    }  # fmt: skip
    names = [f"model.layers.{n}.self_attn.{which}_proj" for n, which in ((0, "q"), (1, "q"), (1, "v"))]
    assert config["target_modules"] == names and config["base_model_name_or_path"] == "my/base"
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 7, "LORA")
    everywhere = settings(targets=["wq"])
    write_adapters(build("llama", everywhere), tmp_path / "b", everywhere, key_map=key_map("llama"))
    assert json.loads((tmp_path / "b" / "adapter_config.json").read_text())["target_modules"] == ["q_proj"]


def edit(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_wrong_files_are_one_line(tmp_path: Path) -> None:
    own = settings()
    folder = tmp_path / "a"
    write_adapters(build("llama", own), folder, own, key_map=key_map("llama"))

    def refused(words: str, to: Any = None, which: str = "llama", at: Path = folder) -> None:
        target = build(
            "llama",
            to or own,
            **({"n_layers": 3} if which == "deep" else {"ffn_dim": 48} if which == "wide" else {}),
        )
        shape = target.config
        before = {name: p.clone() for name, p in target.named_parameters()}
        with pytest.raises(UserError) as caught:
            read_adapters(target, at, to or own, key_map=hugging_face.key_map(shape))
        assert words in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
        assert all(torch.equal(p, before[name]) for name, p in target.named_parameters())

    refused("expected a folder of adapters, found no adapter_config.json", at=tmp_path / "none")
    refused("finetune.rank: the adapters in", settings(rank=4))
    refused("have 3, found 4; set rank to 3", settings(rank=4))
    refused("finetune.alpha:", settings(alpha=8))
    refused("finetune.rslora:", settings(rslora=True))
    refused("finetune.method: the adapters in", settings(method="dora"))
    refused(
        "expected base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight of shape [3, 32], found no such",
        which="deep",
    )
    refused("mlp.gate_proj.lora_B.weight of shape [48, 3], found shape [46, 3]", which="wide")
    refused(
        "expected no base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight", settings(targets=["wq"])
    )
    refused("norm.weight of shape [32], found no such tensor", settings(train_also=["norm.weight"]))
    for key, value in (
        ("bias", "all"), ("init_lora_weights", "pissa"), ("rank_pattern", {"q": 4}), ("peft_type", "LOHA"),
        ("layer_replication", [[0, 1]]), ("lora_bias", True), ("r", "8"),
    ):  # fmt: skip
        good = (folder / "adapter_config.json").read_text()
        edit(folder, **{key: value})
        refused(f"{key}: expected")
        (folder / "adapter_config.json").write_text(good)
    data = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data[:-7])
    refused("cannot read the adapters")
    (folder / "adapter_model.safetensors").unlink()
    refused("expected adapter_model.safetensors, found no such file")


def test_tied_parameters_are_in_the_file_under_each_name(tmp_path: Path) -> None:
    own = settings(train_also=["tok_embeddings.weight"])
    ours, other = randomised(model("tied", own)), model("tied", own)
    write_adapters(ours, tmp_path / "a", own, key_map=key_map("tied"))
    read_adapters(other, tmp_path / "a", own, key_map=key_map("tied"))
    assert torch.equal(other(tokens(0)), ours(tokens(0)))
    file = tmp_path / "a" / "adapter_model.safetensors"
    data, prefix = bytearray(file.read_bytes()), "base_model.model."
    stored = open_stored(file)
    assert torch.equal(
        stored[prefix + "lm_head.weight"].view(), stored[prefix + "model.embed_tokens.weight"].view()
    )
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begin = 8 + int.from_bytes(data[:8], "little") + header[prefix + "lm_head.weight"]["data_offsets"][0]
    data[begin] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="which the model ties, found others"):
        read_adapters(other, tmp_path / "a", own, key_map=key_map("tied"))


def test_parameters_without_a_place_in_the_format(tmp_path: Path) -> None:
    own = settings(train_also=["a_log"])
    names = hugging_face.key_map(HYBRID)
    with pytest.raises(UserError, match=r"'layers\.0\.mixer\.a_log', since its module also has adapters"):
        write_adapters(build("hybrid", own), tmp_path / "a", own, key_map=names)
    own = settings(targets=["out_proj"])
    with pytest.raises(UserError, match=r"peft refuses adapters on 'layers\.0\.mixer\.out_proj'"):
        write_adapters(build("hybrid", own), tmp_path / "a", own, key_map=names)
    own = settings(targets=["wq"], train_also=["layers.3.mixer.up"])
    with pytest.raises(UserError, match="export the merged model instead"):
        write_adapters(build("hybrid", own), tmp_path / "b", own, key_map=names)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="expected a model with adapters"):
        write_adapters(build("llama"), tmp_path / "c", own, key_map=key_map("llama"))


def test_the_revision_of_a_base_of_the_hub(tmp_path: Path) -> None:
    """peft reads both apart. A folder may have such a name, too."""
    own = settings()
    (tmp_path / "owner" / "model@1").mkdir(parents=True)
    for number, (base, name, revision) in enumerate(
        (
            ("owner/model@0a1b", "owner/model", "0a1b"),
            ("owner/model", "owner/model", None),
            (f"{tmp_path}/owner/model@1", f"{tmp_path}/owner/model@1", None),
            ("", None, None),
        )
    ):
        folder = tmp_path / str(number)
        write_adapters(build("llama", own), folder, own, key_map=key_map("llama"), base=base)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == (name, revision)
