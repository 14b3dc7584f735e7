"""Each row of the tables of settings that do not go together: some job meets it, and its message names the settings.

The jobs are searched: values of the row's settings that their keys take, beside settings of a few other kinds of jobs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from shardwright.train.config import Config
from shardwright.train.config.catalog.registry_names import registry_of
from shardwright.train.config.conflicts.configurations import BETWEEN_SECTIONS, LENGTH, WITHIN_SECTIONS
from shardwright.train.config.conflicts.jobs import NEW, PLANNED, STARTED
from shardwright.train.config.conflicts.table import Conflict, conflict_in
from shardwright.train.config.keys import field_at
from shardwright.train.config.sections.all import Sections
from shardwright.train.errors import UserError
from shardwright.train.launch.opening import open_run
from shardwright.train.parallel.checks import check_division
from shardwright.train.parallel.model_conflicts import BUILT, BuiltJob

#: Values that many keys take, beside those that their types list.
VALUES: tuple[Any, ...] = (
    False, True, 0, 1, 2, 16, 400, 0.0, 0.3, "x", "*E", "M*-", "validation_loss", [], ["*norm.weight"], [1, 2],
    [{"path": "a.txt", "weight": 1.0}],
)  # fmt: skip
#: Settings of jobs, which those of a row replace.
JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"model.kind": "hybrid"},
    {"finetune.method": "lora"},
    {"parallel.param_dtype": "bfloat16"},
    {"parallel.param_dtype": "bfloat16", "train.float8": "tensorwise"},
    {"train.float8": "tensorwise", "train.seq_len": 33},
    {"optimizer.in_backward": True, "train.max_norm": 0.0},
    {"train.cuda_graph": True},
    {"model.kind": "hf", "model.weights": "random"},
)
HOOK = "shardwright.train.config.catalog.hooks:TrainerHook"
READ = WITHIN_SECTIONS + BETWEEN_SECTIONS


def names(rows: Sequence[Conflict[Any]]) -> list[str]:
    return [f"{number}-{'-'.join(row.settings)}" for number, row in enumerate(rows)]


def literals(annotation: Any) -> Iterator[Any]:
    """The values that a type lists."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for each in get_args(annotation):
            yield from literals(each)


def values_of(key: str) -> list[Any]:
    """Values that a key takes."""
    info = field_at(key.split("."))
    assert info is not None, f"no such key: {key}"
    if (registry := registry_of(info.annotation, info.metadata)) is not None:
        return list(registry.names()) or [(), (HOOK,)]  # a list of names, of which the package has none
    section, _, name = key.partition(".")
    beside = {"kind": "hybrid"} if section == "model" and name != "max_seq_len" else {}
    taken = []
    for value in (*literals(info.annotation), *VALUES):
        with contextlib.suppress(ValidationError):
            Sections.model_validate({section: {**beside, name: value}})
            taken.append(value)
    return taken


def jobs(settings: Sequence[str], folder: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Tables of jobs with values of these settings."""
    config = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    choices = [[(key, value) for value in values_of(key)] for key in settings]
    for base, chosen in itertools.product(JOBS, itertools.product(*choices)):
        tables: dict[str, dict[str, Any]] = {}
        for key, value in {**base, **dict(chosen)}.items():
            section, _, name = key.partition(".")
            tables.setdefault(section, {})[name] = value
        if tables.get("model", {}).get("kind") == "hf":
            tables["model"]["path"] = str(folder)
        if tables.get("model", {}).get("kind") == "python":
            tables["model"] |= {"target": "tests.train.models.kit.user_module:Module", "vocab_size": 256}
        yield tables


def first_job(
    row: Conflict[Any], rows: Sequence[Conflict[Any]], folder: Path, kind: type[Sections] = Sections
) -> tuple[dict[str, Any], Any, str]:
    """A job that the row refuses first: its tables, its sections, and the message."""
    for tables in jobs(row.settings, folder):
        try:
            job = kind.model_validate(tables)
        except ValidationError:
            continue
        if row.applies(job):
            message = row.text(job)
            if str(conflict_in(rows, job)) == message:
                return tables, job, message
    raise AssertionError("no job meets the row")


def is_named(key: str, job: Any, message: str) -> bool:
    """Whether a message names a setting: its key, its value, or the model for a key of it."""
    section, _, name = key.partition(".")
    words = {name, name.replace("_", "-"), repr(job.value_at(key)), str(job.value_at(key)).lower()}
    return any(word in message for word in words | ({section} if section == "model" else set()))


@pytest.mark.parametrize("row", READ, ids=names(READ))
def test_a_configuration_is_refused_when_it_is_read(row: Conflict[Sections], tmp_path: Path) -> None:
    rows = WITHIN_SECTIONS if row in WITHIN_SECTIONS else READ
    tables, job, message = first_job(row, rows, tmp_path)
    assert len(row.settings) >= 2 and all(is_named(key, job, message) for key in row.settings[:2])
    with pytest.raises(ValidationError) as error:
        Config.model_validate(tables)
    assert message in str(error.value)


@pytest.mark.parametrize("row", STARTED, ids=names(STARTED))
def test_a_job_is_refused_before_it_starts(row: Conflict[Sections], tmp_path: Path) -> None:
    _, job, message = first_job(row, STARTED, tmp_path, Config)
    assert len(row.settings) >= 2 and all(is_named(key, job, message) for key in row.settings[:2])
    with pytest.raises(UserError) as error:
        check_division(job, 2)
    assert str(error.value) == message


@pytest.mark.parametrize("key", ["fault.on_non_finite", "fault.on_spike"])
def test_rewinds_are_refused_if_no_checkpoint_can_be_old_enough(key: str) -> None:
    """A run of some steps goes back from each number of steps that it may have done."""
    (row,) = (row for row in LENGTH if row.settings[:2] == ("fault.rewind_steps", key))
    for steps, every, back in itertools.product(range(1, 9), range(1, 9), range(9)):
        fault = {key.partition(".")[2]: "rewind", "rewind_steps": back}
        job = Sections.model_validate(
            {"train": {"steps": steps}, "checkpoint": {"every": every}, "fault": fault}
        )
        saved = range(every, steps + 1, every)
        goes_back = any(step <= done - back for done in range(1, steps + 1) for step in saved)
        assert row.applies(job) != goes_back


def test_rules_of_length_wait_for_the_data_of_epochs() -> None:
    sections = {"train": {"epochs": 1.0}, "checkpoint": {"every": 5}, "fault": {"on_spike": "rewind"}}
    job = Config.model_validate(sections)
    assert conflict_in(LENGTH, job) is None
    for samples, refused in ((64, True), (80, False)):  # 4 and 5 steps
        train = job.train.with_steps_of(lambda epochs, samples=samples: epochs * samples)
        known = job.model_copy(update={"train": train})
        assert (conflict_in(LENGTH, known) is not None) is refused


OTHERS: tuple[Conflict[Sections], ...] = NEW + PLANNED


@pytest.mark.parametrize("row", OTHERS, ids=names(OTHERS))
def test_a_new_run_or_a_plan_is_refused(
    row: Conflict[Sections], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no torchao
    rows = NEW if row in NEW else PLANNED
    _, job, message = first_job(row, rows, tmp_path)
    assert all(is_named(key, job, message) for key in row.settings)


def test_a_new_run_is_refused_before_it_has_a_folder(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "finetune": {"method": "lora", "adapters": "adapters"},
        "parallel": {"engine": "fsdp2"},
        "run": {"dir": str(tmp_path / "run")},
    }
    with pytest.raises(UserError, match=r"^parallel\.engine: expected .* with finetune\.adapters"):
        open_run(Config.model_validate(sections), None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("row", BUILT, ids=names(BUILT))
def test_a_model_is_refused_that_was_built(row: Conflict[BuiltJob], tmp_path: Path) -> None:
    for tables in jobs(row.settings, tmp_path):
        for draws, separates, foreign, auxiliary, has_loss in itertools.product((False, True), repeat=5):
            model = SimpleNamespace(
                draws=draws,
                separates=separates,
                foreign=foreign,
                auxiliary={"balance": 1.0} if auxiliary else {},
                has_loss=has_loss,
            )
            metrics = ("rows",) if has_loss else ()
            with contextlib.suppress(ValidationError):
                job = BuiltJob(Config.model_validate(tables), model, metrics)  # type: ignore[arg-type]
                if row.applies(job):
                    message = row.text(job)
                    if str(conflict_in(BUILT, job)) == message:
                        assert all(is_named(key, job.config, message) for key in row.settings)
                        return
    raise AssertionError("no job meets the row")


def test_settings_of_rows_exist() -> None:
    rows: tuple[Conflict[Any], ...] = (*READ, *STARTED, *OTHERS, *BUILT)
    assert all(field_at(key.split(".")) is not None for row in rows for key in row.settings)
