"""The machine, the versions and the settings, for a bug report, and the problems that follow from them.

The standard library is enough: a broken installation is what people ask about. torch is imported if that works.
Nothing here measures anything, or names the host, the user or their folders.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import shardwright
from shardwright.cli.doctor.findings import aligned, error_text, size, without_names
from shardwright.cli.doctor.memory import (
    LEAST_SHARED,
    host_memory,
    memory_text,
    shared_memory,
    shared_text,
)

PREFIXES = (
    "CUDA_",
    "GLOO_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "SHARDWRIGHT_",
    "TORCH",
    "TP_",
)
"""Prefixes of environment variables that change what torch or this package does."""
NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
OTHERS = ("numpy", "safetensors", "transformers", "triton")
"""Packages that change what torch does, or that people use beside this one."""


def examine() -> dict[str, Any]:
    """Everything that is known, as what JSON can hold. Sizes are bytes. Takes about 3 s: it imports torch."""
    torch = _torch()
    report: dict[str, Any] = {
        "shardwright": {"version": shardwright.__version__, "installed": _version("shardwright")},
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "platform": platform.platform(),
        "torch": torch,
        "extras": _extras(),
        "other_packages": {name: _version(name) for name in OTHERS},
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count(), "usable_cores": _usable_cores()},
        "memory": host_memory(),
        "processes": {
            "start_methods": multiprocessing.get_all_start_methods(),
            "share_memory": _processes_share_memory(),
        },
        "shared_memory": shared_memory(),
        "environment": _environment(),
    }
    report["problems"] = _problems(report)
    return report


def text_of(report: dict[str, Any]) -> str:
    """Return the report for people, one fact a line."""
    torch, cpu = report["torch"], report["cpu"]
    lines = [
        ("shardwright", report["shardwright"]["version"]),
        ("python", f"{report['python']['version']} ({report['python']['implementation']})"),
        ("platform", report["platform"]),
        ("torch", _torch_text(torch)),
    ]
    if torch["version"]:
        lines += [("engine", torch["engine_error"] or "loads"), ("devices", _devices_text(torch))]
        backends = torch["backends"]
        missing = [name for name, there in backends.items() if not there]
        there = ", ".join(name for name in backends if name not in missing) or "none"
        lines.append(("backends", there + (f" (not {', '.join(missing)})" if missing else "")))
    for extra, packages in report["extras"].items():
        lines.append((f"extra {extra}", _packages_text(packages)))
    lines += [
        ("other packages", _packages_text(report["other_packages"])),
        ("cpu", f"{cpu['name']}; {cpu['usable_cores']} of {cpu['cores']} cores may be used"),
        ("memory", memory_text(report["memory"])),
        ("processes", _processes_text(report["processes"])),
        ("shared memory", shared_text(report["shared_memory"])),
    ]
    settings = [f"{name}={value}" for name, value in report["environment"].items()]
    lines += _rows("environment", settings or ["no variable that changes torch or shardwright is set"])
    lines += _rows("problems", report["problems"] or ["none found"])
    return aligned(lines)


def _rows(name: str, values: list[str]) -> list[tuple[str, str]]:
    return [("" if index else name, value) for index, value in enumerate(values)]


# ------------------------------------------------------------------------------
# The machine and its packages


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[str]:
    try:
        return metadata.requires("shardwright") or []
    except metadata.PackageNotFoundError:
        return []  # run from the source tree


def _extras() -> dict[str, dict[str, str | None]]:
    """Return the packages of each extra, and the version that is installed."""
    extras: dict[str, dict[str, str | None]] = {}
    for line in _requirements():
        match = re.match(r"([\w.-]+).*extra == [\"'](\w+)[\"']", line)
        if match and match[1] != "shardwright":
            extras.setdefault(match[2], {})[match[1]] = _version(match[1])
    return extras


def _torch() -> dict[str, Any]:
    """torch's version, devices and backends; where it cannot be imported, why not."""
    facts: dict[str, Any] = {"version": None, "error": None}
    try:
        import torch
        import torch.distributed as dist

        facts |= {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    except Exception as error:
        # A missing library is an OSError, a torch.py of the user's an AttributeError.
        return facts | {"error": error_text(error)}
    facts |= {"threads": torch.get_num_threads(), "driver": _driver(), "nccl": None}
    facts["devices"], facts["device_error"] = [], None
    try:
        if torch.cuda.is_available():
            facts["devices"] = [_device(torch, index) for index in range(torch.cuda.device_count())]
    except Exception as error:
        facts["device_error"] = error_text(error)
    there = dist.is_available()
    facts["backends"] = {
        name: there and bool(getattr(dist, f"is_{name}_available")())
        for name in ("gloo", "nccl", "mpi", "ucc")
        if hasattr(dist, f"is_{name}_available")
    }
    if facts["backends"].get("nccl"):
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["engine_error"] = facts["memory_error"] = None
    try:
        from shardwright.engine import fully_shard  # noqa: F401  # its modules look private names of torch up
        from shardwright.engine.compat import prepare_to_swap_memory
    except Exception as error:
        return facts | {"engine_error": error_text(error)}
    try:
        prepare_to_swap_memory()
    except RuntimeError as error:
        facts["memory_error"] = error_text(error)
    return facts


def _device(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cores": properties.multi_processor_count,
    }


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None where its program is missing or finds no device."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def _cpu_name() -> str:
    try:
        names = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = None
    return names[1] if names else platform.processor() or platform.machine()


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _processes_share_memory() -> str | None:
    """None if another process of this user sees memory that this one shares; else why not.

    CPU ranks of one host agree on collectives and run them by such memory, see ``engine/comm/pages.py``. Without it
    they use the network.
    """
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    code = "import mmap,sys; f=open(sys.argv[1],'r+b'); mmap.mmap(f.fileno(),4)[:]=b'seen'"
    file = os.memfd_create("shardwright")
    try:
        os.ftruncate(file, 4)
        path = f"/proc/{os.getpid()}/fd/{file}"
        command = [sys.executable, "-I", "-S", "-c", code, path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode:
            return without_names((done.stderr.strip().splitlines() or ["the process died"])[-1])
        with mmap.mmap(file, 4) as memory:
            return None if memory[:] == b"seen" else "nothing arrived"
    except (OSError, subprocess.TimeoutExpired) as error:
        return error_text(error)
    finally:
        os.close(file)


def _environment() -> dict[str, str]:
    chosen = {name: value for name, value in os.environ.items() if name in NAMES or name.startswith(PREFIXES)}
    secret = re.compile("KEY|PASSWORD|SECRET|TOKEN")
    return {
        name: "(hidden)" if secret.search(name) else without_names(chosen[name]) for name in sorted(chosen)
    }


# ------------------------------------------------------------------------------
# Findings, and their words


def _problems(report: dict[str, Any]) -> list[str]:
    torch, shared, processes = report["torch"], report["shared_memory"], report["processes"]
    code, installed = report["shardwright"]["version"], report["shardwright"]["installed"]
    problems = []
    if installed is None:
        problems.append(
            "shardwright is not installed, it runs from its source tree: the extras are not known"
        )
    elif installed != code:
        problems.append(
            f"shardwright {code} runs, and {installed} is installed; install it again, or look at PYTHONPATH"
        )
    if torch["version"] is None:
        bound = next((line for line in _requirements() if re.match(r"torch\b(?!.*extra)", line)), "torch")
        problems.append(
            f"torch cannot be imported ({torch['error']}); install it: python -m pip install '{bound}'"
        )
    else:
        if torch["engine_error"]:
            problems.append(f"the engine does not load: {torch['engine_error']}")
        if torch["memory_error"]:
            problems.append(f"planned memory does not work: {torch['memory_error']}")
        if torch["device_error"]:
            problems.append(f"torch finds devices and cannot use them: {torch['device_error']}")
        elif torch["driver"] and not torch["devices"]:
            built = f"for CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA"
            problems.append(
                f"the machine has an NVIDIA GPU (driver {torch['driver']}), and torch {torch['version']}, built "
                f"{built}, finds none; install a torch for this driver, or look at CUDA_VISIBLE_DEVICES"
            )
    several = len(torch.get("devices", ())) > 1
    if shared["error"]:
        problems.append(
            f"{shared['path']} cannot be written: {shared['error']}; NCCL and data loaders need it"
        )
    elif shared["free"] < LEAST_SHARED[several]:
        problems.append(
            f"{shared['path']} has {size(shared['free'])} free, which is less than {size(LEAST_SHARED[several])}: "
            "NCCL and data loaders can fail; give the container more (--shm-size)"
        )
    if processes["share_memory"]:
        problems.append(
            f"processes share no memory ({processes['share_memory']}); ranks on gloo agree and communicate over the "
            "network, which is slower"
        )
    return problems


def _torch_text(torch: dict[str, Any]) -> str:
    if torch["version"] is None:
        return f"missing: {torch['error']}"
    if torch["cuda"]:
        built = (
            f"CUDA {torch['cuda']}, NCCL {torch['nccl'] or 'missing'}, driver {torch['driver'] or 'missing'}"
        )
    else:
        built = f"ROCm {torch['hip']}" if torch["hip"] else "built for the CPU"
    return f"{torch['version']}, {built}, {torch['threads']} threads"


def _devices_text(torch: dict[str, Any]) -> str:
    devices = torch["devices"]
    if not devices:
        return "none, ranks train on the CPU"
    kinds = [
        f"{device['name']} ({size(device['memory'])}, capability {device['capability']})"
        for device in devices
    ]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def _packages_text(packages: dict[str, str | None]) -> str:
    missing = [name for name, version in packages.items() if version is None]
    there = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    if not missing:
        return there
    return f"{there or 'none'} (not {', '.join(missing)})"


def _processes_text(processes: dict[str, Any]) -> str:
    methods = ", ".join(processes["start_methods"])
    return f"start by {methods}; memory is shared: {'no' if processes['share_memory'] else 'yes'}"
