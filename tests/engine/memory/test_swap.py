"""The compiled exchange of two storages' memory: torch's own semantics, one compilation, and errors that help.

On torch 2.12 and later torch's function is hidden from processes that train with the compiled one.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwright.engine.compat import swap as _swap

ROOT = Path(__file__).resolve().parents[3]
SIZES = [0, 1, 16, 4096]
#: Makes this torch look like 2.11 to what is imported afterwards.
WITHOUT_TORCH_S = """
import torch

class Hidden:
    def __get__(self, one, owner):
        raise AttributeError("_swap_data_ptr_")

torch.UntypedStorage._swap_data_ptr_ = Hidden()
"""


def has_compiler() -> bool:
    try:
        return bool(_swap._compiler())
    except _swap.MissingCompilerError:
        return False


needs_compiler = pytest.mark.skipif(
    not has_compiler() or torch.__version__ >= "2.14",
    reason="needs a C++ compiler, and headers of torch that are C++17: those up to 2.13",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def exchange(cache: Path, monkeypatch: pytest.MonkeyPatch) -> _swap.ExchangeFunction:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return _swap.load()


def run(code: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def storage_of(size: int, first: int) -> tuple[torch.UntypedStorage, torch.Tensor]:
    tensor = (torch.arange(size) + first).to(torch.uint8)
    return tensor.untyped_storage(), tensor


@needs_compiler
@pytest.mark.parametrize(("one", "two"), [*itertools.product(SIZES, SIZES)])
def test_memory_and_sizes_change_places(exchange: _swap.ExchangeFunction, one: int, two: int) -> None:
    """Views see it. Other sizes than equal ones and nothing are refused, and nothing has changed then."""
    (a, of_a), (b, of_b) = storage_of(one, 3), storage_of(two, 101)
    addresses = a.data_ptr(), b.data_ptr()
    content = bytes(a), bytes(b)
    code = exchange(a._cdata, b._cdata)
    assert code == (0 if one == two or not one or not two else 2)
    swapped = code == 0
    assert (b.data_ptr(), a.data_ptr()) == addresses if swapped else (a.data_ptr(), b.data_ptr()) == addresses
    assert (bytes(b), bytes(a)) == content if swapped else (bytes(a), bytes(b)) == content
    if swapped and one == two:
        assert bytes(of_a.tolist()) == content[1] and bytes(of_b.tolist()) == content[0]


@needs_compiler
def test_a_storage_and_itself(exchange: _swap.ExchangeFunction) -> None:
    storage, tensor = storage_of(16, 5)
    address = storage.data_ptr()
    assert exchange(storage._cdata, storage._cdata) == 0
    assert storage.data_ptr() == address and tensor.tolist() == [*range(5, 21)]


@needs_compiler
def test_two_devices_are_refused(exchange: _swap.ExchangeFunction) -> None:
    one, two = torch.empty(4).untyped_storage(), torch.empty(4, device="meta").untyped_storage()
    assert exchange(one._cdata, two._cdata) == 1
    assert one.nbytes() == 16 and one.data_ptr()


@needs_compiler
def test_memory_is_freed_with_the_storage_that_has_it(exchange: _swap.ExchangeFunction) -> None:
    """DLPack's memory belongs to a tensor, which lives as long as a storage has its memory."""
    import gc
    import weakref

    memory = torch.arange(64, dtype=torch.uint8)
    seen = weakref.ref(memory.untyped_storage())
    block = torch.from_dlpack(memory).untyped_storage()
    empty = torch.UntypedStorage(0)
    assert exchange(empty._cdata, block._cdata) == 0
    del memory, block
    gc.collect()
    assert bytes(empty) == bytes(range(64))
    del empty
    gc.collect()
    assert seen() is None


TRAINING = """
import copy, sys, tempfile
import torch.distributed as dist
import shardwright as sw
from shardwright.engine.compat import storages
from tests.engine.kit.models import build, loss_of, tokens

assert storages.swap_memory.__module__ == storages.__name__ and hasattr(storages, "_exchange")
dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tempfile.mkdtemp()}/store")


class Own:
    def __init__(self):
        self.leases = 0

    def lease(self, slab):
        self.leases += 1
        return torch.empty(slab.nbytes + 16, dtype=torch.uint8)

    def release(self, slab, memory):
        return None


def losses(model, optimizer):
    found = []
    for step in range(4):
        batch = tokens(step, 0, 0)
        loss = loss_of(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


plain = build(layers=3)
expected = losses(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
policy = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for memory in ("dynamic", "double_buffer", "max_pool", "arena", Own()):
    model = build(layers=3)
    for block in model.blocks:
        sw.fully_shard(block, mp_policy=policy)
    sw.fully_shard(model, mp_policy=policy, memory=memory)
    found = losses(model, sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01)))
    if memory == "dynamic":
        assert max(abs(a - b) for a, b in zip(found, expected)) < 3e-2, (found, expected)  # bfloat16
        expected = found
    assert found == expected, (memory, found, expected)
    if memory in ("double_buffer", "max_pool", "arena"):
        planned, dynamic = sw.memory_report(model).leases
        assert planned > 0, (memory, planned, dynamic)
assert memory.leases > 10
"""


@pytest.mark.extensive("each kind of memory")
@needs_compiler
def test_every_kind_of_memory_trains_with_it(cache: Path) -> None:
    done = run(WITHOUT_TORCH_S + TRAINING, cache)
    assert done.returncode == 0, done.stderr


def load_and_call() -> None:
    storage = torch.empty(1).untyped_storage()
    assert _swap.load()(storage._cdata, storage._cdata) == 0


@pytest.mark.extensive("it compiles, and four processes start")
@needs_compiler
def test_one_process_compiles_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that counts its calls. Four processes begin at once; a fifth needs no compiler any more."""
    calls, script = tmp_path / "calls", tmp_path / "counting"
    script.write_text(f'#!/bin/sh\necho call >> {calls}\nexec {" ".join(_swap._compiler())} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(script))
    processes = [multiprocessing.get_context("fork").Process(target=load_and_call) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0] * 4
    assert calls.read_text() == "call\n"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX")
    load_and_call()
    assert [path.suffix for path in sorted((tmp_path / "shardwright").iterdir())] == [".lock", ".so"]


@needs_compiler
def test_a_library_that_does_not_load_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = _swap.cache_folder() / f"exchange-{_swap._key()}.so"
    library.write_bytes(b"\x7fELF, half of it")
    load_and_call()


FAILURES = {
    "no compiler": ({"CXX": "", "PATH": "/nowhere"}, "there is no C++ compiler (c++, g++, clang++) on PATH"),
    "a compiler that is not there": (
        {"CXX": "icpx -O2", "PATH": "/nowhere"},
        "there is no C++ compiler (CXX=icpx -O2, c++, g++, clang++) on PATH",
    ),
    "a compiler that fails": ({"CXX": "false"}, "failed: no output"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_without_a_compiler_the_error_names_the_ways_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, reason = FAILURES[name]
    for key, value in {**environment, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(_swap.MissingCompilerError) as caught:
        _swap.load()
    message = str(caught.value)
    for part in (reason, f"torch {torch.__version__}", "g++", "CXX", "headers", "torch 2.12", "include"):
        assert part in message, (part, message)


def test_missing_headers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(_swap.MissingCompilerError, match=r"headers are missing: there is no .*StorageImpl"):
        _swap.load()


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library from there would run with this user's rights."""
    for name, variable in (("cache", "XDG_CACHE_HOME"), ("temporary", "TMPDIR")):
        monkeypatch.setenv(variable, str(tmp_path / name))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    first = _swap.cache_folder()
    assert first == tmp_path / "cache" / "shardwright" and stat.S_IMODE(first.stat().st_mode) == 0o700
    first.chmod(0o777)
    second = _swap.cache_folder()
    assert second == tmp_path / "temporary" / f"shardwright-{os.getuid()}"
    second.chmod(0o775)
    with pytest.raises(_swap.MissingCompilerError, match="Set XDG_CACHE_HOME to a folder of your own"):
        _swap.cache_folder()


REFUSALS = """
import tempfile
import torch.distributed as dist
import shardwright as sw
from tests.engine.kit.models import build

dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tempfile.mkdtemp()}/store")


class Own:
    def lease(self, slab): return None
    def release(self, slab, memory): return None


for memory in ("double_buffer", "max_pool", "arena", Own()):
    model = build()
    try:
        sw.fully_shard(model, memory=memory)
    except RuntimeError as error:
        assert "there is no C++ compiler" in str(error), error
    else:
        raise AssertionError(memory)
    assert not isinstance(model, sw.FSDPModule)
sw.fully_shard(model, memory="dynamic")
"""


@pytest.mark.extensive("programs of their own")
def test_without_a_compiler_every_kind_of_planned_memory_raises_before_it_shards(tmp_path: Path) -> None:
    done = run(WITHOUT_TORCH_S + REFUSALS, tmp_path, CXX="", PATH="/nowhere")
    assert done.returncode == 0, done.stderr
