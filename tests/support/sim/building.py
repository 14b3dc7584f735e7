"""Compiles the simulated device once for all processes and sessions, by a call of the compiler.

The library is stored under a hash of its sources, torch's version and the compiler. Processes that come at the same
time wait for the one that compiles.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
FLAGS = ["-O0", "-w", "-std=c++20", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=sim_extension"]


def compiler() -> str | None:
    """The C++ compiler: ``CXX``, or the first that is found."""
    return next(
        (
            path
            for name in (os.environ.get("CXX"), "g++", "c++", "clang++")
            if name and (path := shutil.which(name))
        ),
        None,
    )


def reason_to_skip() -> str | None:
    """Why the device cannot be built here; None: it can."""
    if compiler() is None:
        return "the simulated device needs a C++ compiler: g++, clang++ or the one that CXX names"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated device needs Python's headers"
    return None


@functools.cache
def library() -> Path:
    """The path of the compiled library."""
    program = compiler()
    assert program is not None, reason_to_skip()
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    python = sysconfig.get_config_var("SOABI")
    digest = hashlib.sha256(f"{FLAGS} {torch.__version__} {python} {version}".encode())
    sources = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    for source in sources:
        digest.update(source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"shardwright-sim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{digest.hexdigest()[:20]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(program, path, lock.fileno())
    return path


def _compile(program: str, path: Path, lock: int) -> None:
    """The compiler has the lock, too: if this process is killed, others wait for its library and use it."""
    from torch.utils.cpp_extension import include_paths, library_paths

    command = ["sh", "-c", '"$@" -o "$0.part" && mv "$0.part" "$0"', str(path), program, *FLAGS]
    command += [f"-I{folder}" for folder in (*include_paths(), sysconfig.get_paths()["include"])]
    command += [str(SOURCES / "device.cpp"), *(f"-L{folder}" for folder in library_paths())]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True, pass_fds=[lock])
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[-8000:]}")
