"""Shardwright beside its peers: a training step on two CPU ranks, one thread each, every engine in the same run.

    make bench                                          # all of it
    make bench ARGS="--shapes deep --only FSDP,zero3"   # one model, some engines; FSDP2 is always among them
    make bench ARGS="--parts memory"                    # time, memory, host
    python -m benchmarks.peers --tiny                   # in seconds, to see whether it works

A step is forward, backward, clipping of the gradients' norm to 1.0, AdamW and the end of the gradients, in float32, one
sequence a rank, each engine with functions of its own and with its defaults. "plain torch" communicates nothing.

* off: the largest relative difference of a loss or a norm of the first steps from one process that trains on the data
  of all ranks. An engine that is further away than the tolerance gets no figure.
* time: every round times some steps of every engine, one engine after another, and begins with the next one. Printed:
  the median step (the slower rank's time) and the ratio to FSDP2 in the same round: median, least and largest round.
* memory: bytes of all live tensors of rank 0, between steps and at most within one. "arithmetic": parameters and
  AdamW's moments, and within a step the larger of activations and gradients, sharded as the ZeRO stage says.
* host: the processor's time of a step on torch's fake process group, which sends nothing, less the plain model's, over
  the number of units.

Peers that are not installed or do not run get the reason instead. Results go to benchmarks/results as text, JSON and,
with matplotlib, a picture.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)  # before torch is imported, here and in the processes

import torch  # noqa: E402

import shardwright as sw  # noqa: E402
from benchmarks.peers import agreement, picture, tables  # noqa: E402
from benchmarks.peers.contenders import BASE, CONTENDERS, PLAIN  # noqa: E402
from benchmarks.peers.crew import ContenderFailed, Crew  # noqa: E402
from benchmarks.peers.shapes import DEFAULT_SHAPES, HOST_SHAPE, HOST_UNITS, SHAPES, Shape  # noqa: E402
from benchmarks.peers.worker import Job  # noqa: E402

RANKS = 2
Found = dict[str, Any]


def machine() -> Found:
    versions = {}
    for package in sorted({c.package for c in CONTENDERS.values()}):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions | {"torch": torch.__version__, "shardwright": sw.__version__},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def start(name: str, shape: Shape, args: argparse.Namespace, folder: Path, backend: str = "gloo") -> Crew:
    return Crew(Job(name, shape, RANKS, args.adamw, backend), folder)


def agreeing(
    shape: Shape, args: argparse.Namespace, folder: Path
) -> tuple[dict[str, Crew], dict[str, Found]]:
    """The contenders whose numbers are right, and what is known of all of them."""
    expected = agreement.reference(shape, RANKS)
    crews: dict[str, Crew] = {}
    found: dict[str, Found] = {}
    for name in args.contenders:
        crew, found[name] = start(name, shape, args, folder), {}
        try:
            ranks = crew.ask("numbers")
        except ContenderFailed as error:
            found[name]["reason"] = str(error)
            continue
        losses = [[loss for loss, _ in step] for step in zip(*ranks, strict=True)]
        norms = [norm for _, norm in ranks[0]]
        off = agreement.difference(agreement.Numbers(losses, norms), expected)
        found[name]["off"] = off
        if off > agreement.TOLERANCE and CONTENDERS[name].communicates:
            found[name]["reason"] = f"its numbers are {off:.1e} away, tolerated are {agreement.TOLERANCE:.0e}"
            crew.end()
            continue
        crews[name] = crew
    return crews, found


def time_rounds(crews: dict[str, Crew], found: dict[str, Found], args: argparse.Namespace) -> None:
    """Adds the time of a step and its ratio to what is known of each contender."""
    rounds: dict[str, list[list[float]]] = {name: [] for name in crews}
    for number in range(args.rounds):
        names = list(crews)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            try:
                rounds[name].append(tables.rank_maximum(crews[name].ask("wall", args.steps)))
            except ContenderFailed as error:
                found[name]["reason"] = str(error)
                del crews[name]
    for name in crews:
        found[name]["rounds_ms"] = rounds[name]
        found[name]["ms"] = statistics.median(ms for each in rounds[name] for ms in each)
        if BASE in crews:
            found[name]["ratio"] = tables.ratios(rounds[name], rounds[BASE])


def measure_memory(
    shape: Shape, names: list[str], found: dict[str, Found], args: argparse.Namespace, folder: Path
) -> None:
    """Adds bytes; in fresh processes, whose allocator is watched from before the model is built."""
    from benchmarks.peers import memory  # needs what the tests need, time and host do not

    elements, kept = memory.elements(shape), memory.activations(shape)
    for name in names:
        crew = start(name, shape, args, folder)
        try:
            rest, peak = crew.ask("memory")[0]
        except ContenderFailed as error:
            found[name]["reason"] = f"memory: {error}"
            continue
        crew.end()
        least_rest, least_peak = memory.least(CONTENDERS[name].stage, elements, kept, RANKS)
        found[name]["memory"] = {
            "rest": rest,
            "peak": peak,
            "least_rest": least_rest,
            "least_peak": least_peak,
        }


def measure_shape(shape: Shape, args: argparse.Namespace, folder: Path) -> Found:
    crews, found = agreeing(shape, args, folder)
    if "time" in args.parts and crews:
        time_rounds(crews, found, args)
    names = list(crews)
    for crew in crews.values():
        crew.end()
    if "memory" in args.parts:
        measure_memory(shape, names, found, args, folder)
    return {"title": shape.title, "contenders": found}


def measure_host(names: list[str], args: argparse.Namespace, folder: Path) -> Found:
    """Measure contenders whose numbers were right on gloo: on the fake group they mean nothing."""
    found: dict[str, Found] = {name: {} for name in names}
    crews = {name: start(name, HOST_SHAPE, args, folder, "fake") for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(args.rounds + 1):
        for name in list(crews):
            try:
                if number == 0:
                    crews[name].ask("numbers")  # builds and warms up
                else:
                    times[name] += crews[name].ask("host", 10)[0]
            except ContenderFailed as error:
                found[name]["reason"] = str(error)
                del crews[name]
    quartile = {name: statistics.quantiles(times[name], n=4)[0] for name in crews}
    for crew in crews.values():
        crew.end()
    for name in crews:
        if PLAIN in crews and name != PLAIN:
            found[name]["us"] = (quartile[name] - quartile[PLAIN]) * 1e3 / HOST_UNITS
    if "us" in found.get(BASE, {}):
        for each in found.values():
            if "us" in each:
                each["ratio"] = each["us"] / found[BASE]["us"]
    return found


def text_of(results: Found) -> str:
    found = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"{found['processor']}, {found['cores']} cores (load {found['load']} at the start), Python {found['python']}",
        versions,
        f"{RANKS} CPU ranks with one thread each, float32, AdamW ({results['adamw']}), "
        f"{results['rounds']} rounds of {results['steps']} steps",
        "collectives: gloo, and memory that the two processes share for Shardwright's rows without gloo",
    ]
    for shape in results["shapes"].values():
        contenders = shape["contenders"]
        lines += ["", f"{shape['title']}", ""]
        if "time" in results["parts"]:
            lines += [tables.time_table(contenders), ""]
        if "memory" in results["parts"]:
            lines += [tables.memory_table(contenders), ""]
        lines += tables.reasons(contenders)
    if results.get("host"):
        lines += ["", f"{HOST_SHAPE.title}, fake process group of {RANKS} ranks", ""]
        lines += [tables.host_table(results["host"]), "", *tables.reasons(results["host"])]
    return "\n".join([*lines, "", f"{results['seconds']:.0f} s"]) + "\n"


def write(results: Found, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "peers.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "peers.txt").write_text(text_of(results))
    picture.draw(results, out / "peers.png")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(DEFAULT_SHAPES), help=", ".join(SHAPES))
    parser.add_argument("--only", default="", help="parts of the names of engines, separated by commas")
    parser.add_argument("--parts", default="time,memory,host")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of each engine in a round")
    parser.add_argument("--adamw", choices=("default", "foreach", "fused"), default="default")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--tiny", action="store_true", help="the smallest model, two rounds of one step")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.shapes, args.rounds, args.steps = "tiny", 2, 1
    args.shapes, args.parts = args.shapes.split(","), args.parts.split(",")
    if unknown := sorted({*args.shapes} - {*SHAPES}) + sorted({*args.parts} - {"time", "memory", "host"}):
        parser.error(
            f"expected shapes of {', '.join(SHAPES)} and parts of time, memory, host; found {unknown[0]!r}"
        )
    wanted = [text.strip().lower() for text in args.only.split(",")]
    args.contenders = [
        name for name in CONTENDERS if name in (PLAIN, BASE) or any(text in name.lower() for text in wanted)
    ]
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parsed(arguments)
    torch.set_num_threads(1)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.peers.worker"])
    begun = time.monotonic()
    results: Found = {"machine": machine(), "shapes": {}}
    results |= {key: getattr(args, key) for key in ("adamw", "parts", "rounds", "steps")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for key in args.shapes:
            results["shapes"][key] = measure_shape(SHAPES[key], args, folder)
            results["seconds"] = time.monotonic() - begun
            write(results, args.out)  # after each model: whoever ends this early has the others
        if "host" in args.parts:
            shapes = results["shapes"].values()
            names = [n for n in args.contenders if all("reason" not in s["contenders"][n] for s in shapes)]
            results["host"] = measure_host(names, args, folder)
            results["seconds"] = time.monotonic() - begun
            write(results, args.out)
    print(text_of(results), end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
