"""`shardwright plan`: whether a configured job fits into the memory of its devices. Nothing is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardwright.planner import cache
from shardwright.planner.allocator import Rules
from shardwright.planner.devices import Device
from shardwright.planner.program import Program
from shardwright.planner.text import as_json, in_gib, lines_of
from shardwright.planner.verdict import Verdict, judge
from shardwright.train.config import Config
from shardwright.train.config.catalog.kinds import model_in_words, sizes_of
from shardwright.train.config.plan_key import plan_key
from shardwright.train.errors import UserError

CONF = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  #: the first one that is set counts
EDITS = 3  #: shown at most

Keys = Sequence[tuple[str, str]]
"""Keys of the configuration, as SECTION.KEY, and the texts of their values."""


def plan(
    configured: Callable[[Keys], Config], ranks: int, device: Device, json: bool, caches: bool = True
) -> int:
    """Print the verdict on the job, and edits that save memory if it does not fit well; returns 0, or 3 if it does not.

    `configured`: the configuration with further keys. `caches`: take programs that were traced before, and keep new
    ones. With these PyTorch is not imported.

    Raises:
        UserError: the configuration does not fit so many ranks, or no plan covers it.
    """
    config, rules = configured(()), rules_of(os.environ)

    def verdict_on(each: Config) -> Verdict:
        return judge(program_of(each, ranks, caches), device, ranks, rules)

    verdict = verdict_on(config)
    if not json:
        print(_head(config, ranks, device), *lines_of(verdict), *_assumptions(config), sep="\n", flush=True)
    edits: list[tuple[Keys, Verdict]] = []
    if verdict.answer != "yes":
        for keys in edits_of(config):
            try:
                edits.append((keys, verdict_on(configured(keys))))
            except UserError:  # it does not go together with another key
                continue
    edits = [(keys, other) for keys, other in edits if other.usage.reserved < verdict.usage.reserved]
    edits = sorted(edits, key=lambda edit: edit[1].usage.reserved)[:EDITS]
    if json:
        print(as_json(verdict, [(_in_words(keys), other) for keys, other in edits]))
        return verdict.status
    for i, (keys, other) in enumerate(edits):
        saved = in_gib(verdict.usage.reserved - other.usage.reserved)
        fits = {"yes": "fits", "barely": "fits barely", "no": "does not fit"}[other.answer]
        print(f"{'edits' if not i else '':8} {_in_words(keys):50} -{saved} GiB, {fits}")
    return verdict.status


def program_of(config: Config, ranks: int, caches: bool = True) -> Program:
    """The program of the configuration on GPUs, from the cache if it is there."""
    key = plan_key(config, ranks, "cuda") if caches else None
    program = cache.load(key) if key is not None else None
    if program is None:
        from shardwright.train import planning

        program = planning.program_of(config, ranks)
        if key is not None:
            cache.store(key, program)
    return program


def _head(config: Config, ranks: int, device: Device) -> str:
    train, parallel = config.train, config.parallel
    parameters = sizes_of(config.model.shape()).parameters
    return (
        f"{model_in_words(config.model.shape(), config.model.kind)} ({parameters:,} parameters)\n"
        f"{ranks} x {device.name}, {parallel.strategy}, micro-batch {train.micro_batch} x {train.seq_len:,} tokens, "
        f"{parallel.param_dtype}, {config.optimizer.name}, activations.checkpoint {config.activations.checkpoint!r}"
    )


def _assumptions(config: Config) -> Iterator[str]:
    if config.data.separates:
        yield "assumed  one document in each sample; where a GPU runs flash attention, others change little"
    if config.run.hooks:
        yield "assumed  no hooks of run.hooks"


def _in_words(keys: Keys) -> str:
    return " ".join(f"--{key} {value}" for key, value in keys)


def edits_of(config: Config) -> Iterator[Keys]:
    """Changes of a key that may save memory. The first two change no number of the run."""
    for way in {"none": ("ops", "full"), "ops": ("full",), "layers": ("full",)}.get(
        config.activations.checkpoint, ()
    ):
        yield [("activations.checkpoint", way)]
    if config.train.micro_batch > 1:
        yield [("train.micro_batch", str(config.train.micro_batch // 2))]
    if config.parallel.strategy in ("ddp", "zero1", "zero2"):
        yield [("parallel.strategy", "zero3")]
    if config.parallel.param_dtype == "float32":
        yield [("parallel.param_dtype", "bfloat16"), ("parallel.reduce_dtype", "float32")]
    if config.optimizer.name == "adamw":
        yield [("optimizer.name", "adamw8bit")]


def rules_of(variables: Mapping[str, str]) -> Rules:
    """The settings of PyTorch's allocator in environment variables.

    Raises:
        UserError: a setting that the model of the allocator does not have, or a value that PyTorch refuses.
    """
    name = next((each for each in CONF if variables.get(each)), CONF[0])
    values: dict[str, Any] = {}
    for part in filter(None, variables.get(name, "").replace(" ", "").split(",")):
        key, _, text = part.partition(":")
        try:
            field, read = _SETTINGS[key]
            values[field] = read(text)
        except (KeyError, ValueError):
            raise UserError(
                f"{name}: expected settings of {', '.join(_SETTINGS)}, each with one value, found {part!r}, which no "
                "plan covers"
            ) from None
    return Rules(**values)


def _flag(text: str) -> bool:
    return {"True": True, "False": False}[text]


_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable", _flag),
    "max_split_size_mb": ("max_split", lambda text: int(text) << 20),
    "roundup_power2_divisions": ("divisions", int),
}
