"""How a process ended, and what an error was, in a line and in full. Pure functions over text, and over an exception.

A process may end in five ways: well, by an error, by a signal, by a limit of time, or killed from outside. The line
names the first error of a chain, since the last one is often only that a CUDA graph could not be ended.
"""

from __future__ import annotations

import os
import re
import signal
import traceback
from typing import Any

LONGEST = 300
"""Characters of an error's message in a line. The full text is beside it."""
PLACES = ("shardwright", "benchmarks", "tools", "tests")
"""Folders of the project's own code."""
TELLING = re.compile(r"what\(\):|error|assert|exception|terminate called|out of memory", re.IGNORECASE)
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')


def chain_of(error: BaseException) -> list[BaseException]:
    """The error and those that led to it, the first one first."""
    chain: list[BaseException] = []
    while error not in chain:
        chain.insert(0, error)
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None:
            break
        error = before
    return chain


def described(error: BaseException) -> dict[str, str]:
    """``error``: a line with the first error of the chain, its place, and the last one. ``traceback``: all of it."""
    chain = chain_of(error)
    line = f"{_headline(chain[0])}{_place_of(chain[0])}"
    if len(chain) > 1:
        line += f", which led to {_headline(chain[-1])}{_place_of(chain[-1])}"
    return {"error": line, "traceback": "".join(traceback.format_exception(error))}


def _headline(error: BaseException) -> str:
    """The class and the message, without the C++ stack that torch appends to it."""
    message = str(error).partition("\nException raised from ")[0].partition("\nC++ CapturedTraceback")[0]
    return f"{type(error).__name__}: {shortened(' '.join(message.split()))}"


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)] or frames
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""


def is_own(path: str) -> bool:
    return "site-packages" not in path and any(f"/{place}/" in path for place in PLACES)


def memory_of(device: Any) -> dict[str, int | str]:
    """Bytes of a CUDA device as torch counts them; after some errors only that error."""
    import torch

    if device.type != "cuda":
        return {}
    try:
        stats = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        return {"error": _headline(error)}
    names = ("allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes")
    found: dict[str, int | str] = {"free": free, "total": total}
    for name in names:
        found |= {f"{name}.{when}": stats.get(f"{name}.all.{when}", 0) for when in ("current", "peak")}
    return found | {
        name: stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms", "num_device_alloc")
    }


# -- processes


def ending(status: int | None, seconds: float, output: str, at_deadline: bool = False) -> str:
    """How a process ended, from its status (None: it was ended, since it took too long) and its output.

    Nothing, if it ended well. ``at_deadline``: the time of the whole run was over, so it may not have hung.
    """
    if status == 0:
        return ""
    place = stack_place(output)
    where = f", in {place}" if place else ""
    if status is None:
        return f"{'cut by the deadline' if at_deadline else 'hung: not done'} after {seconds:.0f} s{where}"
    if status == -signal.SIGKILL:
        return "killed by SIGKILL from outside: the host may have had no memory left"
    if status < 0:
        name = next((each.name for each in signal.Signals if each == -status), f"signal {-status}")
        said = telling_line(output)
        return f"aborted by {name}{where}" + (f": {said}" if said else "")
    return f"failed with status {status}: {error_line(output) or 'no output'}"


def stack_place(output: str) -> str:
    """The innermost function of the main thread's stack that faulthandler wrote, and the innermost of the project."""
    lines = output.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Current thread")]
    starts += [i for i, line in enumerate(lines) if line.startswith("Thread 0x")][
        -1:
    ]  # the main thread is the last
    if not starts:
        return ""
    frames = []
    for line in lines[starts[0] + 1 :]:
        match = FRAME.match(line)
        if match is None:
            break
        frames.append(match)
    own = [match for match in frames if is_own(match["file"])]
    chosen = [*dict.fromkeys([*frames[:1], *own[:1]])]
    return ", called from ".join(
        f"{match['function']} ({os.path.basename(match['file'])}:{match['line']})" for match in chosen
    )


def telling_line(output: str) -> str:
    """The line in which a process that aborts says why: C++'s ``what()``, or the last one about an error."""
    before = output.partition("Fatal Python error")[0].splitlines()
    telling = [line.strip() for line in before if TELLING.search(line)]
    reasons = [line for line in telling if "what():" in line]
    chosen = (reasons or telling[-1:] or [line.strip() for line in before if line.strip()][-1:] or [""])[0]
    return shortened(chosen)


def error_line(output: str) -> str:
    """The first error that pytest or a traceback shows; else the last line.

    Python and pytest write a chain of errors in the order in which they were raised.
    """
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    of_pytest = [line[1:].strip() for line in lines if re.match(r"E\s+\S", line)]
    errors = [line for line in of_pytest if re.match(r"[\w.]*(Error|Exception|Interrupt|Failed)\b", line)]
    of_python = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]+(Error|Exception)(:|$)", line)]
    return shortened((errors or of_pytest or of_python or lines[-1:] or [""])[0])
