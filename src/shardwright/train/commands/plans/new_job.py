"""`shardwright init`: the file of a new job, from its model, its data and its devices, with the planner's settings."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.planner.allocator import Rules
from shardwright.planner.devices import Device
from shardwright.planner.search import Found, fastest
from shardwright.planner.verdict import in_gib
from shardwright.train.commands.plans.fit import search
from shardwright.train.commands.plans.planned_job import PlannedJob
from shardwright.train.config.catalog.kinds import kinds, sizes_of
from shardwright.train.config.load import load_config
from shardwright.train.config.plans.job_of_model import MODEL_PREFIX
from shardwright.train.config.schema import Config, toml_value
from shardwright.train.config.shapes.hub import is_hub_name
from shardwright.train.config.shapes.presets import Shape
from shardwright.train.data.tokens.tokenizers import FILE as TOKENIZER_FILE
from shardwright.train.data.tokens.tokenizers import open_tokenizer
from shardwright.train.errors import UserError, counted
from shardwright.train.report.progress import START

TASKS = ("pretrain", "finetune", "lora")
#: By parameters up to which they are used, peak learning rates for training from scratch.
RATES = ((2e7, 3e-3), (5e8, 6e-4), (2e10, 3e-4), (1e12, 1.5e-4))
FINE_TUNING_RATES = {"finetune": 1e-5, "lora": 2e-4}
TOKENS = {"pretrain": 1 << 19, "finetune": 1 << 17, "lora": 1 << 16}  #: of a step, about
EPOCHS = 2.0  #: of fine-tuning
FEWEST = 10  #: steps of fine-tuning, about: less data has smaller batches
WARMUP = 10  #: steps of the warm-up, at most a tenth of the run
BYTES_OF_A_TOKEN = 4  #: about, of text in files
SEQ_LEN = 4096  #: or the longest of the model
ON_CPU: Mapping[str, int] = {"seq_len": 256, "global_batch": 16, "micro_batch": 8}

#: Keys with which only the config.json of a model of transformers is read.
READ_ALONE = (("model.weights", "random"),)

Section = dict[str, tuple[object, str]]
"""Keys of a section with their values, and comments, which may be empty."""


@dataclass(frozen=True)
class Wanted:
    """A user's answers.

    Attributes:
        model: a preset ("8B"), a kind with a preset ("hybrid:9B"), or a model of transformers: ``hf:`` with its name on
            the hub or its folder.
        data: files, or "pydoc".
        task: one of `TASKS`.
        ranks: of the job.
        device: of each rank; None: the CPU.
        seq_len: tokens of a sequence; 0: `SEQ_LEN`.
    """

    model: str
    data: Sequence[str]
    task: str
    ranks: int
    device: Device | None
    seq_len: int = 0


def presets() -> list[str]:
    """Names of models that need no files."""
    first, *others = kinds.known()
    return [*first.presets, *(f"{kind.name}:{name}" for kind in others for name in kind.presets)]


def checked_model(model: str) -> str:
    """The name of a model, unless there is none of this name.

    Raises:
        UserError: there is none.
    """
    if model.startswith(MODEL_PREFIX):
        with tempfile.TemporaryDirectory() as folder:
            section: Section = {"kind": ("hf", ""), "path": (model.removeprefix(MODEL_PREFIX), "")}
            _shape(section, Path(folder), model)
    elif model not in presets():
        near = next((each for each in presets() if each.lower().endswith(model.lower())), None)
        hint = f"; did you mean {near!r}?" if near and model else ""
        raise UserError(
            f"--model: expected {', '.join(presets())}, or {MODEL_PREFIX} with a model of transformers, found "
            f"{model!r}{hint}"
        )
    return model


def checked_data(sources: Sequence[str]) -> tuple[str, ...]:
    """Files, folders or patterns of data, unless one is missing.

    Raises:
        UserError: one is.
    """
    missing = [source for source in sources if source != "pydoc" and not _exists(source)]
    if missing or not sources:
        found = missing[0] if missing else ""
        raise UserError(
            f"--data: expected files, folders, patterns or pydoc, found {found!r}, which is not there"
        )
    return tuple(sources)


def checked_task(task: str, model: str) -> str:
    """A task, unless it is none of this model.

    Raises:
        UserError: it is none.
    """
    if task not in TASKS:
        raise UserError(f"--task: expected one of {', '.join(TASKS)}, found {task!r}")
    if task != "pretrain" and not model.startswith(MODEL_PREFIX):
        raise UserError(
            f"--task: expected pretrain with the model {model!r}, which has no weights yet, found {task!r}; take a "
            f"model of transformers ({MODEL_PREFIX}NAME)"
        )
    return task


def sections_of(wanted: Wanted, folder: Path) -> dict[str, Section]:
    """The sections of the file before any plan. ``folder``: a place for a file that is checked.

    Raises:
        UserError: an answer is wrong.
    """
    foreign = wanted.model.startswith(MODEL_PREFIX)
    name = wanted.model.removeprefix(MODEL_PREFIX)
    kind, _, preset = name.rpartition(":")
    model: Section = {"kind": ("hf", ""), "path": (name, "")} if foreign else {"preset": (preset, "")}
    if kind and not foreign:
        model = {"kind": (kind, ""), **model}
    if foreign and wanted.task == "pretrain":
        model["weights"] = ("random", "from scratch: only the shape of the model is read")
    train: Section = {"steps": (1000 if wanted.device else 100, "")}
    if wanted.task != "pretrain":
        train = {"epochs": (EPOCHS, "passes over the data")}
    sections: dict[str, Section] = {
        "run": {"name": (_plain(name), ""), "device": ("cuda" if wanted.device else "cpu", "")},
        "model": model,
        "data": _data(wanted.data, name if foreign else None),
        "train": train,
        "optimizer": {},
        "parallel": {"param_dtype": ("bfloat16", "gradients are summed in float32")} if wanted.device else {},
        "validation": {"every": (100, "steps")},
        "checkpoint": {"every": (200, "steps")},
    }
    if wanted.task == "lora":
        sections["finetune"] = {"method": ("lora", ""), "rank": (16, ""), "alpha": (32, "")}
    shape = _shape(model, folder, wanted.model)
    longest = shape.max_seq_len or SEQ_LEN
    if wanted.seq_len > longest:
        raise UserError(f"--seq-len: expected at most {longest} with this model, found {wanted.seq_len}")
    if wanted.device is None:
        train |= {key: (value, "") for key, value in ON_CPU.items()}
    seq_len = wanted.seq_len or min(longest, SEQ_LEN if wanted.device else ON_CPU["seq_len"])
    batch = ON_CPU["global_batch"] if wanted.device is None else TOKENS[wanted.task] // seq_len
    if (
        "epochs" in train
        and (steps := _steps_of(wanted.data, batch * seq_len)) is not None
        and steps < FEWEST
    ):
        batch = batch * steps // FEWEST
    batch = max(1, round(batch / wanted.ranks)) * wanted.ranks
    train["seq_len"] = (seq_len, "tokens of a sequence")
    train["global_batch"] = (batch, f"sequences of a step: {batch * seq_len:,} tokens")
    train["micro_batch"] = (1 if wanted.device else batch // wanted.ranks, "sequences of a rank at a time")
    rate = FINE_TUNING_RATES.get(wanted.task) or next(
        rate for most, rate in RATES if sizes_of(shape).parameters <= most or most == RATES[-1][0]
    )
    warmup: tuple[object, str] = (WARMUP, "")
    if "epochs" in train and (steps := _steps_of(wanted.data, batch * seq_len)) is not None:
        fitting = min(WARMUP, max(1, steps // 10))
        warmup = (fitting, f"of about {counted(steps, 'step')}, by the size of the data")
    sections["optimizer"] = {"lr": (rate, "peak learning rate"), "warmup_steps": warmup}
    return sections


def _steps_of(sources: Sequence[str], tokens: int) -> int | None:
    """About the number of steps of so many tokens in `EPOCHS` of text files. None: there are other sources."""
    files = [file for source in sources for file in ([] if "://" in source else sorted(_files_of(source)))]
    if not files or any(file.suffix not in (".txt", ".jsonl") for file in files):
        return None
    return max(1, round(EPOCHS * sum(file.stat().st_size for file in files) / BYTES_OF_A_TOKEN / tokens))


def _files_of(source: str) -> list[Path]:
    path = Path(source)
    return [path] if path.is_file() else [each for each in path.parent.glob(path.name) if each.is_file()]


def _without_template(config: Config) -> str:
    """A notice if conversations have no chat template, as far as files here show it; else empty."""
    if config.data.kind != "conversations":
        return ""
    name = config.data.tokenizer
    try:
        if is_hub_name(name) and not os.path.exists(name) and name != "bytes":
            from huggingface_hub import try_to_load_from_cache

            repository, _, revision = name.partition("@")
            found = try_to_load_from_cache(repository, TOKENIZER_FILE, revision=revision or None)
            if not isinstance(found, str):
                return ""
            name = str(Path(found).parent)
        if open_tokenizer(name).chat_template is not None:
            return ""
    except (ImportError, UserError):  # training says what is wrong with it
        return ""
    return (
        f"the data are conversations, and the tokenizer {config.data.tokenizer} has no chat template: set "
        "data.chat_template to the file of a jinja template, such as the one in docs/data.md"
    )


def _shape(model: Section, folder: Path, name: str) -> Shape:
    path = folder / "shape.toml"
    read: Section = {"weights": ("random", "")} if "path" in model else {}
    path.write_text(text_of({"model": model | read, "train": {"seq_len": (2, "")}}))
    try:
        return load_config(path).model.shape()
    except UserError as error:
        raise UserError(f"--model {name}: {str(error).removeprefix(f'{path}: ')}") from error


def _data(sources: Sequence[str], tokenizer: str | None) -> Section:
    section: Section = {"source": (sources[0] if len(sources) == 1 else list(sources), "")}
    keys = _keys_of_first_row(sources[0])
    for kind, key in (("conversations", "messages"), ("completions", "completion")):
        if key in keys:
            section["kind"] = (kind, f"rows of {Path(sources[0]).name} have {key}")
    if tokenizer is not None:
        template = "it needs a chat template, or set chat_template" if "messages" in keys else ""
        section["tokenizer"] = (tokenizer, template)
        section["packing"] = ("best_fit", "whole documents, as many as fit into a sample")
    return section


def _exists(source: str) -> bool:
    path = Path(source)
    return "://" in source or (bool(path.name) and (path.exists() or any(path.parent.glob(path.name))))


def _keys_of_first_row(source: str) -> set[str]:
    """The keys of the first row of a file in JSON lines; none of another file."""
    if not source.endswith(".jsonl") or "://" in source or not Path(source).is_file():
        return set()
    with Path(source).open(encoding="utf-8", errors="replace") as file:
        try:
            row = json.loads(file.readline())
        except ValueError:
            return set()
    return set(row) if isinstance(row, dict) else set()


def _plain(name: str) -> str:
    """A model's name as that of a run."""
    last = name.rstrip("/").rpartition("/")[2].partition("@")[0].replace(":", "-")
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in last).lower() or "run"


def with_plan(
    wanted: Wanted, sections: dict[str, Section], folder: Path, processes: int, say: Callable[[str], None]
) -> tuple[dict[str, Section], str]:
    """The sections with the fastest settings that fit, and what their plan says.

    Raises:
        UserError: no settings fit.
    """
    device = wanted.device
    if device is None:
        return sections, ""
    if device.figures is None:
        return sections, f"The speed of {device.name} is not known, so no settings were compared."
    path = folder / "job.toml"
    path.write_text(text_of(sections))
    keys = READ_ALONE if "path" in sections["model"] else ()
    say(f"Planning settings for {wanted.ranks} x {device.name}: this takes one to three minutes.")
    job = PlannedJob(str(path), keys, wanted.ranks)
    START.begin("planning")
    try:
        found = search(job, device, Rules.of(os.environ), True, processes)
    finally:
        START.end()
    best = fastest(found.plans)
    if best is None:
        least = min(found.plans, key=lambda each: each.nbytes)
        raise UserError(
            f"no settings of this model fit on {wanted.ranks} x {device.name}: the smallest need "
            f"{in_gib(least.nbytes)} GiB of each; take more or larger devices, or --task lora"
        )
    return _with_keys(sections, best), (
        f"Its plan: {in_gib(best.nbytes)} GiB reserved, "
        f"{found.speeds[best.keys].tokens_per_second[1]:,.0f} tokens/s on each device."
    )


def _with_keys(sections: dict[str, Section], best: Found) -> dict[str, Section]:
    changed = {name: dict(section) for name, section in sections.items()}
    for key, value in best.keys:
        section, _, name = key.partition(".")
        own = changed.setdefault(section, {})
        if name in own or not _is_default(key, value):
            own[name] = (int(value) if value.isdecimal() else value, "chosen by the planner")
    return changed


def _is_default(key: str, value: str) -> bool:
    return str(Config().value_at(key)) == value


def text_of(sections: Mapping[str, Section]) -> str:
    """The file."""
    lines: list[str] = []
    for name in Config.model_fields:
        if not (section := sections.get(name)):
            continue
        lines += ["", f"[{name}]"]
        for key, (value, comment) in section.items():
            lines.append(f"{key} = {toml_value(value)}" + (f"  # {comment}" if comment else ""))
    return "\n".join(lines[1:]) + "\n"


def new_job(
    wanted: Wanted, file: Path, processes: int, say: Callable[[str], None], plans: bool = True
) -> str:
    """Write the file of a job. Returns what the planner says of it.

    Raises:
        UserError: an answer is wrong, or nothing fits. Then no file is written.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sections = sections_of(wanted, folder)
        verdict = ""
        if plans:
            sections, verdict = with_plan(wanted, sections, folder, processes, say)
        on = f"{wanted.ranks}x{wanted.device.key}" if wanted.device else ""
        place = on or f"{wanted.ranks} ranks of a CPU"
        head = [f"# A job of `shardwright init`: {wanted.model}, {wanted.task}, on {place}."]
        head += [f"# {verdict}"] if verdict else []
        head += [f"#   shardwright plan {file} --on {on}"] if on else []
        head += [f"#   shardwright train {file} --nproc {wanted.ranks}"]
        text = "\n".join(head) + "\n\n" + text_of(sections)
        checked = folder / "checked.toml"
        checked.write_text(text)
        try:
            config = load_config(
                checked, READ_ALONE if "path" in sections["model"] else (), ranks=wanted.ranks
            )
            file.write_text(text)
        except OSError as error:
            raise UserError(f"init: cannot write {file}: {error.strerror}") from error
        if notice := _without_template(config):
            say(f"warning: {notice}")
    return verdict
