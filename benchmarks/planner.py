"""Times, memory and sizes of plans: `shardwright plan` for Llamas of 8B, 70B and 405B parameters.

    python benchmarks/planner.py
    python benchmarks/planner.py --only 8B

Each figure is of a process of its own, from its start to its end: seconds of CPU time, and the most resident memory.

whole:    every layer is traced
composed: three short models are traced, and the plan of the long one is made from these
cached:   the same plan again, from the cache
next:     CPU seconds of a plan of the same model with other settings, in the process of the plan before (no start)
events:   of the program; file: its size in the cache
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "llama_8b.toml"
#: The preset, ranks, and keys beside.
ROWS: list[tuple[str, int, list[str]]] = [
    ("8B", 8, []),
    ("70B", 64, ["--train.global_batch", "64"]),
    ("405B", 16384, ["--train.global_batch", "16384", "--activations.checkpoint", "full"]),
]
WHOLE = """
import sys
from shardwright.cli.program import main
from shardwright.train.planning import programs
programs.composed_program = lambda *_: None
sys.exit(main(sys.argv[1:]))
"""
PLAN = "import sys; from shardwright.cli.program import main; sys.exit(main(sys.argv[1:]))"
NEXT = """
import sys, time
from pathlib import Path
from shardwright.train.config import load_config
from shardwright.train.planning.programs import program_of
path, ranks, *words = sys.argv[1:]
keys = [(key.removeprefix("--"), value) for key, value in zip(words[::2], words[1::2])]
program_of(load_config(Path(path), keys, ranks=int(ranks)), int(ranks))
started = time.process_time()
keys.append(("parallel.reshard_after_forward", "always"))
program = program_of(load_config(Path(path), keys, ranks=int(ranks)), int(ranks))
print(time.process_time() - started, len(program.events))
"""


def run(code: str, arguments: list[str], cache: Path) -> tuple[float, float, str]:
    """CPU seconds and MiB of a process, and its output."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=out, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        text = out.read()
    if os.waitstatus_to_exitcode(status) not in (0, 3):
        raise SystemExit(f"{' '.join(arguments)} ended with status {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="plan this model alone")
    only = parser.parse_args().only
    print(
        f"torch {version('torch')}, Python {platform.python_version()}, {platform.machine()}, CPU seconds | MiB"
    )
    head = ("model", "GPUs", "layers", "whole", "composed", "cached", "next", "events", "file")
    widths = (5, 6, 6, 13, 13, 11, 5, 7, 8)
    print("  ".join(each.rjust(width) for each, width in zip(head, widths, strict=True)))
    from shardwright.train.config.shapes.presets import PRESETS

    for preset, ranks, keys in ROWS:
        if only not in ("", preset):
            continue
        keys = ["--model.preset", preset, *keys]
        arguments = ["plan", str(CONFIG), "--on", f"{ranks}xh100", "--no-edits", *keys]
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder)
            whole = run(WHOLE, [*arguments, "--no-cache"], cache)
            composed = run(PLAN, arguments, cache)
            cached = run(PLAN, arguments, cache)
            again = run(NEXT, [str(CONFIG), str(ranks), *keys], cache)[2].split()
            size = max(each.stat().st_size for each in cache.rglob("*.json"))
        figures = [f"{seconds:.1f} | {mebibytes:.0f}" for seconds, mebibytes, _ in (whole, composed, cached)]
        row = (
            preset,
            str(ranks),
            str(PRESETS[preset].n_layers),
            *figures,
            f"{float(again[0]):.2f}",
            again[1],
            f"{size / 2**20:.1f} MiB",
        )
        print("  ".join(each.rjust(width) for each, width in zip(row, widths, strict=True)), flush=True)


if __name__ == "__main__":
    main()
