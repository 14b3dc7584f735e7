#!/usr/bin/env python3
"""From nothing to the first loss: a small Llama on text, two ranks over gloo, with each project's own commands.

    python benchmarks/first_loss.py [--rounds 1] [--only SUBSTRING] [--cache FOLDER]

Each row begins with an empty virtual environment. torch is installed into it, which is not timed. Then the commands of
the project's own README run. Timed: "install", the commands that get packages; "run", from the start of the last
command to the first line with a loss; the command is ended there. Counted: commands to type, and lines to write into a
file. The model has the sizes of the preset `debug`, and its text is the reference text of CPython as bytes.

pip has no cache, so each row fetches all its packages; --cache gives all rows one folder, and fills it in a round that
is not timed. The versions are the newest that pip finds, and are printed. A row without a loss on two ranks gets the
first error of its command instead. A round runs all rows, and the next one begins with the next row. Results go to
benchmarks/results. The machine needs a package index that has torch in this version, git, make, and 4 GB on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOSS = re.compile(r"\bloss:?\s+\d")
ALONE = re.compile(r"\bon 1 ranks")
"""The output of a script that was to train on two ranks and does not."""
PATIENCE = 900.0
"""Seconds for one command."""
Figures = dict[str, Any]

MODEL = """
import torch
from pydoc_data.topics import topics
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=448, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)
text = torch.tensor(list("\\n".join(topics.values()).encode()))
samples = text[: len(text) // 256 * 256].view(-1, 256)
loader = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True)
"""

FABRIC = (
    MODEL
    + """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="STRATEGY")
fabric.launch()
model = LlamaForCausalLM(config)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
loader = fabric.setup_dataloaders(loader)
for step, ids in enumerate(loader):
    loss = model(input_ids=ids, labels=ids).loss
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(f"step {step + 1} loss {loss.item():.4f} on {fabric.world_size} ranks", flush=True)
"""
)

ACCELERATE = (
    MODEL
    + """
from accelerate import Accelerator
accelerator = Accelerator(CPU)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, ids in enumerate(loader):
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step + 1} loss {loss.item():.4f} on {accelerator.num_processes} ranks", flush=True)
"""
)


@dataclass(frozen=True)
class Way:
    """How one project gets to its first loss."""

    name: str
    commands: tuple[str, ...]
    """Shell commands; the last one trains."""
    package: str
    """The package whose version is printed."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of what the user writes."""
    note: str = ""

    @property
    def lines(self) -> int:
        return sum(bool(line.strip()) for text in self.files.values() for line in text.splitlines())


def ways() -> list[Way]:
    clone = f"git clone -q {ROOT} shardwright"
    titan = "torchrun --nproc_per_node=2 -m torchtitan.train --module llama3 --config llama3_debugmodel"
    return [
        Way(
            "Shardwright",
            (
                clone,
                "pip install './shardwright[train]'",
                "shardwright train shardwright/examples/llama_debug.toml --nproc 2",
            ),
            "shardwright",
            note="sharded, ZeRO-3",
        ),
        Way(
            "Shardwright, make train",
            (clone, "make -C shardwright train NPROC=2"),
            "shardwright",
            note="sharded, ZeRO-3; make also installs torch and the tools of development into its own .venv",
        ),
        *(
            Way(
                f"Lightning Fabric, {strategy}",
                ("pip install lightning transformers", "python train.py"),
                "lightning",
                {"train.py": FABRIC.replace("STRATEGY", strategy)},
            )
            for strategy in ("fsdp", "ddp")
        ),
        *(
            Way(
                f"Accelerate, {name}",
                ("pip install accelerate transformers", f"{launch} train.py"),
                "accelerate",
                {"train.py": ACCELERATE.replace("CPU", options)},
            )
            for name, launch, options in (
                ("FSDP2", "accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2", ""),
                ("its launcher", "accelerate launch --cpu --num_processes 2", ""),
                ("DDP", "torchrun --nproc_per_node 2", "cpu=True"),
            )
        ),
        Way(
            "torchtitan",
            ("pip install torchtitan", titan),
            "torchtitan",
            note="its clone, which has the script run_train.sh and the text, is not on the package index",
        ),
        Way("torchtitan, with triton", ("pip install torchtitan triton", titan), "torchtitan"),
    ]


class Failed(RuntimeError):
    """A command ended without what it should give."""


def measure(way: Way, torch: str, cache: Path | None) -> Figures:
    """Seconds of the parts of a way, or why it has no loss."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for file, text in way.files.items():
            (folder / file).write_text(text)
        environment = _environment(folder, cache)
        _run(f"{sys.executable} -m venv venv && pip install -q {torch}", folder, environment)
        figures: Figures = {}
        try:
            begun = time.perf_counter()
            for command in way.commands[:-1]:
                _run(command, folder, environment)
            figures["install"] = time.perf_counter() - begun
            figures["version"] = _version(way.package, folder, environment)
            begun = time.perf_counter()
            figures["line"] = _run(way.commands[-1], folder, environment, until=LOSS)
            figures["run"] = time.perf_counter() - begun
            figures["seconds"] = figures["install"] + figures["run"]
        except Failed as error:
            figures["reason"] = str(error)
        return figures


def _environment(folder: Path, cache: Path | None) -> dict[str, str]:
    """Without the caller's packages and caches."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    pip = {"PIP_NO_CACHE_DIR": "1"} if cache is None else {"PIP_CACHE_DIR": str(cache)}
    return {
        **kept,
        **pip,
        "PATH": f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _version(package: str, folder: Path, environment: Mapping[str, str]) -> str:
    code = f"from importlib import metadata; print(metadata.version({package!r}))"
    command = [str(folder / "venv" / "bin" / "python"), "-c", code]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    return done.stdout.strip()


def _run(
    command: str, folder: Path, environment: Mapping[str, str], until: re.Pattern[str] | None = None
) -> str:
    """The first line that matches `until`, after which the command is ended. Raises Failed."""
    process = subprocess.Popen(
        command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    timer = _Timer(process, PATIENCE)
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if until is not None and until.search(line):
                if ALONE.search(line):
                    raise Failed(f"{command}: each process trains alone: {line.strip()}")
                return line.strip()
        status = process.wait()
    finally:
        timer.end()
    if status or until is not None:
        raise Failed(f"{command}: {_reason(lines) or f'status {status}'}")
    return ""


class _Timer:
    """Ends a command and all that it started, at the latest after some seconds."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        import threading

        self._process = process
        self._timer = threading.Timer(seconds, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        self._timer.cancel()
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def _reason(lines: list[str]) -> str:
    """The first error of a program: the ranks' own comes before the launcher's."""
    errors = [line for line in lines if re.match(r"(\[?rank\d+\]?:? ?)?[\w.]*(Error|Exception)\b:?", line)]
    return (errors or [line for line in lines if line.strip()] or [""])[-1 if not errors else 0].strip()


def result(way: Way, rounds: list[Figures]) -> Figures:
    found: Figures = {
        "row": way.name, "note": way.note, "version": rounds[-1].get("version", ""), "commands": way.commands,
        "lines": way.lines, "rounds": rounds,
    }  # fmt: skip
    reasons = [each["reason"] for each in rounds if "reason" in each]
    if reasons:
        return found | {"reason": reasons[0]}
    return found | {
        name: statistics.median(each[name] for each in rounds) for name in ("install", "run", "seconds")
    }


def table(results: list[Figures]) -> str:
    base = next((each["seconds"] for each in results if "seconds" in each), None)
    text = [f"{'':28s}{'commands':>9s}{'lines':>7s}{'install':>9s}{'run':>8s}{'seconds':>9s}{'ratio':>7s}"]
    for each in results:
        name = f"{each['row']} {each['version']}".strip()
        line = f"{name:28s} {len(each['commands']):8d}{each['lines']:7d}"
        if "reason" in each:
            text.append(f"{line}   no loss: {each['reason']}")
        else:
            ratio = each["seconds"] / base
            text.append(f"{line}{each['install']:9.1f}{each['run']:8.1f}{each['seconds']:9.1f}{ratio:7.2f}")
    text.append("")
    for each in results:
        text.append(f"{each['row']}{': ' if each['note'] else ''}{each['note']}")
        text += [f"    {command.replace(str(ROOT), 'URL')}" for command in each["commands"]]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="rows whose name has this")
    parser.add_argument("--cache", type=Path, help="folder for pip's cache, the same for all rows")
    parser.add_argument("--torch", default=f"torch=={metadata.version('torch').partition('+')[0]}")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of results")
    args = parser.parse_args()
    chosen = [way for way in ways() if args.only.lower() in way.name.lower()]
    facts = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, "
        f"Python {platform.python_version()}, {args.torch} there before; "
        f"pip {'without a cache' if args.cache is None else 'with a warm cache'}; medians of {args.rounds} rounds"
    )
    print(facts, flush=True)
    found: dict[str, list[Figures]] = {way.name: [] for way in chosen}
    for round_ in range(args.rounds + (args.cache is not None)):
        turn = round_ % max(1, len(chosen))
        for way in chosen[turn:] + chosen[:turn]:
            figures = measure(way, args.torch, args.cache)
            print(f"{way.name}: {json.dumps(figures)}", file=sys.stderr, flush=True)
            if round_ or args.cache is None:
                found[way.name].append(figures)
    results = [result(way, found[way.name]) for way in chosen]
    text = table(results)
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"first-loss-torch-{'.'.join(args.torch.partition('==')[2].split('.')[:2])}-cpu"
    (args.out / f"{stem}.txt").write_text(f"{facts}\n\n{text}\n")
    print(f"written to {args.out / stem}.txt")


if __name__ == "__main__":
    main()
