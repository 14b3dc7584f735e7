"""Loads hostile checkpoints, each in a child process that may do nothing but read the checkpoint.

``python -m tests.checkpoint.kit.children --seed 7 --count 1000`` prints the cases that break a rule as JSON. A child is
forked from this process, which has torch. It ends if it executes, connects, imports, or opens another file; its memory
and time are limited.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardwright as sw
from tests.checkpoint.kit.hostile import Sources, make

SECONDS = 5  #: of the processor, for one load
PATIENCE = 60  #: seconds, also on a busy machine
MEMORY = 768 << 20  #: bytes of address space that a load may take beyond those of its parent
_FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link",
    "os.symlink", "os.truncate", "os.chmod", "os.putenv", "shutil.rmtree", "ctypes.dlopen", "ctypes.dlsym", "exec",
    "compile", "marshal.loads", "os.kill", "os.unlink",
)  # fmt: skip


class Run:
    """A small training run, and what a load may change of it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.total = torch.zeros(3)
        self.model(torch.randn(5, 3)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def save(self, place: Path) -> None:
        extra = {
            "schedule": self.schedule,
            "total": self.total + 1,
            "step": [1, {"a": (2.5, None)}],
            "pair": [torch.ones(2), 3],
        }
        sw.save_checkpoint(place, self.model, self.optimizer, extra=extra)

    def save_by_torch(self, place: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=place, no_dist=True)

    def load(self, place: Path, ours: bool) -> None:
        extra = {"schedule": self.schedule, "total": self.total} if ours else {}
        sw.load_checkpoint(place, self.model, self.optimizer, extra=extra)

    def values(self, generators: bool) -> str:
        values: list[Any] = [
            {name: each.tolist() for name, each in self.model.state_dict().items()},
            [
                {key: each.tolist() if torch.is_tensor(each) else each for key, each in state.items()}
                for state in self.optimizer.state.values()
            ],
            [{**group, "params": len(group["params"])} for group in self.optimizer.param_groups],
            self.schedule.state_dict(),
            self.total.tolist(),
        ]
        if generators:
            values += [torch.get_rng_state().tolist(), random.getstate()]
        return repr(values)


def watch(place: Path) -> list[str]:
    """Note what this process does beyond reading below ``place``, and raise an error for it."""
    acts: list[str] = []
    allowed = str(place)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        bad = event in _FORBIDDEN
        if event == "open":
            path, _, flags = arguments
            text = os.fsdecode(path) if isinstance(path, (str, bytes)) else ""
            bad = not isinstance(path, int) and not (text == allowed or text.startswith(allowed + "/"))
            bad = bad or bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        elif event == "import":
            bad = arguments[0] not in sys.modules
        if bad:
            acts.append(f"{event} {arguments!r}"[:200])
            raise PermissionError(acts[-1])

    sys.addaudithook(hook)
    return acts


def outcome(place: Path, ours: bool, must_equal: bool, expected: str, run: Run) -> dict[str, Any]:
    """Load in this process. Returns what happened, with "broken" rules."""
    acts = watch(place)
    before = run.values(True)
    broken: list[str] = []
    message = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.load(place, ours)
    except (ValueError, FileNotFoundError) as error:
        message = f"{type(error).__name__}: {error}"
        if "\n" in message or len(message) > 1000:
            broken.append("the error is not one short line")
        if run.values(True) != before:
            broken.append("an error, and yet something changed")
        if isinstance(error, UnicodeError):
            broken.append("an error of another kind")
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        broken.append("an error of another kind")
    else:
        if must_equal and run.values(False) != expected:
            broken.append("other values were loaded")
    if acts:
        broken.append(f"forbidden: {acts[0]}")
    return {"message": message and message[:600], "broken": broken}


def in_child(place: Path, ours: bool, must_equal: bool, expected: str, run: Run) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            signal.alarm(PATIENCE)
            result = outcome(place, ours, must_equal, expected, run)
            os.write(writing, json.dumps(result).encode("utf-8", "replace"))
        finally:
            os._exit(0)
    os.close(writing)
    data = b""
    while more := os.read(reading, 1 << 16):
        data += more
    os.close(reading)
    _, status, used = os.wait4(child, 0)
    if not data:
        signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        name = signal.Signals(signal_number).name if signal_number else "no result"
        return {"message": None, "broken": [f"the process ended: {name}"]}
    result: dict[str, Any] = json.loads(data)
    result["memory"] = used.ru_maxrss
    return result


def listing(folder: Path) -> list[Any]:
    found = []
    for each in sorted(folder.rglob("*")):
        info = each.lstat()
        found.append((str(each), info.st_mode, info.st_size, info.st_mtime_ns))
    return found


def run_cases(seed: int, numbers: range, folder: Path, verbose: bool = False) -> dict[str, Any]:
    """Make and load cases. Returns how they ended, and those that broke a rule."""
    sources = Sources(folder / "ours", folder / "other", folder / "foreign")
    saved = Run(1)
    saved.save(sources.ours)
    saved.save_by_torch(sources.foreign)
    Run(2).save(sources.other)
    expected = {}
    for ours, source in ((True, sources.ours), (False, sources.foreign)):
        first = Run(3)
        first.load(source, ours)  # also imports all that a load needs
        expected[ours] = first.values(False)
        again = Run(3)
        assert again.values(False) != expected[ours]
    run = Run(3)
    run.values(True)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the whole heap
    gc.disable()
    counts: dict[str, int] = {}
    broken = []
    for number in numbers:
        inner = folder / f"{number}"
        inner.mkdir()
        case = make(seed, number, inner / "c", sources)
        before = listing(inner)
        ours = case.name.startswith("ours")
        result = in_child(inner / "c", ours, case.must_equal, expected[ours], run)
        if listing(inner) != before:
            result["broken"].append("files changed")
        ended = "error" if result["message"] else "loaded"
        counts[f"{case.name} {ended}"] = counts.get(f"{case.name} {ended}", 0) + 1
        if verbose:
            print(number, case.name, result, flush=True)
        if result["broken"]:
            broken.append({"number": number, "case": case.name, **result})
        shutil.rmtree(inner)
    return {"counts": dict(sorted(counts.items())), "broken": broken}


def run_into(file: Path, seed: int, numbers: range) -> None:
    """Run cases, and write the result as JSON."""
    folder = file.with_suffix("")
    folder.mkdir()
    file.write_text(json.dumps(run_cases(seed, numbers, folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(options.first, options.first + options.count)
        json.dump(run_cases(options.seed, numbers, Path(folder), options.verbose), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
