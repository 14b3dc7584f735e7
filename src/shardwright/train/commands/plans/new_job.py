"""`shardwright init`: the file of a new job, from its model, its data and its devices, with the planner's settings."""

from __future__ import annotations

import glob
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.planner import Device, Found, Rules, fastest, in_gib
from shardwright.train.commands.plans.fit import search
from shardwright.train.commands.plans.plan import say as say_in_place
from shardwright.train.commands.plans.planned_job import PlannedJob
from shardwright.train.config.catalog.kinds import kinds, near_name
from shardwright.train.config.load import load_config
from shardwright.train.config.plans.job_of_model import MODEL_PREFIX
from shardwright.train.config.schema import Config, toml_value
from shardwright.train.config.shapes.foreign import CONFIG
from shardwright.train.config.shapes.hub import is_hub_name
from shardwright.train.config.shapes.presets import Shape
from shardwright.train.data.sources.places import PYDOC, SUFFIXES, locate, size_of
from shardwright.train.data.tokens.tokenizers import (
    FILE as TOKENIZER_FILE,
    KEY as TOKENIZER_KEY,
    Bytes,
    open_tokenizer,
)
from shardwright.train.errors import UserError, counted
from shardwright.train.models.offers import sizes_of
from shardwright.train.models.vocabulary import with_vocabulary

TASKS = ("pretrain", "finetune", "lora")
#: By parameters up to which they are used, peak learning rates for training from scratch.
RATES = ((2e7, 3e-3), (5e8, 6e-4), (2e10, 3e-4), (1e12, 1.5e-4))
FINE_TUNING_RATES = {"finetune": 1e-5, "lora": 2e-4}
TOKENS = {"pretrain": 1 << 19, "finetune": 1 << 17, "lora": 1 << 16}  #: of a step, about
EPOCHS = 2.0  #: of fine-tuning
STEPS = (100, 1000)  #: of pretraining on a CPU, and on GPUs
FEWEST = 10  #: steps of fine-tuning, about: less data has smaller batches
FEW = 6  #: steps of fine-tuning below which there is a notice
WARMUP = 10  #: steps of the warm-up of fine-tuning, at most a tenth of the run, or else `WARMUP_PART` of it
WARMUP_PART = 0.03
SAVES, LONGEST = 10, 200  #: checkpoints in a run, or more: there are at most so many steps between two
SHORTEST = 10  #: steps between two checkpoints at least; a run also saves after its last step
BYTES = "bytes"
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
        tokenizer: as `data.tokenizer`. Empty: the model's own, or bytes for a preset.
    """

    model: str
    data: Sequence[str]
    task: str
    ranks: int
    device: Device | None
    seq_len: int = 0
    tokenizer: str = ""

    @property
    def is_foreign(self) -> bool:
        """Whether the model is one of transformers."""
        return self.model.startswith(MODEL_PREFIX)

    @property
    def is_bytes(self) -> bool:
        """Whether a preset is trained on bytes."""
        return not self.is_foreign and self.tokenizer in ("", BYTES)


def presets() -> list[str]:
    """Return the names of models that need no files."""
    first, *others = kinds.known()
    return [*first.presets, *(f"{kind.name}:{name}" for kind in others for name in kind.presets)]


def checked_model(model: str) -> str:
    """Return the name of a model, with the prefix of models of transformers if it is a folder with a config.json or a
    name on the hub.

    Raises:
        UserError: there is none.
    """
    if model.startswith(MODEL_PREFIX):
        with tempfile.TemporaryDirectory() as folder:
            section: Section = {"kind": ("hf", ""), "path": (model.removeprefix(MODEL_PREFIX), "")}
            _shape(section, Path(folder), model)
    elif model not in presets():
        if os.path.isfile(os.path.join(model, CONFIG)) or ("/" in model and is_hub_name(model)):
            return checked_model(MODEL_PREFIX + model)
        near = next((each for each in presets() if each.lower().endswith(model.lower())), None)
        near = near or near_name(model, presets())
        hint = f"; did you mean {near!r}?" if near and model else ""
        raise UserError(
            f"--model: expected {', '.join(presets())}, or {MODEL_PREFIX} with a model of transformers, found "
            f"{model!r}{hint}"
        )
    return model


def checked_data(sources: Sequence[str]) -> tuple[str, ...]:
    """Files or patterns of data, as training takes them: a folder of files becomes the pattern of their kind.

    Raises:
        UserError: one is missing, empty or of a kind that training does not read, or a folder has several kinds.
    """
    missing = [source for source in sources if source != PYDOC and not _exists(source)]
    if missing or not sources:
        found = missing[0] if missing else ""
        raise UserError(
            f"--data: expected files, folders, patterns or pydoc, found {found!r}, which is not there"
        )
    checked = tuple(pattern for source in sources for pattern in _patterns_of(source))
    for source in checked:
        for place in locate(source, "--data") if source != PYDOC and "://" not in source else ():
            size_of(place)
    return checked


def _patterns_of(source: str) -> list[str]:
    """Return the source; of a folder with files the pattern of these."""
    folder = Path(source).expanduser()
    saved = any((folder / name).exists() for name in ("state.json", "dataset_dict.json"))
    if "://" in source or not folder.is_dir() or saved:
        return [source]
    root = glob.escape(source.rstrip(os.sep) or os.sep)
    for inside in ("*", os.path.join("**", "*")):  # files in folders of the folder, if it has none itself
        pattern = os.path.join(root, inside)
        files = glob.glob(os.path.expanduser(pattern), recursive=True)
        endings = sorted({each.suffix for each in map(Path, files) if each.suffix.lower() in SUFFIXES})
        if len({each.lower() for each in endings}) > 1:
            raise UserError(
                f"--data: expected a folder with files of one kind, found {' and '.join(endings)} in {folder}; choose "
                f"one: --data {shlex.quote(f'{pattern}{endings[0]}')}"
            )
        if endings:
            return [f"{pattern}{each}" for each in endings]
    raise UserError(f"--data: expected a folder with {', '.join(SUFFIXES)} files, found none in {folder}")


def checked_tokenizer(name: str) -> str:
    """Return the name of a tokenizer, unless there is none that can be read.

    Raises:
        UserError: there is none.
    """
    try:
        open_tokenizer(name)
    except UserError as error:
        raise UserError(f"--tokenizer: {str(error).removeprefix(f'{TOKENIZER_KEY}: ')}") from error
    return name


def checked_task(task: str, model: str) -> str:
    """Return a task, unless it is none of this model.

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
    """Return the sections of the file before any plan. ``folder``: a place for a file that is checked.

    Raises:
        UserError: an answer is wrong.
    """
    foreign = wanted.is_foreign
    name = wanted.model.removeprefix(MODEL_PREFIX)
    kind, _, preset = name.rpartition(":")
    model: Section = {"kind": ("hf", ""), "path": (name, "")} if foreign else {"preset": (preset, "")}
    if kind and not foreign:
        model = {"kind": (kind, ""), **model}
    if foreign and wanted.task == "pretrain":
        model["weights"] = ("random", "from scratch: only the shape of the model is read")
    train: Section = {"steps": (STEPS[wanted.device is not None], "")}
    if wanted.task != "pretrain":
        train = {"epochs": (EPOCHS, "passes over the data")}
    sections: dict[str, Section] = {
        "run": {"name": (_plain(name), ""), "device": ("cuda" if wanted.device else "cpu", "")},
        "model": model,
        "data": _data(wanted, name),
        "train": train,
        "optimizer": {},
        "parallel": {"param_dtype": ("bfloat16", "gradients are summed in float32")} if wanted.device else {},
        "validation": {},
        "checkpoint": {},
    }
    if wanted.task == "lora":
        sections["finetune"] = {"method": ("lora", ""), "rank": (16, ""), "alpha": (32, "")}
    shape = _shape(model, folder, wanted.model)
    if wanted.is_bytes and shape.vocab_size != Bytes.vocab_size and not _has_ids(wanted.data):
        model["vocab_size"] = (Bytes.vocab_size, "bytes; without this line it is the size of data.tokenizer")
    longest = shape.max_seq_len or SEQ_LEN
    if wanted.seq_len > longest:
        raise UserError(f"--seq-len: expected at most {longest} with this model, found {wanted.seq_len}")
    if wanted.device is None:
        train |= {key: (value, "") for key, value in ON_CPU.items()}
    seq_len = wanted.seq_len or min(longest, SEQ_LEN if wanted.device else ON_CPU["seq_len"])
    batch = ON_CPU["global_batch"] if wanted.device is None else TOKENS[wanted.task] // seq_len
    epochs = "epochs" in train
    if epochs and (tokens := EPOCHS * _tokens_of(wanted.data)) and tokens < FEWEST * batch * seq_len:
        batch = int(tokens / (FEWEST * seq_len))
    batch = max(1, round(batch / wanted.ranks)) * wanted.ranks
    steps = _epoch_steps(wanted, batch * seq_len) if epochs else STEPS[wanted.device is not None]
    train["seq_len"] = (seq_len, "tokens of a sequence")
    train["global_batch"] = (batch, f"sequences of a step: {batch * seq_len:,} tokens")
    train["micro_batch"] = (1 if wanted.device else batch // wanted.ranks, "sequences of a rank at a time")
    rate = FINE_TUNING_RATES.get(wanted.task) or next(
        rate for most, rate in RATES if sizes_of(shape).parameters <= most or most == RATES[-1][0]
    )
    warmup = max(1, steps // 10) if steps else WARMUP
    about = ""
    if epochs and steps:
        warmup = min(warmup, max(WARMUP, round(WARMUP_PART * steps)))
        about = f"of about {counted(steps, 'step')}, by the size of the data"
    if epochs and (notice := _few_steps(steps)):
        train["epochs"] = (EPOCHS, f"passes over the data. {notice[0].upper()}{notice[1:]}")
    sections["optimizer"] = {"lr": (rate, "peak learning rate"), "warmup_steps": (warmup, about)}
    sections["validation"] = {"every": (_interval(steps, 100, SAVES // 2), "steps")}
    unknown = "" if steps else "; a smaller number for a short run: train prints its steps"
    every = max(SHORTEST, _interval(steps, LONGEST, SAVES))
    sections["checkpoint"] = {"every": (every, f"steps{unknown}")}
    return sections


def _interval(steps: int, most: int, times: int) -> int:
    """Return after how many steps a run does a thing that it does `times` times, at most `most`.

    `steps`: of the run; 0 if that is not known.
    """
    return min(most, max(1, steps // times)) if steps else most


def _epoch_steps(wanted: Wanted, tokens: int) -> int:
    """Return about how many steps of `tokens` tokens `EPOCHS` passes over the data take. 0: it is not known."""
    whole = EPOCHS * _tokens_of(wanted.data)
    return max(1, round(whole / tokens)) if whole else 0


def _few_steps(steps: int) -> str:
    """Return a notice if fine-tuning has few steps; else empty."""
    if not 0 < steps < FEW:
        return ""
    return (
        f"the data are about {counted(steps, 'step')} in {EPOCHS:g} epochs, with one sequence for each rank in a step: "
        "add data, raise train.epochs, or take fewer ranks or a smaller train.seq_len"
    )


def _tokens_of(sources: Sequence[str]) -> float:
    """About the number of tokens of text files. 0: there are other sources."""
    files = [_files_of(source) for source in sources]
    if not all(files) or any(file.suffix.lower() not in (".txt", ".jsonl") for own in files for file in own):
        return 0.0
    return sum(float(file.stat().st_size) for own in files for file in own) / BYTES_OF_A_TOKEN


def _has_ids(sources: Sequence[str]) -> bool:
    return any(file.suffix.lower() == ".npy" for source in sources for file in _files_of(source))


def _files_of(source: str) -> list[Path]:
    """Return the files here of a source; none of pydoc and of a URL."""
    if source == PYDOC or "://" in source:
        return []
    return [Path(place.path) for place in locate(source, "--data")]


def _without_template(config: Config) -> str:
    """Return a notice if conversations have no chat template, as far as files here show it; else empty."""
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


def _data(wanted: Wanted, model: str) -> Section:
    sources = wanted.data
    section: Section = {"source": (sources[0] if len(sources) == 1 else list(sources), "")}
    first = next(iter(_files_of(sources[0])), None)
    keys = set() if first is None else _keys_of_first_row(first)
    for kind, key in (("conversations", "messages"), ("completions", "completion")):
        if first is not None and key in keys:
            section["kind"] = (kind, f"rows of {first.name} have {key}")
    if wanted.is_bytes:
        section["tokenizer"] = (BYTES, "each byte is a token; else a folder or name of Hugging Face")
        return section
    template = "if it has no chat template, set chat_template to a file" if "messages" in keys else ""
    section["tokenizer"] = (wanted.tokenizer or model, template)
    if wanted.is_foreign:
        section["packing"] = ("best_fit", "whole documents, as many as fit into a sample")
    return section


def _exists(source: str) -> bool:
    path = Path(source).expanduser()
    if "://" in source or (path.name and path.exists()):
        return True
    return glob.has_magic(source) and bool(glob.glob(str(path), recursive=True))


def _keys_of_first_row(file: Path) -> set[str]:
    """Return the keys of the first row of a file in JSON lines; none of another file."""
    if file.suffix.lower() != ".jsonl":
        return set()
    with file.open(encoding="utf-8", errors="replace") as lines:
        try:
            row = json.loads(lines.readline())
        except ValueError:
            return set()
    return set(row) if isinstance(row, dict) else set()


def _plain(name: str) -> str:
    """Return a model's name as that of a run."""
    last = name.rstrip("/").rpartition("/")[2].partition("@")[0].replace(":", "-")
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in last).lower() or "run"


def with_plan(
    wanted: Wanted, sections: dict[str, Section], folder: Path, processes: int, say: Callable[[str], None]
) -> tuple[dict[str, Section], str]:
    """Return the sections with the fastest settings that fit, and what their plan says.

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
    say(f"Planning settings for {wanted.ranks} x {device.name}: this takes minutes.")
    job = PlannedJob(str(path), keys, wanted.ranks, device, Rules.of(os.environ))
    try:
        found = search(job, processes)
    finally:
        say_in_place("")
    best = fastest(found.plans)
    if best is None:
        least = min(found.plans, key=lambda each: each.nbytes)
        raise UserError(
            f"no settings of this model fit on {wanted.ranks} x {device.name}: the smallest need "
            f"{in_gib(least.nbytes)} GiB of each; take more or larger devices, or --task lora"
        )
    return _with_keys(sections, best), (
        f"Its plan: {in_gib(best.nbytes)} GiB reserved{', which BARELY fits' if best.barely else ''}, "
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
    """Return the file."""
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
            if wanted.tokenizer:
                with_vocabulary(config)
            file.write_text(text)
        except OSError as error:
            raise UserError(f"init: cannot write {file}: {error.strerror}") from error
        tokens = config.train.global_batch * config.train.seq_len
        few = _few_steps(_epoch_steps(wanted, tokens)) if config.train.epochs else ""
        for notice in filter(None, (_without_template(config), few)):
            say(f"warning: {notice}")
        if wanted.is_bytes:
            say(
                f"{file} trains on bytes; for another tokenizer pass --tokenizer, or set data.tokenizer to a folder or "
                "name of Hugging Face"
            )
    return verdict
