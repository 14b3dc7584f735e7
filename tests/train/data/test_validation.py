"""The part of the data that no step trains on."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from shardwright import cli
from shardwright.train.config import Config, load_config
from shardwright.train.config.catalog.records import of_sets, scalars
from shardwright.train.data.dataset import load_dataset, validation_samples
from shardwright.train.data.samples.validation import part_of, training_and_validation
from shardwright.train.data.statement import statement
from shardwright.train.errors import UserError
from shardwright.train.extend import StepRecord
from shardwright.train.step.evaluation import validate
from tests.support import multirank
from tests.train.kit.jobs import TINY, config_file, records, tiny, train_here, trainer
from tests.train.kit.tokens import tokens_of
from tests.train.report.page.kit import read_page


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=30),
    fraction=st.floats(0, 0.99),
    masked=st.booleans(),
)
def test_the_parts_share_nothing_and_are_everything(
    lengths: list[int], fraction: float, masked: bool
) -> None:
    tokens = tokens_of(lengths, [n % 2 for n in range(sum(lengths))] if masked else None)
    train, validation = training_and_validation(tokens, fraction)
    assert np.concatenate([train.ids, validation.ids]).tolist() == tokens.ids.tolist()
    for part in (train, validation):
        assert (part.ends[-1] if len(part.ends) else 0) == len(part.ids)
        assert (np.diff(part.ends, prepend=0) >= 0).all()
    if masked:
        assert train.trained is not None and validation.trained is not None and tokens.trained is not None
        assert np.concatenate([train.trained, validation.trained]).tolist() == tokens.trained.tolist()
    wanted = int(len(tokens.ids) * fraction)
    assert wanted <= len(validation.ids) <= max(2 * wanted - 1, wanted)
    boundaries = {0, *tokens.ends.tolist()}
    joined = {*train.ends.tolist(), *(validation.ends + len(train.ids)).tolist()}
    if len(train.ids) not in boundaries:  # a document is cut: it is longer than the validation part
        before = max(b for b in boundaries if b < len(train.ids))
        after = min(b for b in boundaries if b > len(train.ids))
        assert (after - before > wanted or before == 0) and len(validation.ids) == wanted
        joined.remove(len(train.ids))
    assert joined | {0} == boundaries


@pytest.mark.parametrize("fraction", [0, 0.05, 0.25, 0.999])
def test_one_text_is_cut_where_it_always_was(fraction: float) -> None:
    train, validation = training_and_validation(tokens_of([1001]), fraction)
    assert len(validation.ids) == int(1001 * fraction)
    assert train.ends.tolist() == [len(train.ids)]


def test_parts_have_fingerprints_of_their_own() -> None:
    tokens = tokens_of([10, 10], fingerprint="abc")
    assert part_of(tokens, 0, 10).fingerprint == "abc[0:10]"
    assert part_of(tokens, 10, 20).ends.tolist() == [10]
    assert part_of(tokens, 5, 15).ends.tolist() == [5, 10]
    assert np.shares_memory(part_of(tokens, 5, 15).ids, tokens.ids)


# ------------------------------------------------------------------------------
# Data for validation alone


def write(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    return str(path)


def config_of(tmp_path: Path, **data: Any) -> Config:
    source = write(tmp_path / "train.jsonl", *(f"{number} trained " * 9 for number in range(40)))
    values = {
        "source": source,
        "text_key": "body",
        "packing": "best_fit",
        "cache": str(tmp_path / "cache"),
        **data,
    }
    return tiny(data=values)


def test_a_source_for_validation_leaves_all_of_the_other_for_training(tmp_path: Path) -> None:
    other = write(tmp_path / "val.jsonl", *("validated " * 9 for _ in range(20)))
    split, own = (
        load_dataset(config_of(tmp_path).for_data),
        load_dataset(config_of(tmp_path, validation_source=other).for_data),
    )
    assert (
        own.train.sources[0].parts[0].tokens.documents
        == 40
        > split.train.sources[0].parts[0].tokens.documents
    )
    assert own.validation is not None
    samples = own.validation.sources[0].samples
    assert b"trained" not in bytes(own.validation.batch(0, samples).inputs.flatten().tolist())
    assert bytes(own.question().ids).startswith(b"validated") and own.sha256 == split.sha256
    lines = statement(
        own.train, own.validation, own.tokenizer.decode, packing="best_fit", first=0, samples=80
    )
    training, validation = [line.split() for line in lines.split("\n")[2:4]]
    assert training[0].endswith("train.jsonl") and training[1] == "40"
    assert validation[0] == "validation:" and validation[1].endswith("val.jsonl") and validation[2] == "20"


def test_several_sources_for_validation_have_keys_and_weights(tmp_path: Path) -> None:
    rows = [{"prompt": "question ", "completion": "answer " * 6}] * 30
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = [
        {"path": write(tmp_path / "val.jsonl", *["validated " * 9] * 30), "weight": 3.0, "text_key": "body"},
        {"path": str(tmp_path / "qa.jsonl"), "weight": 1.0, "kind": "completions"},
    ]
    dataset = load_dataset(config_of(tmp_path, validation_sources=tables).for_data)
    assert dataset.validation is not None
    assert dataset.validation.shares() == pytest.approx([0.75, 0.25], abs=0.01)
    first, second = dataset.validation.sources
    assert first.trained > 0 and second.parts[0].tokens.trained is not None
    assert [each.label[:11] for each in (first, second)] == ["validation:"] * 2


def tables_of_sets(tmp_path: Path) -> list[dict[str, Any]]:
    """A set of two sources, a set of one, and a source of no set."""
    texts = {"a": "one two three ", "b": "four five ", "c": "def f(x): ", "d": "0123456789 "}
    return [
        {
            "path": write(tmp_path / f"{key}.jsonl", *[text * 9] * 9),
            "weight": weight,
            "text_key": "body",
            **name,
        }
        for (key, text), weight, name in zip(
            texts.items(),
            (2.0, 1.0, 1.0, 1.0),
            ({"name": "en"}, {"name": "en"}, {"name": "code"}, {}),
            strict=True,
        )
    ]


@multirank(1, 2)
def test_sets_with_names_have_losses_of_their_own(rank: int, world_size: int, tmp_path: Path) -> None:
    folder = tmp_path / str(rank)
    folder.mkdir()
    data = config_of(folder, validation_sources=tables_of_sets(folder), packing="split").data.model_dump()
    config = tiny(data=data, parallel={"engine": "shardwright"})
    job = trainer(config, rank, world_size, load_dataset(config.for_data))
    sets = job.dataset.validation_sets
    assert {name: len(stream.sources) for name, stream in sets.items()} == {"en": 2, "code": 1}
    assert sets["en"].shares() == pytest.approx([2 / 3, 1 / 3], abs=0.05)
    found = validate(job)
    assert job.dataset.validation is not None
    for loss, stream in zip(
        (found.loss, *found.losses.values()), (job.dataset.validation, *sets.values()), strict=True
    ):
        batch = stream.batch(0, validation_samples(config.for_data, stream))
        with torch.no_grad():
            expected = F.cross_entropy(
                job.model(batch.inputs).flatten(0, 1).double(), batch.targets.flatten()
            )
        assert loss == pytest.approx(expected.item(), rel=1e-6)  # float32 of the model
    assert found.losses.keys() == {"en", "code"} and len({found.loss, *found.losses.values()}) == 3


def test_losses_of_sets_and_the_perplexity_are_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["[data]", f"source = {json.dumps(write(tmp_path / 'train.jsonl', *['a text ' * 9] * 40))}"]
    lines += ['text_key = "body"', f"cache = {json.dumps(str(tmp_path / 'cache'))}"]
    for table in tables_of_sets(tmp_path):
        lines += [
            "[[data.validation_sources]]",
            *(f"{key} = {json.dumps(value)}" for key, value in table.items()),
        ]
    run = tmp_path / "run"
    file = config_file(tmp_path, "\n".join([TINY, *lines]))
    options = ["--train.steps", "4", "--checkpoint.every", "2", "--validation.every", "2"]
    options += ["--checkpoint.keep_best", "validation_loss/code", "--run.dir", str(run)]
    assert train_here(file, *options) == 0
    step = records(run)[-1]
    assert step["validation_losses"].keys() == {"en", "code"}
    assert step["perplexity"] == math.exp(step["validation_loss"])
    assert step["validation_perplexities"] == {
        name: math.exp(loss) for name, loss in step["validation_losses"].items()
    }
    record = StepRecord(
        **{name: step[name] for name in (each.name for each in fields(StepRecord) if each.init)}
    )
    values = scalars(record, every=3)
    assert values == {
        "loss/validation": step["validation_loss"],
        "loss/perplexity": step["perplexity"],
        **{f"validation_loss/{name}": loss for name, loss in step["validation_losses"].items()},
    }
    results = json.loads((run / "run.json").read_text())["results"]
    assert results["perplexity"] == step["perplexity"]
    assert results["metrics"] == of_sets(step["validation_losses"])
    assert results["best"]["validation_loss/code"] == min(
        each["validation_losses"]["code"] for each in records(run) if each["validation_losses"]
    )
    output = capsys.readouterr().out
    assert f"validation_loss/code {step['validation_losses']['code']:.4f}" in output
    assert "the validation loss on the set code alone" in output
    assert f"perplexity      {step['perplexity']:,.2f}" in output
    assert cli.main(["compare", str(run), str(run), "--out", str(tmp_path / "compared")]) == 0
    compared = json.loads((tmp_path / "compared" / "compare.json").read_text())["runs"][0]
    assert compared["metrics"] == results["metrics"] and compared["perplexity"] == step["perplexity"]
    page = tmp_path / "page.html"
    assert cli.main(["report", str(run), str(run), "--html", str(page)]) == 0
    for shown in read_page(page.read_text())[2]["runs"]:
        assert {"validation_losses/en", "validation_losses/code"} <= shown["curves"].keys()
        assert shown["results"]["perplexity"] == pytest.approx(step["perplexity"])
        assert shown["results"]["metrics"] == pytest.approx(results["metrics"])


def test_a_name_of_a_set_is_a_word(tmp_path: Path) -> None:
    table = "path = 'a.jsonl'\nweight = 1.0\nname = 'a/b'\n"
    with pytest.raises(
        UserError, match=r"validation_sources.0.name: expected letters, digits, .*found \"a/b\""
    ):
        load_config(config_file(tmp_path / "wrong", f"[[data.validation_sources]]\n{table}"))
    with pytest.raises(UserError, match=r"data.sources.0.name"):
        load_config(config_file(tmp_path / "training", f"[[data.sources]]\n{table}"))


def test_mistakes_of_a_source_for_validation_name_its_key(tmp_path: Path) -> None:
    for data, message in [
        ({"validation_source": str(tmp_path / "none.jsonl")}, "data.validation_source: expected a file"),
        ({"validation_source": write(tmp_path / "x.jsonl", "x")}, "in the validation source .*x.jsonl"),
        (
            {"validation_sources": [{"path": str(tmp_path / "none.jsonl"), "weight": 1.0}]},
            "data.validation_sources.0.path: expected a file",
        ),
        (
            {"validation_sources": [{"path": write(tmp_path / "y.jsonl", "y"), "weight": 1.0}]},
            "data.validation_sources.0.text_key: expected key 'text' in each row, found only 'body'",
        ),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=message):
            load_dataset(config_of(tmp_path, **data).for_data)
    both = {"validation_source": "a.jsonl", "validation_sources": [{"path": "a.jsonl", "weight": 1.0}]}
    with pytest.raises(ValueError, match="validation_source: expected it in one of"):
        config_of(tmp_path, **both)
    assert tiny(data={"validation_fraction": 0.0, "validation_source": "a.jsonl"}).data.validates


def test_a_run_without_validation_reads_no_source_for_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, validation_source=str(tmp_path / "none.jsonl"))
    off = config.model_copy(update={"validation": config.validation.model_copy(update={"every": 0})})
    dataset = load_dataset(off.for_data)
    assert dataset.validation is None and dataset.train.sources[0].parts[0].tokens.documents == 40
