#!/usr/bin/env python3
"""All that only a GPU shows, in one command of under nine minutes: `make gpu`, or `PYTHONPATH=src python tools/gpu.py`.

It runs the tests marked ``gpu``, and then the rows of ``benchmarks/gpu.py`` that train a Llama of 150M: losses, time,
memory, graphs and streams of shardwright beside plain torch and FSDP2. Results are in ``build/gpu``: ``tests.txt``, and
the text and JSON of the benchmark. It needs torch and no installation; without pytest the tests are left out, and
tests.txt says so. ``make bench-gpu`` has the larger models.

``--device cpu`` tries the same with a tiny model.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

from benchmarks import gpu  # noqa: E402

#: Files with tests that need a GPU. Others may need packages that such a machine does not have.
TESTS = ["tests/engine/test_gpu.py", "tests/engine/test_sharing_a_device.py", "tests/init/test_devices.py"]
#: Those of the trainer, which needs pydantic.
TRAINER_TESTS = [
    "tests/train/data/test_loader.py",
    "tests/train/models/test_documents.py",
    "tests/train/models/test_documents_transformers.py",
]
SECONDS = {"tests": 300, "steps": 200}


def run_tests(device: str) -> tuple[bool, str]:
    """Whether the tests marked ``gpu`` passed, and what pytest printed."""
    if importlib.util.find_spec("pytest") is None:
        return True, "left out: this Python has no pytest\n"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-o",
        "minversion=6",
        "-p",
        "no:cacheprovider",
    ]
    files = TESTS + (TRAINER_TESTS if importlib.util.find_spec("pydantic") is not None else [])
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    try:
        done = subprocess.run(
            [*command, *files],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS["tests"],
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return False, f"{text}\nnot done after {SECONDS['tests']} s\n"
    passed = done.returncode == 0 or (device == "cpu" and done.returncode == 5)  # 5: nothing was collected
    return passed, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu: this Python's torch finds no CUDA device. --device cpu runs without one.", file=sys.stderr
        )
        return 2
    passed, printed = run_tests(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tests.txt").write_text(printed)
    print("\n".join(["tests marked gpu:", *printed.splitlines()[-12:], ""]), flush=True)
    options = ["--device", args.device, "--out", str(args.out), "--seconds", str(SECONDS["steps"])]
    status = gpu.main([*options, "--only", "150M", "--no-profile"])
    return status if passed else 1


if __name__ == "__main__":
    sys.exit(main())
