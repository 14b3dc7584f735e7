"""`shardwright export`: what transformers reads from it, and what it refuses."""

from __future__ import annotations

import copy
import json
import re
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import cli
from shardwright.checkpoint import StoredCheckpoint, open_stored
from shardwright.train.commands import export as exporting
from shardwright.train.commands.export import export
from shardwright.train.data.tokens import byte_tokenizer
from shardwright.train.data.tokens.tokenizers import Bytes, open_tokenizer
from shardwright.train.errors import UserError
from shardwright.train.finetune import adapters
from shardwright.train.finetune.layers import Adapter
from shardwright.train.models import generation_settings, hugging_face
from shardwright.train.models.build import build_model
from shardwright.train.run.folder import RunFolder
from shardwright.train.step import loading
from tests.train.data.samples import save_tokenizer
from tests.train.kit.jobs import HYBRID, config_file, run_config, steps_in, tiny, train_here
from tests.train.kit.logs import heard
from tests.train.models.kit.hub import hub

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
TEXT = "The für statement\n\t\x00\x7f 漢字 🙂 <|endoftext|>  two  spaces"


def loaded(run: Path, step: int) -> Any:
    folder = RunFolder(run)
    model = build_model(folder.config().model, 256)
    loading.load_weights(folder.checkpoints / f"step-{step}", model)
    return model


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["export", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("run", ["plain_run", "sharded_run"])
def test_transformers_computes_the_same_logits(
    run: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, to compare with")
    warnings.simplefilter("ignore")
    folder: Path = request.getfixturevalue(run)
    assert cli.main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert "step 8, 21 tensors" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values()), info
    ours = loaded(folder, 8)
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens))
    settings = theirs.generation_config
    assert (settings.temperature, settings.top_k, settings.max_new_tokens) == (0.8, 50, 200)
    assert settings.eos_token_id is None and settings.bos_token_id is None  # ids 1 and 2 are bytes
    assert theirs.config.eos_token_id is None
    longer = torch.randint(0, 256, (1, 40))  # than the samples of the run
    with heard("transformers") as messages, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert theirs.generate(longer, attention_mask=torch.ones_like(longer), max_new_tokens=3).shape == (
            1,
            43,
        )
    assert messages == []


def test_the_tokenizer_has_the_ids_of_the_run(plain_run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, to compare with")
    export(plain_run, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert len(tokenizer) == tokenizer.vocab_size == 256 and tokenizer.eos_token_id is None
    everything = bytes(range(128)).decode() + "".join(map(chr, range(128, 2100)))
    assert tokenizer(everything)["input_ids"] == list(everything.encode())
    assert tokenizer.model_max_length == 32


def test_characters_of_bytes_are_those_of_byte_level_bpe() -> None:
    pre_tokenizers = pytest.importorskip("tokenizers.pre_tokenizers")
    assert sorted(byte_tokenizer.characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_steps_dtypes_and_files(plain_run: Path, tmp_path: Path) -> None:
    steps = sorted(steps_in(plain_run / "checkpoints"))
    export(plain_run, tmp_path / "old", step=steps[0])
    export(plain_run, tmp_path / "half", dtype="bfloat16", max_shard_size="40 KB")
    old, half = open_stored(tmp_path / "old"), open_stored(tmp_path / "half")
    first = loaded(plain_run, steps[0]).state_dict()
    last = loaded(plain_run, steps[-1]).state_dict()
    key, name = "model.layers.1.mlp.up_proj.weight", "layers.1.feed_forward.w3.weight"
    assert len(steps) > 1 and not torch.equal(first[name], last[name])
    assert torch.equal(old[key].view(), first[name])
    assert torch.equal(half[key].view(), last[name].bfloat16())
    assert (tmp_path / "half" / "model.safetensors.index.json").is_file()
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "old" / "config.json").read_text())["dtype"] == "float32"


def test_one_tensor_is_in_memory_at_a_time(
    plain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[str]] = []
    whole = StoredCheckpoint.read

    def counted(stored: StoredCheckpoint, tensors: Any, *arguments: Any) -> Any:
        read.append(list(tensors))
        return whole(stored, tensors, *arguments)

    monkeypatch.setattr(StoredCheckpoint, "read", counted)
    export(plain_run, tmp_path / "out")
    assert len(read) == 21 and all(len(names) == 1 for names in read)


def test_hybrids_have_their_own_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tied, with experts that are stored one by one; nothing but shardwright reads it, which the command says."""
    job = config_file(tmp_path / "job", tiny(model=HYBRID, train={"steps": 1}).to_toml())
    assert train_here(job, "--run.dir", tmp_path / "run") == 0
    capsys.readouterr()
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "only shardwright reads this kind of model" in capsys.readouterr().out
    found, expected = open_stored(tmp_path / "out"), loaded(tmp_path / "run", 1)
    expert = found["backbone.layers.1.mixer.experts.3.up_proj.weight"].view()
    assert torch.equal(expert, expected.layers[1].mixer.up[3].T) and "lm_head.weight" not in found


def test_what_cannot_be_exported_is_refused(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    bare = tmp_path / "bare"
    shutil.copytree(plain_run, bare)
    shutil.rmtree(bare / "checkpoints")
    new = tmp_path / "new"
    for arguments, message in (
        ((plain_run, there), f"expected a new folder, found that {there} exists"),
        ((tmp_path / "none", new), "expected the folder of a run, found no such folder"),
        ((there, new), "found no run.json in it"),
        ((bare, new), "expected a whole checkpoint, found none"),
        ((plain_run, new, "--step", "5"), "--step: expected a step with a checkpoint in"),
        ((plain_run, new, "--step", "-1"), "--step: expected an integer >= 0"),
        ((plain_run, new, "--dtype", "int8"), "invalid choice: 'int8'"),
        ((plain_run, new, "--max-shard-size", "big"), "--max-shard-size must be bytes"),
        ((plain_run, "/proc/new"), "cannot write"),
        ((plain_run,), "the following arguments are required: DIR"),
    ):
        assert message in error_of(capsys, *arguments), message
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "there"]


def test_damage_falls_back_to_the_checkpoint_before_or_leaves_nothing(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(plain_run, run)
    *_, before, newest = sorted(steps_in(run / "checkpoints"))
    file = run / "checkpoints" / f"step-{newest}" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    error = error_of(capsys, run, tmp_path / "new", "--step", newest)
    assert "found only damaged ones" in error
    assert not (tmp_path / "new").exists()
    assert cli.main(["export", str(run), str(tmp_path / "new")]) == 0
    output = capsys.readouterr()
    assert f"falling back to step-{before}" in output.err and f"step {before}," in output.out


def test_a_failure_half_way_leaves_nothing(
    plain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_tokenizer", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        export(plain_run, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_another_model_is_refused(
    plain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(plain_run, run, ignore=shutil.ignore_patterns("checkpoints"))
    record = json.loads((run / "run.json").read_text())
    assert record["tokenizer"] == {"name": "bytes", "fingerprint": "bytes"}
    larger = Bytes()
    monkeypatch.setattr(larger, "vocab_size", 300)
    monkeypatch.setattr(exporting, "open_tokenizer", lambda name: larger)
    message = "at most the model's 256 ids, found a tokenizer with 300; it does not belong to this model"
    with pytest.raises(UserError, match=message):
        export(run, tmp_path / "new")


@pytest.fixture
def tokenized_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | Path], Path]:
    """Makes a run of one step with the tokenizer of a setting."""
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 200)
    job = config_file(tmp_path / "job", tiny(model={"vocab_size": 800}, train={"steps": 1}).to_toml())

    def made(tokenizer: str | Path) -> Path:
        data = ("--data.source", text, "--data.tokenizer", tokenizer, "--data.cache", tmp_path / "cache")
        options = ("--run.sample_tokens", "0", "--validation.every", "0", "--run.dir", "run")
        special = ("--data.special_tokens", "tokens")  # a bare file knows one that the text spells
        assert train_here(job, *data, *special, *options) == 0
        return Path("run")

    return made


@pytest.mark.parametrize("damage", ["ids", "end"])
def test_a_tokenizer_that_has_changed_since_the_run_is_refused(
    tmp_path: Path,
    tokenized_run: Callable[[str | Path], Path],
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    """The number of ids is the same. Two tokens have each other's ids, or another token ends documents."""
    files = save_tokenizer(tmp_path / "tokenizer")
    run, old = tokenized_run(files), open_tokenizer(str(files))
    shutil.copytree(files, tmp_path / "copy")
    if damage == "ids":
        content = json.loads((files / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (files / "tokenizer.json").write_text(json.dumps(content))
    else:
        (files / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    new = open_tokenizer(str(files))
    assert new.vocab_size == old.vocab_size
    message = (
        f"error: data.tokenizer: expected the tokenizer of run, {files} with the fingerprint {old.fingerprint[:12]}, "
        f"found the fingerprint {new.fingerprint[:12]} at {files}; restore the files that the run was trained with, or "
        "set data.tokenizer in run/config.toml to a copy of them\n"
    )
    capsys.readouterr()
    for command in (("export", "run", "out"), ("generate", "run", "--prompt", "The")):
        assert cli.main(list(command)) == 2
        assert capsys.readouterr().err == message
    assert not Path("out").exists()
    config = run / "config.toml"  # as the error says
    config.write_text(config.read_text().replace(str(files), str(tmp_path / "copy")))
    assert cli.main(["generate", "run", "--prompt", "The", "--tokens", "1"]) == 0
    assert cli.main(["export", "run", "out"]) == 0
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "tokenizer": {"name": 3}}))
    assert "run.json: expected a valid tokenizer" in error_of(capsys, "run", "other")


def test_a_run_keeps_the_commit_of_a_tokenizer_of_the_hub(
    tmp_path: Path, tokenized_run: Callable[[str | Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub has another tokenizer now. The run's own commit is exported."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs huggingface_hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "hub" / "models--me--tiny"
    (model / "refs").mkdir(parents=True)
    for commit, kind in (("a" * 40, "bytes"), ("b" * 40, "sentence pieces")):
        save_tokenizer(model / "snapshots" / commit, kind)
    (model / "refs" / "main").write_text("a" * 40)
    run = tokenized_run("me/tiny")
    assert json.loads((run / "run.json").read_text())["tokenizer"]["name"] == f"me/tiny@{'a' * 40}"
    (model / "refs" / "main").write_text("b" * 40)
    export(run, tmp_path / "out")
    exported = (tmp_path / "out" / "tokenizer.json").read_text()
    assert exported == (model / "snapshots" / ("a" * 40) / "tokenizer.json").read_text()
    assert cli.main(["generate", "run", "--prompt", "The", "--tokens", "1"]) == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "mine.json"])
def test_files_of_another_tokenizer_are_copied(
    plain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A tokenizer with another name gets the usual one. Its ends become the ends of generated texts."""
    files = tmp_path / "tokenizer"
    files.mkdir()
    for each in (
        "tokenizer.json",
        "mine.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ):
        (files / each).write_text(f"{each} of a folder")
    for ends, expected in (((7,), 7), ((7, 9), [7, 9]), ((), None)):
        tokenizer = Bytes()
        tokenizer.ends, tokenizer.file = ends, files / name
        monkeypatch.setattr(exporting, "open_tokenizer", lambda name, each=tokenizer: each)
        out = tmp_path / f"out{len(ends)}"
        export(plain_run, out)
        assert (out / "tokenizer.json").read_text() == f"{name} of a folder"
        assert (out / "chat_template.jinja").read_text() == "chat_template.jinja of a folder"
        assert (out / "model.safetensors").stat().st_size > 1000 and not (out / "mine.json").exists()
        for file in ("config.json", "generation_config.json"):
            assert json.loads((out / file).read_text())["eos_token_id"] == expected


def test_the_template_of_the_run_is_exported(plain_run: Path, tmp_path: Path) -> None:
    run, template = tmp_path / "run", tmp_path / "my.jinja"
    shutil.copytree(plain_run, run)
    template.write_text("{{ messages }}")
    file = run / "config.toml"
    without = re.sub(r"(?m)^chat_template = .*\n", "", file.read_text())
    file.write_text(without.replace("[data]\n", f'[data]\nchat_template = "{template}"\n'))
    export(run, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    template.unlink()
    with pytest.raises(UserError, match=r"data.chat_template: cannot read .*my.jinja.*restore the file"):
        export(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_tokenizer_of_a_configuration(tmp_path: Path) -> None:
    """A file with a name of its own, with a list of ends beside it."""
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "mine.json")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 0]}')
    tokenizer = open_tokenizer(str(tmp_path / "mine.json"))
    assert tokenizer.file == tmp_path / "mine.json"
    assert generation_settings.special_ids(tokenizer) == {
        "bos_token_id": 1,
        "eos_token_id": [5, 0],
        "pad_token_id": None,
    }


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", None])
def test_a_bare_tokenizer_file_gets_the_end_of_the_run(
    tmp_path: Path, tokenized_run: Callable[[str | Path], Path], end: str | None
) -> None:
    """tokenizer.json alone does not say which of its tokens ends a text. The trainer takes a usual one."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, to compare with")
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    ends = {"<|endoftext|>", "</s>"} - {end}
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] not in ends]
    file.write_text(json.dumps(content))
    tokenized_run(file)
    export(Path("run"), tmp_path / "out")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read.eos_token == end
    ours = open_tokenizer(str(file))
    assert read.eos_token_id == ours.end and read(TEXT)["input_ids"][1:] == ours.encode(TEXT)
    assert read.decode(ours.encode(TEXT)) == ours.decode(ours.encode(TEXT))
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


ADAPTERS = ("--finetune.rank", "4", "--finetune.train_also", '["norm.weight"]', "--run.sample_tokens", "0")


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapters_are_folded_one_layer_at_a_time(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are those of `merge`. Beside the base, no more than one folded weight is in memory."""
    run = tmp_path / "run"
    job = config_file(tmp_path, tiny(train={"steps": 2}, optimizer={"lr": 0.1}).to_toml())
    assert train_here(job, "--finetune.method", method, *ADAPTERS, "--run.dir", run) == 0
    config = run_config(run)
    torch.manual_seed(config.run.seed)
    model = build_model(config.model, 256)
    adapters.adapt(model, config.finetune, config.run.seed)
    loading.load_weights(run / "checkpoints" / "step-2", model)
    adapters.merge(model)
    folded: list[weakref.ref[torch.Tensor]] = []
    merged = Adapter.merged

    def counted(layer: Adapter, dtype: torch.dtype) -> torch.Tensor:
        assert not any(each() is not None for each in folded)
        weight = merged(layer, dtype)
        folded.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(Adapter, "merged", counted)
    monkeypatch.setattr(copy, "deepcopy", None)
    export(run, tmp_path / "out")
    assert len(folded) == 14
    stored = open_stored(tmp_path / "out")
    values = model.state_dict()
    for name, key in hugging_face.key_map(config.model.shape()).items():
        if isinstance(key, str):
            assert torch.equal(stored[key].view(), values[name]), name
    assert len(stored) == 21


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """The folder of a hub's models and its address. HF_TOKEN has its token."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs huggingface_hub")
    with hub(tmp_path / "models") as (address, _):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "right")
        yield tmp_path / "models", address


def test_a_push_makes_a_private_model_with_the_files_of_the_folder(
    plain_run: Path, tmp_path: Path, fake_hub: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    models, address = fake_hub
    out = tmp_path / "out"
    for name, there in (("me/tiny", "me/tiny"), ("small", "me/small")):
        assert cli.main(["export", str(plain_run), str(out), "--push", name]) == 0
        assert f"pushed to {address}/{there}/commit/" in capsys.readouterr().out
        for file in out.iterdir():
            assert (models / there / file.name).read_bytes() == file.read_bytes()
        assert sorted(file.name for file in (models / there).iterdir()) == sorted(
            [*FILES, "message", "private"]
        )
        assert (models / there / "private").read_text() in ("True", "private")
        assert (models / there / "message").read_text() == "run, step 8"
        shutil.rmtree(out)


def test_a_push_that_cannot_be_is_one_line(
    plain_run: Path,
    tmp_path: Path,
    fake_hub: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, address = fake_hub
    out = tmp_path / "out"

    def error(name: str) -> str:
        return error_of(capsys, plain_run, out, "--push", name)

    for name in ("a/b/c", "me/tiny@main", ""):
        assert f"expected the name of a model on the hub, such as owner/model, found {name!r}" in error(name)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert f"--push: {address} does not accept the token: " in error("me/tiny")
    monkeypatch.delenv("HF_TOKEN")
    assert f"--push: expected a token for {address}, found none; set HF_TOKEN" in error("me/tiny")
    assert not out.exists()  # all of that is found before the export
    monkeypatch.setenv("HF_TOKEN", "right")
    assert cli.main(["export", str(plain_run), str(out), "--push", "others/tiny"]) == 2
    text = capsys.readouterr().err
    assert f"--push: cannot write others/tiny on {address}: " in text and text.count("\n") == 1
    assert f"{out} is complete: correct this, then call hf upload others/tiny {out}" in text and out.exists()
