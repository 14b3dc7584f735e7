"""`shardwright evaluate`: tasks of lm-evaluation-harness on a checkpoint of a run, and their results in its folder.

The checkpoint is exported for transformers, and a process of its own computes (`harness.py`). A run with `[validation]
tasks` starts this command, too. Nothing here imports lm_eval, and no metric is computed here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from shardwright.checkpoint import write_json
from shardwright.common.json_text import strict_json
from shardwright.train.commands.export import export, reader_by_kind, tokenizer_config
from shardwright.train.commands.generate import texts_begin
from shardwright.train.commands.hugging_face import harness
from shardwright.train.commands.hugging_face.late_results import send
from shardwright.train.config import DataConfig, ValidationConfig
from shardwright.train.config.sections.validation import YAML
from shardwright.train.config.shapes.presets import Shape
from shardwright.train.data.dataset import template_of
from shardwright.train.data.tokens.requests import Requests
from shardwright.train.data.tokens.tokenizers import (
    CONFIG,
    FILE,
    TEMPLATE,
    FromFile,
    Tokenizer,
    open_tokenizer,
)
from shardwright.train.errors import JobError, UserError
from shardwright.train.run.evaluations import add_tasks
from shardwright.train.run.folder import RunFolder, now
from shardwright.train.run.same_job import recorded_tokenizer
from shardwright.train.run.writing import writing

CHAT = "--apply-chat-template"


@dataclass(frozen=True)
class Evaluated:
    """The results of an evaluation.

    Attributes:
        file: with these results, and earlier ones of other tasks.
        step: of the checkpoint; None for an exported folder.
        tasks: the results by name of a task, as in the file.
    """

    file: Path
    step: int | None
    tasks: Mapping[str, Any]


def evaluate(
    run: Path,
    tasks: Sequence[str],
    *,
    step: int | None = None,
    dtype: str | None = None,
    limit: int | None = None,
    device: str | None = None,
    batch_size: int = 8,
    chat: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Evaluated:
    """Compute tasks of lm-eval, and write their results.

    Args:
        run: the folder of a run, or a folder that `shardwright export` wrote.
        tasks: names of lm-eval, or YAML files of tasks. Paths of data inside a file are relative to the current folder.
        step: the step of the checkpoint. None: the newest whole one.
        dtype: as of an export.
        limit: samples of each task. None: all.
        device: of torch. None: a GPU if there is one.
        batch_size: samples at once.
        chat: put the texts into the chat template.
        say: gets notices.

    Raises:
        UserError: lm_eval is not installed or does not know a task; the folder is no run and no export, has no whole
            checkpoint, or has a model that transformers does not read; or there is no chat template.
        JobError: lm-eval failed.
    """
    _check_package("evaluate")
    names = [_absolute(name, "--tasks") for name in tasks]
    request: dict[str, Any] = {"tasks": names, "limit": limit, "batch_size": batch_size}
    request["apply_chat_template"] = chat
    request["device"] = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = RunFolder(run)
    if not source.exists() and (run / "config.json").is_file():
        if step is not None or dtype is not None:
            raise UserError(
                f"evaluate: expected no --step and no --dtype for {run}, which is no run; leave them out"
            )
        _check_reader(str(_model_type(run)), "evaluate")
        folder = run.absolute()
        tokenizer = open_tokenizer(str(folder))
        if chat:
            _check_template(tokenizer.chat_template, f"in {run}", CHAT)
        requests = Requests(tokenizer, tokenizer.chat_template if chat else None)
        return _computed(folder, request, (str(folder), requests), run / "evaluation.json", None, say)
    record, config = source.record(), source.config()  # raises an error for a folder that is no run
    _check_reader(reader_by_kind(config.model.shape()), "evaluate")
    name = recorded_tokenizer(record, config.data)
    requests = requests_of(config.data, open_tokenizer(name), chat)
    if chat:
        _check_template(requests.template, f"of {run}", CHAT)
    with tempfile.TemporaryDirectory(prefix="shardwright-evaluate-") as temporary:
        exported = export(run, Path(temporary) / "model", step=step, dtype=dtype, say=say)
        file = source.evaluation_file(exported.step)
        evaluated = _computed(exported.folder, request, (name, requests), file, exported.step, say)
    send(source, exported.step, evaluated.tasks, say)
    return evaluated


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise UserError if lm-eval is not installed or does not know a task. lm-eval reads no file of a task for it."""
    _check_package("evaluate")
    names = [_absolute(name, "--tasks") for name in tasks]
    with tempfile.TemporaryFile() as stream:
        _results({"folder": None, "tasks": names}, stream, "import lm_eval shows more")


def check_job(validation: ValidationConfig, data: DataConfig, shape: Shape) -> None:
    """Raise UserError if no task can be evaluated beside a run with these settings and a model of this
    shape. Names of tasks are not looked up."""
    if not validation.tasks:
        return
    _check_package("validation.tasks")
    _check_reader(reader_by_kind(shape), "validation.tasks")
    for task in validation.tasks:
        _absolute(task, "validation.tasks")
    if validation.tasks_apply_chat_template:
        template = template_of(data, open_tokenizer(data.tokenizer))
        _check_template(template, "of this run", "validation.tasks_apply_chat_template")


def _check_package(key: str) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"{key}: needs the extra evaluate, found no package lm_eval; pip install -e '.[evaluate]' in the checkout"
        )


def _absolute(task: str, key: str) -> str:
    if not task.endswith(YAML):
        return task
    if not os.path.isfile(task):
        raise UserError(f"{key}: expected the file of a task, found nothing at {task}")
    return os.path.abspath(task)


def _model_type(folder: Path) -> Any:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(
            f"{folder / 'config.json'}: expected the config.json of a model, found none that can be read"
        ) from None


def _check_reader(model_type: str | None, key: str) -> None:
    """Refuse models that transformers does not read."""
    if model_type in (None, "shardwright_hybrid"):
        raise UserError(
            f"{key}: expected a model that transformers reads, which lm-eval needs, found a kind of model without "
            f"{'files for transformers' if model_type is None else 'a class of transformers'}; use "
            "[[data.validation_sources]] for losses of this model, or a hook"
        )


def _check_template(template: str | None, where: str, key: str) -> None:
    if template is None:
        raise UserError(
            f"{key}: expected a tokenizer with a chat template, found none {where}; set data.chat_template to the file "
            "of one before the training, or leave this out"
        )


@contextmanager
def tokenizer_of_requests(tokenizer: FromFile) -> Iterator[str]:
    """Make a folder with a tokenizer that knows its end token by name, which lm-eval needs, and whose class is none of
    a model's, which may make other tokens. lm-eval decodes with it; `Requests` encodes."""
    template = tokenizer.chat_template
    with tempfile.TemporaryDirectory(prefix="shardwright-evaluate-") as temporary:
        shutil.copyfile(tokenizer.file, Path(temporary, FILE))
        write_json(Path(temporary, CONFIG), tokenizer_config(tokenizer, template))
        if template is not None:
            Path(temporary, TEMPLATE).write_text(template, encoding="utf-8")
        yield temporary


def requests_of(data: DataConfig, tokenizer: Tokenizer, chat: bool) -> Requests:
    """Return what makes the ids of requests to a model of a run."""
    kinds = {each.kind for each in data.training}
    return Requests(
        tokenizer,
        template_of(data, tokenizer) if chat else None,
        data.spelled,
        texts_begin(data, tokenizer),
        apart="documents" not in kinds,
    )


def _computed(
    folder: Path,
    request: Mapping[str, Any],
    requests: tuple[str, Requests],
    file: Path,
    step: int | None,
    say: Callable[[str], None],
) -> Evaluated:
    """Compute in another process, and write the file. `requests`: with the setting that names their tokenizer."""
    log = file.with_suffix(".log")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = log.open("ab")
    at = f"step {step}" if step is not None else str(folder)
    say(f"lm-eval computes {', '.join(map(os.path.basename, request['tasks']))} of {at}; its log: {log}")
    name, ids = requests
    tokenizer = open_tokenizer(str(folder))
    assert isinstance(tokenizer, FromFile)
    first = ids.prefix()  # lm-eval fails for a tokenizer without tokens that begin and end texts
    arguments = {} if first is None else {"prefix_token_id": first}
    settings = {"tokenizer": name, **{key: value for key, value in vars(ids).items() if key != "tokenizer"}}
    with stream, tokenizer_of_requests(tokenizer) as decoder:
        content = {**request, "folder": str(folder), "ids": settings}
        content["model_args"] = {"tokenizer": decoder, **arguments}
        found = _results(content, stream, f"see {log}")
    tasks = tasks_of(found, request["limit"], request["apply_chat_template"])
    add_tasks(file, step, tasks)
    return Evaluated(file, step, tasks)


def _results(request: Mapping[str, Any], stream: IO[bytes], advice: str) -> dict[str, Any]:
    """Return the results of lm-eval in a process of its own, which prints to `stream`. `advice`: where to read that."""
    with tempfile.TemporaryDirectory(prefix="shardwright-evaluate-") as temporary:
        files = Path(temporary) / "request.json", Path(temporary) / "result.json"
        files[0].write_text(strict_json(request), encoding="utf-8")
        command = [sys.executable, "-P", harness.__file__, *map(str, files)]
        status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream).returncode
        try:
            found: dict[str, Any] = json.loads(files[1].read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise JobError(
                f"evaluate: lm-eval ended with status {status} and without a result; {advice}"
            ) from None
    if "mistake" in found:
        raise UserError(f"--tasks: {found['mistake']}")
    if "error" in found:
        raise JobError(f"evaluate: lm-eval failed: {found['error']}; {advice}")
    return found


def tasks_of(found: Mapping[str, Any], limit: int | None, chat: bool = False) -> dict[str, dict[str, Any]]:
    """Return the results of lm-eval, by name of a task: metrics with value, standard error and whether a higher one is
    better, each None if it is not known; and the samples, shots and versions behind them, and whether `chat` templates
    are."""
    tasks: dict[str, dict[str, Any]] = {}
    for name, figures in found["results"].items():
        metrics = {}
        for key, value in figures.items():
            metric, comma, which = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{metric}_stderr,{which}")
            metrics[metric if which == "none" else key] = {
                "value": value,
                "stderr": error if isinstance(error, int | float) else None,
                "higher_is_better": found["higher_is_better"].get(name, {}).get(metric),
            }
        tasks[name] = {
            "metrics": metrics,
            "samples": found["n-samples"].get(name, {}).get("effective"),
            "limit": limit,
            "shots": found["n-shot"].get(name),
            "version": found["versions"].get(name),
            "chat_template": chat,
            "lm_eval": found["lm_eval"],
            "time": now(),
        }
    return tasks
