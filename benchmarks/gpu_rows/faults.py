"""Failures on purpose, to see how each is reported: `--inject`. Each is what a GPU would do, without needing one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import torch


def hang(device: torch.device) -> None:
    """Wait for ever, as for a collective that another rank does not issue."""
    threading.Event().wait()


def abort(device: torch.device) -> None:
    """End as a process does whose thread throws an error of CUDA that nobody catches."""
    print("terminate called after throwing an instance of 'c10::AcceleratorError'", file=sys.stderr)
    print("  what():  CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
    os.abort()


def chain(device: torch.device) -> None:
    try:
        raise ValueError("the first error of the chain")
    except ValueError as error:
        raise RuntimeError("the last error of the chain") from error


def capture(device: torch.device) -> None:
    """Read a value inside a capture. The end of the capture then fails, too, which hides the reason."""
    if device.type == "cuda":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(1, device=device).item()
    try:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


FAULTS: dict[str, Callable[[torch.device], None]] = {
    "hang": hang,
    "abort": abort,
    "chain": chain,
    "capture": capture,
}
EXPECTED: dict[str, tuple[str, ...]] = {
    "hang": ("hung: not done after", "hang (faults.py:"),
    "abort": ("aborted by SIGABRT", "abort (faults.py:", "an illegal memory access was encountered"),
    "chain": ("ValueError: the first error of the chain", "RuntimeError: the last error of the chain"),
    "capture": ("not permitted when stream is capturing",),
}
"""Parts of the line that reports each."""
