"""Notices before step 1 about settings that look like a mistake, and the parts of its base that an export keeps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.train.commands.export import write_tokenizer
from shardwright.train.config import Config
from shardwright.train.data.dataset import load_dataset
from shardwright.train.data.tokens.tokenizers import Bytes, open_tokenizer
from shardwright.train.errors import UserError
from shardwright.train.models.generation_settings import generation_settings, with_ids
from shardwright.train.step.account.notices import before_steps
from tests.train.data.samples import CHATML, chat, save_tokenizer, write_jsonl
from tests.train.kit.jobs import config_file, tiny, train_here
from tests.train.models.kit.architectures import folder_with
from tests.train.models.kit.foreign import JOB, NATIVE
from tests.train.models.kit.hub import hub

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("jinja2", reason="needs jinja2")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and generation settings of its own."""
    folder = folder_with("llama", tmp_path_factory.mktemp("base") / "base", vocab_size=1000)
    save_tokenizer(folder, eos_token="</s>")
    return folder


@pytest.fixture(autouse=True)
def settings_of_base(base: Path) -> Iterator[None]:
    before = (base / "generation_config.json").read_bytes()
    yield
    (base / "generation_config.json").write_bytes(before)


def job(base: Path, **sections: dict[str, Any]) -> Config:
    model = {**dict.fromkeys(NATIVE), "kind": "hf", "path": str(base), **sections.pop("model", {})}
    data = {"cache": str(base.parent / "cache"), **sections.pop("data", {})}
    return tiny(model=model, data=data, **sections)


def said(config: Config, resumes: bool = False) -> list[str]:
    return list(before_steps(config.for_building, config.data, load_dataset(config.for_data), resumes))


def test_bytes_are_the_tokenizer_beside_a_model_that_we_exported(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "export")
    write_tokenizer(tmp_path / "export", Bytes(), 64)
    assert said(job(tmp_path / "export", data={"tokenizer": "bytes"})) == []
    assert len(said(job(base, data={"tokenizer": "bytes"}))) == 1


@pytest.mark.parametrize(("talks", "cut"), [(1, True), (40, False)])
def test_a_conversation_that_validation_cuts(tmp_path: Path, talks: int, cut: bool) -> None:
    """The first one is cut: there is nothing before it."""
    write_jsonl(tmp_path / "talks.jsonl", [{"messages": chat("a question " * 40, "an answer " * 40)}] * talks)
    (tmp_path / "template").write_text(CHATML)
    config = tiny(
        data={
            "source": str(tmp_path / "talks.jsonl"),
            "kind": "conversations",
            "chat_template": str(tmp_path / "template"),
            "cache": str(tmp_path / "cache"),
            "validation_fraction": 0.3,
        }
    )
    assert [line.count("cuts one of the conversations of") for line in said(config)] == [1] * cut


def other_tokenizer(folder: Path) -> Path:
    folder.mkdir()
    return save_tokenizer(folder, "pieces", eos_token="</s>")


def test_a_tokenizer_that_is_not_the_models(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = other_tokenizer(tmp_path / "other")
    file = config_file(tmp_path, JOB)
    arguments = ("--model.kind", "hf", "--model.path", base, "--data.tokenizer", other, "--train.steps", "1")
    small = ("--validation.every", "0", "--run.sample_tokens", "0", "--data.cache", tmp_path / "cache")
    assert train_here(file, *arguments, *small, "--run.dir", tmp_path / "run") == 0
    before, step, _ = capsys.readouterr().out.partition("step 1/1")
    assert step and f"data.tokenizer = {other}" in before and str(base / "tokenizer.json") in before
    assert before.count("is not the tokenizer beside the model") == 1
    tokenizer = {"tokenizer": str(other)}
    assert said(job(base, data=tokenizer, model={"weights": "random"})) == []
    shutil.copytree(base, tmp_path / "copy")
    assert said(job(base, data={"tokenizer": str(tmp_path / "copy")})) == []


def test_adapters_of_another_base(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    data = {"tokenizer": str(base)}
    config = job(base, data=data, finetune={"method": "lora", "adapters": str(adapters)})

    def write(name: str | None) -> None:
        values = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "base_model_name_or_path": name}
        (adapters / "adapter_config.json").write_text(json.dumps(values))

    write("owner/other")
    (notice,) = said(config)
    assert "were trained on owner/other" in notice and f"comes from model.path = {base}" in notice
    assert said(config, resumes=True) == []  # the adapters are those of the run
    monkeypatch.chdir(base.parent)
    for same in (str(base), "base", None):
        write(same)
        assert said(config) == [], same


def test_turns_that_no_generation_ends(base: Path, tmp_path: Path) -> None:
    rows = [{"messages": chat("Hi there", "Hello. " * 20)} for _ in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "chatml.jinja").write_text(CHATML)
    shutil.copytree(base, tmp_path / "copy")
    (tmp_path / "copy" / "generation_config.json").unlink()
    data = {
        "source": str(tmp_path / "chats.jsonl"), "kind": "conversations", "tokenizer": str(tmp_path / "copy"),
        "chat_template": str(tmp_path / "chatml.jinja"), "packing": "best_fit",
    }  # fmt: skip
    config = job(base, data=data)
    end = open_tokenizer(str(base)).encode("<|im_end|>")[0]
    (notice,) = said(config)
    assert f"end with '<|im_end|>' (id {end})" in notice and "'</s>'" in notice and "will not stop" in notice
    assert said(config) == [notice]  # also of tokens from the cache
    # The exported folder keeps the settings of the base, since the tokenizer is the same.
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    assert said(config) == []


def test_an_export_keeps_the_settings_of_its_base(base: Path, tmp_path: Path) -> None:
    settings = {
        "eos_token_id": [0, 5],
        "pad_token_id": 7,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
    }
    (base / "generation_config.json").write_text(json.dumps({**settings, "_from_model_config": True}))
    config = job(base)
    own = open_tokenizer(str(base))
    assert set(own.ends) - {0, 5}  # </s>
    assert generation_settings(config.model, own) == {**settings, "eos_token_id": [0, 5, own.end]}
    settings["eos_token_id"] = list(own.ends)
    (base / "generation_config.json").write_text(json.dumps(settings))
    assert generation_settings(config.model, own) == settings
    assert with_ids({"pad_token_id": 3, "eos_token_id": own.end}, config.model, own)["pad_token_id"] == 3
    for other in (Bytes(), open_tokenizer(str(other_tokenizer(tmp_path / "other")))):
        end = None if not other.ends else other.ends[0]
        ids = {"bos_token_id": other.begin, "eos_token_id": end, "pad_token_id": None}
        assert generation_settings(config.model, other) == {**settings, **ids}
    (base / "generation_config.json").write_text("{")
    with pytest.raises(
        UserError, match=r"expected a JSON object in .*generation_config.json, found a damaged"
    ):
        generation_settings(config.model, own)


def test_the_base_of_an_export_may_be_on_the_hub(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    shutil.copytree(base, tmp_path / "models" / "owner" / "base")
    with hub(tmp_path / "models") as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        config = job(base, model={"path": "owner/base"})
        settings = generation_settings(config.model, Bytes())
        assert "temperature" not in settings and settings["eos_token_id"] is None
        assert settings["transformers_version"]
    notices: list[str] = []
    shutil.rmtree(tmp_path / "cache" / "models--owner--base" / "snapshots")
    monkeypatch.setattr("shardwright.train.config.shapes.hub.PAUSE", 0.0)
    assert generation_settings(config.model, Bytes(), notices.append)["temperature"] == 0.8
    assert len(notices) == 1 and "does not answer" in notices[0]
