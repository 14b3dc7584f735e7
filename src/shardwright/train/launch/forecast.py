"""The plan of a job's memory beside its run, for `[run] plan`. Another process makes it, while the ranks start.

Nothing here imports what makes plans. The end of a run is kept beside its plan, for `shardwright plan --accuracy`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

import shardwright
from shardwright.planner import Residual, append
from shardwright.train.config import Config
from shardwright.train.config.conflicts.jobs import PLANNED
from shardwright.train.config.conflicts.table import refuse
from shardwright.train.errors import UserError
from shardwright.train.launch.environment import path_to_ourselves
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.writing import writing

SECONDS = 3.0  #: that a start waits for a plan
LOCAL = "local"  #: the GPU of this machine
GIB = 1 << 30


def forecast(config: Config, folder: RunFolder, ranks: int, device: str) -> Forecast | None:
    """Begin to plan a job that computes on `device`, cpu or cuda. None: `run.plan` asks for none."""
    with writing(folder.logs):
        for file in (plan_file(folder), shortage_file(folder)):
            file.unlink(missing_ok=True)  # of an earlier start
    way = config.run.plan
    if way == "off" or (way == "auto" and device == "cpu"):
        return None
    if device == "cpu" and not config.run.plan_device:
        raise UserError(
            f"run.plan: expected 'auto' or 'off' on the CPU, found {way!r}; or set run.plan_device"
        )
    try:
        refuse(PLANNED, config)
    except UserError as error:
        if way == "refuse":
            raise UserError(
                f"run.plan: there is no plan of this job: {error}; set run.plan to 'warn'"
            ) from error
        return None
    return Forecast(config, folder, ranks)


class Forecast:
    """A plan that another process makes."""

    def __init__(self, config: Config, folder: RunFolder, ranks: int) -> None:
        self._refuses = config.run.plan == "refuse"
        self._config_file, self._file = folder.logs / "plan.toml", plan_file(folder)
        self._device = f"{ranks}x{config.run.plan_device or LOCAL}"
        self._ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        with writing(folder.logs):
            folder.logs.mkdir(parents=True, exist_ok=True)
            self._config_file.write_text(config.to_toml(), encoding="utf-8")
        with self._file.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shardwright", *self._arguments, "--json", "--no-edits"],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, **path_to_ourselves()},
            )  # fmt: skip

    @property
    def _arguments(self) -> list[str]:
        return ["plan", str(self._config_file), "--on", self._device]

    def check(self) -> None:
        """Wait a moment for the plan, with `refuse` until it is there. A later one is printed when it comes.

        Raises:
            UserError: the job cannot fit; with `refuse` also if it does not, or if there is no plan.
        """
        try:
            self._process.wait(None if self._refuses else SECONDS)
        except subprocess.TimeoutExpired:
            threading.Thread(target=self._report, daemon=True).start()
            return
        figures = self._figures()
        if figures is None:
            if self._refuses:
                raise UserError(
                    f"run.plan: there is no plan of this job: {self._error()}; set run.plan to 'warn'"
                )
            return
        if figures["fits"] == "no" and (self._refuses or _cannot_fit(figures)):
            raise UserError(f"run.plan: {self._in_words(figures)}")
        if shortage := self._shortage_of_host(figures):
            raise UserError(f"run.plan: {shortage}")
        self._warn(figures)

    def stop(self) -> None:
        """End the process, if it still runs."""
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _report(self) -> None:
        self._process.wait()
        if (figures := self._figures()) is not None:
            self._warn(figures)

    def _warn(self, figures: Mapping[str, Any]) -> None:
        problems = [self._in_words(figures)] if figures["fits"] != "yes" else []
        for problem in filter(None, [*problems, self._shortage_of_host(figures)]):
            print(f"warning: {problem}", file=sys.stderr, flush=True)

    def _shortage_of_host(self, figures: Mapping[str, Any]) -> str:
        """Empty if the ranks' parts of the host's memory fit into it."""
        need, memory = self._ranks_here * sum(figures["host"].values()), psutil.virtual_memory().total
        if need <= memory:
            return ""
        parts = ", ".join(f"{name} {nbytes / GIB:.2f}" for name, nbytes in figures["host"].items())
        return (
            f"this job needs {need / GIB:.2f} GiB of the host's memory, by its plan, and this machine has "
            f"{memory / GIB:.2f}: each of its {self._ranks_here} ranks here {parts}. Use less of activations.offload "
            "or parallel.offload, a smaller train.micro_batch, or fewer ranks on this machine"
        )

    def _figures(self) -> dict[str, Any] | None:
        return read_plan(self._file) if self._process.returncode in (0, 3) else None

    def _error(self) -> str:
        assert self._process.stderr is not None
        text = self._process.stderr.read().strip()
        return text.splitlines()[-1].removeprefix("error: ") if text else "it was ended"

    def _in_words(self, figures: Mapping[str, Any]) -> str:
        does = "does not fit" if figures["fits"] == "no" else "barely fits"
        return (
            f"this job {does} into the memory of its GPUs, by its plan: {plan_in_words(figures)}. Changes that save "
            f"memory: shardwright {' '.join(self._arguments)}"
        )


def _cannot_fit(figures: Mapping[str, Any]) -> bool:
    """Return whether tensors whose sizes are known exactly need more than the whole device."""
    return sum(figures["exact"].values()) > figures["device_bytes"]


def plan_file(folder: RunFolder) -> Path:
    return folder.logs / "plan.json"


def read_plan(file: Path) -> dict[str, Any] | None:
    """Return the figures of a plan; None if it was not made, or not to its end."""
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return figures if isinstance(figures, dict) else None


def plan_in_words(figures: Mapping[str, Any]) -> str:
    """Return the figures of a plan, in a line."""
    return (
        f"{figures['reserved_bytes'] / GIB:.2f} GiB reserved of {figures['room_bytes'] / GIB:.2f}, the most in "
        f"{figures['peak']['text']}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host had no memory left. CUDA, NCCL and PyTorch's allocator of the host's memory
    have no class for it."""
    text = isinstance(error, RuntimeError) and (
        "out of memory" in str(error) or "can't allocate memory" in str(error)
    )
    return text or isinstance(error, torch.OutOfMemoryError)


def shortage_file(folder: RunFolder) -> Path:
    """Return lines of a rank that has run out of memory: the owners of its memory, and settings that need less."""
    return folder.logs / "out_of_memory.txt"


def note_out_of_memory(folder: RunFolder) -> list[str]:
    """Keep that a job has run out of memory beside its plan. Returns lines: the plan, if there is one, and those that
    the rank has left."""
    figures = read_plan(plan_file(folder))
    lines = []
    if figures is not None:
        _keep(figures, None)
        lines.append(f"the plan of this job has {plan_in_words(figures)}")
    with suppress(OSError, ValueError):
        lines += shortage_file(folder).read_text(encoding="utf-8").splitlines()
    return lines


def note_reserved(folder: RunFolder, reserved: int) -> list[str]:
    """Keep the bytes that a job has reserved beside its plan, and return both as a line of the summary. Nothing without
    a plan."""
    figures = read_plan(plan_file(folder))
    if figures is None or not reserved:
        return []
    _keep(figures, reserved)
    planned = figures["reserved_bytes"]
    return [
        f"  plan            {planned / GIB:.2f} GiB, {planned / reserved - 1:+.1%} beside the peak memory"
    ]


def _keep(figures: Mapping[str, Any], reserved: int | None) -> None:
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    device, ranks, fits, planned = (figures[key] for key in ("device", "ranks", "fits", "reserved_bytes"))
    append(Residual(ended, device, ranks, fits, planned, reserved, version("torch"), shardwright.__version__))
