"""CONFIG.toml as a whole: its sections, and how values of several sections must fit together.

`load` reads files, and `mistakes` words the errors. Other rooms act on the values. Nothing here imports torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationInfo, model_validator

from shardwright.train.config.catalog.kinds import kind_of
from shardwright.train.config.catalog.optimizers import optimizers
from shardwright.train.config.catalog.presets import HybridConfig
from shardwright.train.config.dims import ParallelDims
from shardwright.train.config.sections.activations import ActivationConfig
from shardwright.train.config.sections.base import Section
from shardwright.train.config.sections.checkpoint import CheckpointConfig
from shardwright.train.config.sections.data import DataConfig
from shardwright.train.config.sections.fault import FaultConfig
from shardwright.train.config.sections.finetune import FinetuneConfig, conflict
from shardwright.train.config.sections.log import LogConfig
from shardwright.train.config.sections.model import ModelConfig
from shardwright.train.config.sections.optimizer import OptimizerConfig
from shardwright.train.config.sections.parallel import ParallelConfig
from shardwright.train.config.sections.run import RunConfig
from shardwright.train.config.sections.train import TrainConfig
from shardwright.train.config.sections.validation import ValidationConfig


class Config(Section):
    """A whole training job: what CONFIG.toml holds."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    activations: ActivationConfig = ActivationConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault: FaultConfig = FaultConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _sections_fit(self, info: ValidationInfo) -> Config:
        shape = self.model.shape()
        longest = shape.max_seq_len
        if longest is not None and self.train.seq_len > longest:
            own = "max_seq_len" in kind_of(shape).numbers
            most = f"model.max_seq_len = {longest}" if own else f"{longest}, the positions that the model has"
            raise ValueError(f"train.seq_len: expected at most {most}, found {self.train.seq_len}")
        if isinstance(shape, HybridConfig) and shape.mtp_pattern and self.train.seq_len < 2:
            raise ValueError("train.seq_len: expected at least 2 with a model.mtp_pattern, found 1")
        start = info.context or {}
        dims = ParallelDims.near(self.parallel, start.get("ranks", 1))
        problem = self.train.batch_problem(
            dims.data, tensor=dims.sharing_data, resumes=start.get("resumes", False)
        )
        if problem:
            raise ValueError(problem)
        if self.train.cuda_graph and self.parallel.engine != "shardwright":
            raise ValueError(
                f"train.cuda_graph: expected false with parallel.engine {self.parallel.engine!r}, found true; only "
                "steps of the engine shardwright can be captured"
            )
        self._check_rewinds()
        self._check_keep_best()
        if self.optimizer.in_backward:
            self._check_in_backward()
        if problem := conflict(self.finetune, self.train, self.parallel):
            raise ValueError(problem)
        if self.train.cuda_graph and self.parallel.offload != "none":
            raise ValueError(
                f"parallel.offload: expected 'none' with train.cuda_graph, found {self.parallel.offload!r}; the host "
                "takes part in a step with offload"
            )
        optimizer = optimizers.get(self.optimizer.name)
        if self.parallel.grad_dtype not in ("auto", "float32") and not optimizer.any_gradients:
            raise ValueError(
                f"parallel.grad_dtype: expected 'auto' with optimizer.name {self.optimizer.name!r}, which takes only "
                f"float32 gradients, found {self.parallel.grad_dtype!r}; use adamw8bit for other dtypes"
            )
        if self.activations.checkpoint == "budget" and self.train.compile != "inductor":
            raise ValueError(
                "activations.checkpoint: expected train.compile = 'inductor' with 'budget', found "
                f"{self.train.compile!r}; only the compiler knows which activations a block keeps. Or use 'ops'"
            )
        if self.train.compile != "none" and self.parallel.engine == "fsdp1":
            raise ValueError(
                f"train.compile: expected 'none' with parallel.engine 'fsdp1', found {self.train.compile!r}; its hooks "
                "inside blocks break the graph"
            )
        if self.train.compile != "none" and self.parallel.engine == "fsdp2" and self.parallel.tensor > 1:
            raise ValueError(
                "train.compile: expected 'none' with parallel.engine 'fsdp2' and parallel.tensor = "
                f"{self.parallel.tensor}, found {self.train.compile!r}; the embedding would get no gradient: the "
                "first compiled block gets the embedding's output before its communication is over, and torch then "
                "drops its graph"
            )
        if self.train.float8 != "none":
            self._check_float8()
        if optimizer.whole and self.parallel.engine in ("fsdp1", "fsdp2"):
            raise ValueError(
                f"optimizer.name: {self.optimizer.name} needs whole {optimizer.whole}, and only the engine "
                "shardwright supports that on shards; expected 'adamw' with parallel.engine "
                f"{self.parallel.engine!r}, found {self.optimizer.name!r}"
            )
        if self.validation.every and not self.data.validates:
            raise ValueError(
                "validation.every: expected 0, since data.validation_fraction = 0 leaves no text to validate on, "
                f"found {self.validation.every}; or set data.validation_source"
            )
        return self

    @property
    def gathers_float8(self) -> bool:
        """Whether weights are gathered in float8, which takes weights of a class that sees to it."""
        return self.train.float8 == "tensorwise" and self.parallel.engine in ("shardwright", "fsdp2")

    def _check_float8(self) -> None:
        """Refuse what float8 products cannot be combined with."""
        recipe, tokens = self.train.float8, self.train.micro_batch * self.train.seq_len
        if tokens % 16:
            raise ValueError(
                f"train.float8: expected 'none' with {tokens} tokens in a micro-batch, found {recipe!r}; the number "
                "of tokens must be a multiple of 16"
            )
        rules: list[tuple[str, Any, Any]] = [
            ("parallel.param_dtype", self.parallel.param_dtype, "bfloat16"),
            ("parallel.tensor", self.parallel.tensor, 1),
            ("parallel.expert", self.parallel.expert, 1),
            ("train.cuda_graph", self.train.cuda_graph, False),
        ]
        if self.gathers_float8:
            rules += [
                ("optimizer.name", self.optimizer.name, "adamw"),
                ("parallel.offload", self.parallel.offload, "none"),
                ("parallel.full_precision_in_eval", self.parallel.full_precision_in_eval, False),
            ]
        for key, value, expected in rules:
            if value != expected:
                raise ValueError(
                    f"{key}: expected {expected!r} with train.float8 = {recipe!r}, found {value!r}"
                )
        if self.parallel.engine == "fsdp1":
            raise ValueError(
                f"train.float8: expected 'none' with parallel.engine 'fsdp1', found {recipe!r}; its weights are flat"
            )

    def _check_rewinds(self) -> None:
        for key in ("on_non_finite", "on_spike"):
            if getattr(self.fault, key) == "rewind" and not self.checkpoint.every:
                raise ValueError(
                    f"fault.{key}: expected another value than 'rewind' with checkpoint.every = 0; there is no "
                    "checkpoint to go back to"
                )
            if (
                getattr(self.fault, key) == "rewind"
                and self.fault.rewind_steps >= self.train.steps
                and not self.train.epochs
            ):
                raise ValueError(
                    f"fault.rewind_steps: expected less than train.steps = {self.train.steps} with fault.{key} = "
                    f"'rewind', found {self.fault.rewind_steps}; no checkpoint would be old enough"
                )
            if getattr(self.fault, key) == "skip" and self.optimizer.in_backward:
                raise ValueError(
                    f"fault.{key}: expected 'rewind' or the default with optimizer.in_backward, found 'skip'; the "
                    "weights are already updated when the loss of all ranks is known"
                )

    def _check_keep_best(self) -> None:
        name, every = self.checkpoint.keep_best, self.validation.every
        if not name.startswith("validation_"):
            return
        if not every or self.checkpoint.every % every:
            raise ValueError(
                f"checkpoint.keep_best: expected a validation at each checkpoint for {name!r}, found "
                f"validation.every = {every} and checkpoint.every = {self.checkpoint.every}; make checkpoint.every a "
                "multiple of validation.every"
            )

    def _check_in_backward(self) -> None:
        if self.parallel.engine != "shardwright":
            raise ValueError(
                f"optimizer.in_backward: expected false with parallel.engine {self.parallel.engine!r}, found true; "
                "only the engine shardwright steps in backward"
            )
        if self.train.max_norm > 0:
            raise ValueError(
                f"train.max_norm: expected 0 with optimizer.in_backward, found {self.train.max_norm}; the norm of "
                "all gradients is known only when backward is over, and the first gradients are already used and "
                "freed then"
            )
        if self.train.cuda_graph:
            raise ValueError(
                "train.cuda_graph: expected false with optimizer.in_backward, found true; the optimizer steps "
                "outside the graph"
            )

    def resolved(self) -> Config:
        """The same job, independent of presets and of the current folder: what a run keeps of its configuration."""
        return self.model_copy(update={"model": self.model.resolved(), "data": self.data.resolved()})

    def to_toml(self) -> str:
        """The configuration as a TOML file that loads back equal. Keys left to the preset are left out."""
        tables = []
        for name, section in self:
            lines = [
                f"{key} = {toml_value(value)}"
                for key, value in section.model_dump(exclude_none=True).items()
                if not (name == "train" and key == "steps" and self.train.epochs)  # they follow from the data
            ]
            tables.append("\n".join([f"[{name}]", *lines]))
        return "\n\n".join(tables) + "\n"


def toml_value(value: object) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's strings are TOML's basic strings, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        items = ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise TypeError(f"expected a value TOML can hold, found {value!r}")


def value_of(text: str, takes_text: bool) -> Any:
    """The value of a text in TOML. A text that is no TOML value is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    if len(parsed) > 1 or (takes_text and not isinstance(value, str | list)):
        return text  # A text key takes what was typed even where it reads as a number or a date.
    return value
