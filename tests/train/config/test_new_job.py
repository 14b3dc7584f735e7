"""`shardwright init`: files of new jobs from answers, and mistakes in these."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardwright.cli import main
from shardwright.planner import Found
from shardwright.train.commands.plans import new_job
from shardwright.train.commands.plans.fit import Search
from shardwright.train.config import DataConfig, load_config
from shardwright.train.data.sources.places import locate
from shardwright.train.data.tokens.byte_tokenizer import tokenizer_json
from tests.train.kit.jobs import losses, run
from tests.train.kit.qwen3 import SMALL_QWEN3, folder_of_model

MODELS = ("debug", "150M", "8B", "hybrid:debug", "hybrid:9B")


class Fast:
    tokens_per_second = (9.0, 1000.0, 1100.0)


def init(folder: Path, *arguments: str) -> int:
    return main(["init", str(folder / "job.toml"), *arguments])


@pytest.mark.parametrize("on", ["2xcpu", "cpu", "3xCPU"])
@pytest.mark.parametrize("model", MODELS)
def test_each_preset_is_a_job(
    model: str, on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path, "--model", model, "--data", "pydoc", "--on", on) == 0
    ranks = 3 if on == "3xCPU" else 2
    config = load_config(tmp_path / "job.toml", (), ranks=ranks)
    assert config.train.global_batch % ranks == 0 and config.run.device == "cpu"
    assert capsys.readouterr().out.endswith(f"shardwright train {tmp_path / 'job.toml'} --nproc {ranks}\n")


@pytest.mark.parametrize(("task", "rate"), [("pretrain", 3e-3), ("finetune", 1e-5), ("lora", 2e-4)])
@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": "a"}, "documents"),
        ({"messages": []}, "conversations"),
        ({"prompt": "a", "completion": "b"}, "completions"),
    ],
)
def test_a_model_of_transformers_takes_its_data_as_it_is(
    task: str, rate: float, row: dict[str, object], kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    folder = folder_of_model(SMALL_QWEN3, tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    words = ["--model", f"hf:{folder}", "--data", str(tmp_path / "data.jsonl"), "--on", "2xcpu"]
    assert init(tmp_path, *words, "--task", task) == 0
    config = load_config(tmp_path / "job.toml", [("model.weights", "random")], ranks=2)
    assert (config.data.kind, config.data.tokenizer, config.optimizer.lr) == (kind, str(folder), rate)
    assert config.finetune.method == ("lora" if task == "lora" else "full")
    assert config.train.seq_len == 128  # the model's longest


def test_conversations_without_a_template_and_a_short_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    folder = folder_of_model(SMALL_QWEN3, tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    data = tmp_path / "data.jsonl"
    data.write_text('{"messages": []}\n' * 40_000)
    words = ["--model", f"hf:{folder}", "--data", str(data), "--on", "2xcpu", "--task", "finetune"]
    assert init(tmp_path, *words) == 0
    assert (
        f"warning: the data are conversations, and the tokenizer {folder} has no chat template: set "
        "data.chat_template to the file of a jinja template" in capsys.readouterr().err
    )
    text = (tmp_path / "job.toml").read_text()
    # 680,000 bytes twice, by 4, by 16 samples of 128 tokens: about 166 steps, and a tenth would be more than 10.
    assert "warmup_steps = 10  # of about 166 steps, by the size of the data" in text
    data.write_text('{"messages": []}\n' * 4_000)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert init(tmp_path, *words, "--force") == 0
    assert "warning" not in capsys.readouterr().err
    assert (
        load_config(tmp_path / "job.toml", [("model.weights", "random")], ranks=2).optimizer.warmup_steps == 1
    )
    data.write_text('{"messages": []}\n' * 500)
    assert init(tmp_path, *words, "--force") == 0
    small = load_config(tmp_path / "job.toml", [("model.weights", "random")], ranks=2)
    assert (small.train.global_batch, small.train.micro_batch) == (
        4,
        2,
    )  # 8 steps; 16 samples at a time would make 2


def test_the_planner_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (("train.compile", "inductor"), ("train.micro_batch", "4"), ("parallel.strategy", "zero3"))
    found = Found(keys, True, 3 << 30, 2.0)

    def searched(job: object, processes: int) -> Search:
        return Search([found], {keys: Fast()}, {}, set())  # type: ignore[dict-item]

    monkeypatch.setattr(new_job, "search", searched)
    assert init(tmp_path, "--model", "150M", "--data", "pydoc", "--on", "8xh100") == 0
    text = (tmp_path / "job.toml").read_text()
    assert "# Its plan: 3.00 GiB reserved, 1,000 tokens/s on each device.\n" in text
    assert "micro_batch = 4  # chosen by the planner" in text and "strategy" not in text  # it is the default
    assert f"#   shardwright plan {tmp_path / 'job.toml'} --on 8xh100\n" in text
    config = load_config(tmp_path / "job.toml", (), ranks=8)
    assert (config.train.compile, config.train.micro_batch) == ("inductor", 4)
    monkeypatch.setattr(
        new_job, "search", lambda *_: Search([found._replace(fits=False)], {keys: Fast()}, {}, set())
    )
    assert init(tmp_path, "--model", "150M", "--data", "pydoc", "--on", "8xh100", "--force") == 2
    assert "no settings of this model fit on 8 x NVIDIA H100" in capsys.readouterr().err
    assert (tmp_path / "job.toml").read_text() == text


def test_questions_of_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    answers = iter(["7B", "150M", "none.txt", "'a", "", "none/none", "", "debug", "2xcpu", "dpo", "lora", ""])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question.partition(":")[0])
        return next(answers)

    monkeypatch.setattr("builtins.input", answer)
    assert init(tmp_path) == 0
    # A wrong answer is asked for again at once.
    assert asked == ["Model"] * 2 + ["Data"] * 3 + ["Tokenizer"] * 2 + ["Devices"] * 2 + ["Task"] * 3
    config = load_config(tmp_path / "job.toml", (), ranks=2)
    assert config.model.preset == "150M" and config.data.source == "pydoc"


def test_mistakes_are_one_line_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"--model": "debug", "--data": "pydoc", "--on": "2xcpu"}
    for option, value, message in (
        ("--model", "9B", "did you mean 'hybrid:9B'?"),
        ("--model", "hf:/nowhere", "--model hf:/nowhere: model.path: expected a folder with a config.json"),
        ("--data", "nowhere.txt", "found 'nowhere.txt', which is not there"),
        ("--data", "", "expected files, folders, patterns or pydoc, found ''"),
        ("--data", " ", "expected files, folders, patterns or pydoc, found ' '"),
        ("--on", "8xh1000", "did you mean 8xh100?"),
        ("--on", "0xcpu", "expected at least 1 rank"),
        ("--task", "lora", "which has no weights yet"),
        ("--task", "dpo", "expected one of pretrain, finetune, lora"),
        ("--seq-len", "4096", "expected at most 2048 with this model"),
    ):
        words = [word for pair in {**good, option: value}.items() for word in pair]
        assert init(tmp_path, *words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert not (tmp_path / "job.toml").exists()
    assert init(tmp_path, "--model", "debug") == 2  # and no terminal
    assert "expected --data, found none, and there is no terminal to ask" in capsys.readouterr().err
    (tmp_path / "job.toml").write_text("")
    assert init(tmp_path, *(word for pair in good.items() for word in pair)) == 2
    assert "job.toml exists already; name another file, or add --force" in capsys.readouterr().err


def test_names_with_spaces_and_folders_with_endings(tmp_path: Path) -> None:
    (tmp_path / "d d").mkdir()
    (tmp_path / "d d" / "my file.txt").write_text("text")
    (tmp_path / "rows.jsonl").mkdir()
    (tmp_path / "rows.jsonl" / "1.jsonl").write_text('{"text": "a"}\n')
    sources = [str(tmp_path / "d d" / "my file.txt"), str(tmp_path / "rows.jsonl")]
    assert init(tmp_path, "--model", "debug", "--on", "2xcpu", "--data", *sources) == 0
    written = list(load_config(tmp_path / "job.toml", (), ranks=2).data.source)
    assert written == [sources[0], f"{sources[1]}/*.jsonl"]


def test_a_folder_becomes_the_pattern_that_training_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def data_of(folder: Path) -> DataConfig:
        assert init(tmp_path, "--model", "debug", "--on", "2xcpu", "--force", "--data", str(folder)) == 0
        config = load_config(tmp_path / "job.toml", (), ranks=2)
        assert isinstance(config.data.source, str) and locate(config.data.source)
        return config.data

    (deep := tmp_path / "texts [1]" / "deep").mkdir(parents=True)
    (deep / "a.jsonl").write_text('{"messages": []}\n')
    (deep.parent / "README.md").write_text("no data")
    data = data_of(deep.parent)
    assert [each.path for each in locate(str(data.source))] == [str(deep / "a.jsonl")]
    assert data.kind == "conversations"
    (deep.parent / "a.txt").write_text("text")
    assert str(data_of(deep.parent).source).endswith("/*.txt")
    (deep.parent / "b.parquet").write_text("rows")
    for words in ("expected a folder with files of one kind, found .parquet and .txt", "found none in"):
        assert init(tmp_path, "--model", "debug", "--on", "2xcpu", "--force", "--data", str(deep.parent)) == 2
        assert words in capsys.readouterr().err
        for file in (*deep.parent.glob("*.*"), deep / "a.jsonl"):
            file.unlink(missing_ok=True)


def test_a_preset_trains_on_bytes_or_on_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "8B", "--data", "pydoc", "--on", "8xh100", "--no-plan", "--force"]
    assert init(tmp_path, *words) == 0
    assert "job.toml trains on bytes; for another tokenizer pass --tokenizer" in capsys.readouterr().err
    config = load_config(tmp_path / "job.toml", (), ranks=8)
    assert (config.data.tokenizer, config.model.vocab_size) == ("bytes", 256)
    assert (config.optimizer.warmup_steps, config.checkpoint.every) == (100, 100)  # of 1,000 steps
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    assert init(tmp_path, *words, "--tokenizer", str(tmp_path)) == 0
    assert "bytes" not in capsys.readouterr().err
    config = load_config(tmp_path / "job.toml", (), ranks=8)
    assert (config.data.tokenizer, config.model.vocab_size) == (str(tmp_path), None)
    assert init(tmp_path, *words, "--tokenizer", str(tmp_path / "none.json")) == 2
    assert "error: --tokenizer: expected bytes, the path of" in capsys.readouterr().err


def test_a_short_run_saves_and_a_tiny_set_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    assert init(tmp_path, "--model", "debug", "--data", "pydoc", "--on", "2xcpu") == 0
    config = load_config(tmp_path / "job.toml", (), ranks=2)
    assert (config.train.steps, config.checkpoint.every, config.validation.every) == (100, 10, 20)
    folder = folder_of_model(SMALL_QWEN3, tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 20)
    capsys.readouterr()
    # A folder with a config.json needs no hf: before it.
    words = ["--model", str(folder), "--data", str(tmp_path / "data.jsonl"), "--on", "8xcpu", "--force"]
    assert init(tmp_path, *words) == 0
    assert load_config(tmp_path / "job.toml", (), ranks=8).checkpoint.every == 10  # and after the last step
    notice = "he data are about 1 step in 2 epochs, with one sequence for each rank in a step"
    assert f"warning: t{notice}" in capsys.readouterr().err
    assert f"# passes over the data. T{notice}" in (tmp_path / "job.toml").read_text()


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (tmp_path, tmp_path / "none" / "job.toml"):
        words = ["--model", "debug", "--data", "pydoc", "--on", "2xcpu"]
        assert main(["init", str(place), *words]) == 2
        assert "expected a file in a folder that exists" in capsys.readouterr().err


@pytest.mark.extensive("a search with the real planner")
def test_a_file_with_the_real_planner(tmp_path: Path) -> None:
    words = ["--model", "debug", "--data", "pydoc", "--on", "2xh100", "--seq-len", "256"]
    assert init(tmp_path, *words) == 0
    text = (tmp_path / "job.toml").read_text()
    assert "# Its plan: " in text and "# chosen by the planner" in text
    load_config(tmp_path / "job.toml", (), ranks=2)


@pytest.mark.extensive("a job")
def test_the_file_trains(tmp_path: Path) -> None:
    assert init(tmp_path, "--model", "debug", "--data", "pydoc", "--on", "2xcpu") == 0
    options = ["--train.steps", "2", "--nproc", "2", "--run.dir", str(tmp_path / "run")]
    status, out, err = run("train", tmp_path / "job.toml", *options)
    assert status == 0, out + err
    assert len(losses(tmp_path / "run")) == 2
