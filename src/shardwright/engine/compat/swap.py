"""Gives two storages each other's memory on torch 2.11, which has no such function: a few lines of C++, compiled once.

The library calls no name of Python, so it needs torch's headers and a C++ compiler, and neither ninja nor Python's
headers. Nothing here is used from torch 2.12 on.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SOURCE = r"""
#include <c10/core/StorageImpl.h>

#include <utility>

// Returns 0. 1: the storages are on different devices. 2: their sizes differ, and neither is empty. A view of either
// storage sees its new memory. Nothing here can throw.
extern "C" int exchange_memory(void* first, void* second) {
  auto* a = static_cast<c10::StorageImpl*>(first);
  auto* b = static_cast<c10::StorageImpl*>(second);
  if (a->device() != b->device()) {
    return 1;
  }
  const size_t bytes_of_a = a->nbytes();
  const size_t bytes_of_b = b->nbytes();
  if (bytes_of_a != bytes_of_b && bytes_of_a != 0 && bytes_of_b != 0) {
    return 2;
  }
  if (a != b) {
    c10::DataPtr memory_of_a = std::move(a->_mutable_data_ptr_no_checks());
    a->set_data_ptr_noswap(std::move(b->_mutable_data_ptr_no_checks()));
    b->set_data_ptr_noswap(std::move(memory_of_a));
    a->set_nbytes(bytes_of_b);
    b->set_nbytes(bytes_of_a);
  }
  return 0;
}
"""
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 300
"""Seconds that the compiler may take. It takes two, and more where many ranks start on few cores."""

ExchangeFunction = Callable[[int, int], int]


class MissingCompilerError(RuntimeError):
    """Raised on torch 2.11, which cannot exchange memory of storages, if the function here cannot be compiled."""


def load() -> ExchangeFunction:
    """Return the compiled function, from the user's cache if it is there.

    It takes the addresses of two ``StorageImpl``. One process compiles, and the others of this user wait for it.

    Raises:
        MissingCompilerError: there is no compiler, the compiler fails, or no folder can be written.
    """
    library = cache_folder() / f"exchange-{_key()}.so"
    try:
        return _function(library)
    except OSError:
        pass  # it is not there, or it was made on a machine with other system libraries
    with _locked(library.with_suffix(".lock")):
        try:
            return _function(library)  # another rank has compiled it meanwhile
        except OSError:
            try:
                _compile(library)
            except OSError as error:
                raise _failure(f"{library.parent} cannot be written: {error}") from error
    try:
        return _function(library)
    except OSError as error:
        raise _failure(f"the compiled library does not load: {error}") from error


def cache_folder() -> Path:
    """Return the user's cache folder for the compiled function. It exists, and nobody else may write into it.

    Raises:
        MissingCompilerError: no folder can be written.
    """
    folders = [Path(tempfile.gettempdir()) / f"shardwright-{os.getuid()}"]
    try:
        folders.insert(0, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright")
    except RuntimeError:
        pass  # a user without a home
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
        except OSError:
            continue
        # Code from a folder that others may write would run with this user's rights.
        if state.st_uid == os.getuid() and not state.st_mode & 0o022 and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise _failure(
        f"no folder for the compiled function can be written, or others may write there, too: "
        f"{' and '.join(map(str, folders))}. Set XDG_CACHE_HOME to a folder of your own"
    )


def _key() -> str:
    build = (SOURCE, torch.__version__, torch.version.git_version, sys.implementation.cache_tag)
    return hashlib.sha256(repr((*build, platform.machine())).encode()).hexdigest()[:16]


def _function(library: Path) -> ExchangeFunction:
    # PyDLL keeps the interpreter's lock, so no other Python thread sees a storage without memory.
    exchange = ctypes.PyDLL(str(library)).exchange_memory
    exchange.argtypes, exchange.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return exchange


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes of this user from compiling inside the context. The lock of a process that dies ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: several ranks compile, and the last one's file stays
        yield


def _compile(library: Path) -> None:
    compiler = _compiler()
    home = Path(torch.__file__).parent
    headers = home / "include"
    if not (headers / "c10" / "core" / "StorageImpl.h").exists():
        raise _failure(f"torch's headers are missing: there is no {headers / 'c10/core/StorageImpl.h'}")
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        source, result = Path(name) / "exchange.cpp", Path(name) / "exchange.so"
        source.write_text(SOURCE)
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        command = [*compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-w", abi, f"-I{headers}", str(source)]
        command += [f"-L{home / 'lib'}", "-lc10", "-o", str(result)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failure(f"{shlex.join(compiler)} did not run: {error}") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            first = next((line for line in lines if "error" in line), lines[0] if lines else "no output")
            raise _failure(f"{shlex.join(command)} failed: {first}")
        result.replace(library)


def _compiler() -> list[str]:
    candidates = [shlex.split(os.environ.get("CXX", "")), *([name] for name in COMPILERS)]
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    named = f"CXX={os.environ['CXX']}, " if os.environ.get("CXX") else ""
    raise _failure(f"there is no C++ compiler ({named}{', '.join(COMPILERS)}) on PATH")


def _failure(reason: str) -> MissingCompilerError:
    return MissingCompilerError(
        f"torch {torch.__version__} has no function that gives a storage other memory, and shardwright could not "
        f"compile one: {reason}. Planned memory and your own allocators need it. Install a C++ compiler such as g++ or "
        f"name one in CXX; torch's headers come with torch, in {Path(torch.__file__).parent / 'include'}. Or install "
        'torch 2.12 or later, which has the function. memory="dynamic" works without it.'
    )
