"""The section `[run]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardwright.train.config.catalog.hooks import hooks as named_hooks
from shardwright.train.config.catalog.registry_names import OneOf
from shardwright.train.config.sections.base import Section


class RunConfig(Section):
    """The name, folder, seed and device of the run."""

    name: str = Field(
        default="llama-debug", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$",
        description="Name of the run: letters, digits, '.', '_' and '-'. Part of the default folder's name.",
    )  # fmt: skip
    dir: str = Field(
        default="", description="Folder of the run. Empty: runs/NAME-TIME below the current folder."
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=2**32 - 1,
        description=(
            "Seed of the initial weights, of the sample order, and of the generators of torch, Python and NumPy."
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Device of the computation. auto: GPUs if the machine has any, else the CPU.",
    )
    bind_cpus: Literal["auto", "off"] = Field(
        default="auto",
        description=(
            "auto: a rank with a GPU runs on the CPU cores of the GPU's NUMA node, among those that it may use, where "
            "/sys tells them. off: on any cores."
        ),
    )
    plan: Literal["auto", "warn", "refuse", "off"] = Field(
        default="auto",
        description=(
            "What becomes of a job that does not fit into the memory of its GPUs by `shardwright plan`. warn: a line "
            "says so, and the job runs, unless its parameters, gradients and optimizer state alone need more than a "
            "GPU has. refuse: it does not start. off: no plan is made. auto: warn on GPUs, off on the CPU."
        ),
    )
    plan_device: str = Field(
        default="",
        description=(
            "Device of the plan, as after --on of `shardwright plan`, without a number. Empty: this machine's GPU."
        ),
    )
    hooks: Annotated[tuple[Annotated[str, OneOf(named_hooks)], ...], Field(strict=False)] = Field(
        default=(),
        description=(
            'Hooks into training, such as ["my_hooks:Accuracy"]: classes of your own that add metrics, skip or stop '
            "steps, or change rates."
        ),
    )
    sample_tokens: int = Field(
        default=160, ge=0,
        description="Tokens that the model writes after the last step. Each token needs one forward pass. 0: none.",
    )  # fmt: skip
