"""The parts of ``make gpu``, each in a process of its own: ``python -m tools.gpu_parts PART --device cuda``.

A part trains a small model and compares it with a plain one, or with the same model trained another way. Without a GPU
the engine takes the CPU for a device with streams, and graphs are those of the tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from benchmarks.gpu_rows.failures import described, is_own, memory_of
from benchmarks.gpu_rows.faults import FAULTS
from shardwright.engine.comm.page_locks import locked_zeros
from shardwright.engine.compat import storages
from shardwright.engine.tensors import ranks

ROOT = Path(__file__).resolve().parents[1]
BF16 = torch.bfloat16
STEPS = 10
FAR = {None: 1e-4, BF16: 3e-2}
"""How far losses may be from plain torch's: kernels add in other orders; bfloat16 also rounds gradients."""
Found = dict[str, Any]


class Place:
    """The device of a part, with a process group of this process alone."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        # On a GPU, units whose gathers, computation and reductions take long enough to overlap.
        self.sizes = {"layers": 6, "dim": 512, "hidden": 2048} if self.cuda else {"layers": 3}

    @contextmanager
    def joined(self) -> Iterator[None]:
        """With a process group; without a GPU the engine takes the CPU for an accelerator."""
        with ExitStack() as stack:
            if self.cuda:
                torch.cuda.set_device(self.device)
            else:
                from tests.support.stand_in import stand_in_device

                torch.set_num_threads(1)
                stack.enter_context(stand_in_device())
            store = f"file://{tempfile.mkdtemp()}/store"
            dist.init_process_group("nccl" if self.cuda else "gloo", rank=0, world_size=1, init_method=store)
            yield
            dist.destroy_process_group()  # not after an error: it may wait for a broken device

    def graphs(self, model: nn.Module) -> Any:
        """Inside, the model's steps can be captured."""
        if self.cuda:
            return nullcontext()
        from tests.engine.kit.graphs import graphs

        return graphs(model)

    def plain(self) -> nn.Module:
        from tests.engine.kit.models import build

        return build(**self.sizes).to(self.device)

    def sharded(self, compute: torch.dtype | None, memory: str = "dynamic") -> nn.Module:
        model: Any = self.plain()
        policy = sw.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for block in model.blocks:
            sw.fully_shard(block, mp_policy=policy)
        return sw.fully_shard(model, mp_policy=policy, memory=memory)

    def batch(self, step: int) -> torch.Tensor:
        from tests.engine.kit.models import tokens

        return tokens(step, 0, 0).to(self.device)

    def losses(self, model: nn.Module, graphed: bool = False) -> list[float]:
        """Train with AdamW and clipping, and return the losses. ``graphed``: forward and backward are in a graph."""
        from tests.engine.kit.models import loss_of

        def function(batch: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model(batch), batch)
            loss.backward()
            return loss.detach()

        is_sharded = isinstance(model, sw.FSDPModule)
        clip: Callable[..., Any] = sw.clip_grad_norm_ if is_sharded else nn.utils.clip_grad_norm_
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if is_sharded:
            optimizer = sw.fully_shard_optimizer(optimizer)
        seen = []
        with self.graphs(model) if graphed else nullcontext():
            step: Any = sw.GraphedStep(model, function) if graphed else function
            for number in range(STEPS):
                seen.append(step(self.batch(number)).clone())
                clip(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if self.cuda:
                    use_pinned_memory()
            if graphed and not step.captured:
                raise RuntimeError("the step was not captured in a graph")
        return [float(loss) for loss in seen]


def use_pinned_memory() -> None:
    """Take page-locked memory of many sizes, fill it and give it back. A graph whose operations read such memory that
    torch has freed since the capture (as the packing of gradients might) then computes other numbers."""
    for bits in range(6, 23):
        for _ in range(4):
            torch.empty(1 << bits, dtype=torch.uint8, pin_memory=True).fill_(255)


# -- training


def beside_plain_torch(place: Place, compute: torch.dtype | None) -> Found:
    """The losses are those of plain torch in float32."""
    with place.joined():
        expected, found = place.losses(place.plain()), place.losses(place.sharded(compute))
    far = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    if not far < FAR[compute]:
        raise AssertionError(f"losses {found}, and those of plain torch are {expected}")
    return {"found": f"losses within {far:.1e} of plain torch"}


def same_bits(place: Place, memory: str = "dynamic", graphed: bool = False, alone: bool = False) -> Found:
    """The bits of a step without planned memory and without a graph. ``alone``: axes of one rank communicate."""
    torch.use_deterministic_algorithms(True)
    ranks.LEAST_RANKS = 1 if alone else 2
    with place.joined():
        model = place.sharded(BF16, memory)
        found = place.losses(model, graphed)
        ranks.LEAST_RANKS = 2
        expected = place.losses(place.sharded(BF16))
        if alone and not model._fsdp_units(recurse=False)[0].ranks.gathers:  # type: ignore[operator]
            raise AssertionError("no unit communicates")
    if found != expected:
        raise AssertionError(f"losses {found} have other bits than {expected}")
    return {"found": f"{len(found)} losses have the same bits"}


class Reads(TorchDispatchMode):
    """Operations that make the host wait for the device, each with the place in the package."""

    NAMES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in self.NAMES:
            self.found.append(f"{func._schema.name} in {own_place()}")
        return func(*args, **(kwargs or {}))


def own_place() -> str:
    """The innermost lines of the package that are being executed."""
    frames = [f for f in traceback.extract_stack() if "shardwright/" in f.filename and is_own(f.filename)]
    return (
        " < ".join(f"{os.path.basename(f.filename)}:{f.lineno}" for f in frames[:-4:-1]) or "no line of ours"
    )


def waits(place: Place, alone: bool = False) -> Found:
    """A steady step on one rank does not make the host wait for the device. ``alone``: axes of one rank communicate."""
    from tests.engine.kit.models import loss_of

    found: list[str] = []

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            found.append(f"{str(message)[:60]} in {own_place()}")

    ranks.LEAST_RANKS = 1 if alone else 2
    with place.joined(), warnings.catch_warnings():
        model, reads = place.sharded(BF16), Reads()
        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        for number in range(5):
            batch = place.batch(number)
            is_seen = number == 4
            if place.cuda and is_seen:
                warnings.simplefilter("always")
                warnings.showwarning = note
                torch.cuda.set_sync_debug_mode("warn")
            with reads if is_seen and not place.cuda else nullcontext():
                loss_of(model(batch), batch).backward()
                sw.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if place.cuda:
                torch.cuda.set_sync_debug_mode("default")
    found += reads.found
    if found:
        raise AssertionError(f"the host waits {len(found)} times in a steady step: {'; '.join(found)}")
    return {"found": "the host never waits in a steady step"}


def failed_capture(place: Place) -> Found:
    """A step that reads a value on the host cannot be captured: one of the failures on purpose."""
    with place.joined():
        model = place.sharded(BF16)

        def function(batch: torch.Tensor) -> torch.Tensor:
            loss = model(batch).square().mean()
            loss.backward()
            return loss * loss.item()

        with place.graphs(model):
            step = sw.GraphedStep(model, function, warmup=2)
            for number in range(3):
                step(place.batch(number))
                model.zero_grad()
    return {"found": "captured"}


# -- the machine


def versions(place: Place) -> Found:
    about: Found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(0) if place.cuda else platform.machine(),
        "git": torch.version.git_version,
    }
    if place.cuda:
        about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        about["bytes"] = torch.cuda.get_device_properties(0).total_memory
    for package in ("triton", "pytest", "pydantic", "numpy"):
        about[package] = importlib.util.find_spec(package) is not None
    for program in ("nvcc", "gcc", "g++"):
        about[program] = shutil.which(program)
    return {"found": ", ".join(f"{name} {value}" for name, value in about.items())}


def exchange(place: Place) -> Found:
    """Planned memory exchanges two storages on the device, by torch's own method or else by a compiled function."""
    begun = time.monotonic()
    storages.prepare_to_swap_memory()
    seconds = time.monotonic() - begun
    one = torch.arange(64, dtype=torch.uint8, device=place.device)
    memory = storages.block_of(torch.full_like(one, 7), 64)
    storages.swap_memory(one.untyped_storage(), memory)
    if one.tolist() != [7] * 64:
        raise AssertionError("two storages did not exchange their memory")
    return {
        "found": "torch has its own" if storages.SWAPS_MEMORY else f"compiled or loaded in {seconds:.1f} s"
    }


def page_locks(place: Place) -> Found:
    """Memory of the host in an exact size is page-locked, copies of it are right, and it can be given back."""
    if not place.cuda:
        return {"found": "nothing to lock without a GPU"}
    for _ in range(2):
        memory = locked_zeros(3 << 18, torch.float32, place.device)
        if memory is None or not memory.is_pinned():
            raise AssertionError("the system locks no pages of existing memory")
        there = memory.fill_(1.0).to(place.device, non_blocking=True)
        memory.copy_(there.add_(1.0), non_blocking=True)
        torch.cuda.synchronize()
        if not memory.eq(2.0).all():
            raise AssertionError("copies to and from locked memory have other values")
        del memory
    return {"found": "3 MiB locked, copied and given back, twice"}


# -- the trainer


def trainer(place: Place) -> Found:
    """A run with asynchronous checkpoints, and its resume; on a GPU in a CUDA graph."""
    first, last = ("20", "30") if place.cuda else ("4", "6")
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        options = {
            "run.dir": run, "run.device": place.device.type, "run.sample_tokens": 0, "train.steps": first,
            "checkpoint.every": 4, "checkpoint.asynchronous": "true", "validation.every": 0,
            "parallel.engine": "shardwright", "parallel.memory": "arena",
        }  # fmt: skip
        if place.cuda:
            options |= {"train.cuda_graph": "true"}
        if importlib.util.find_spec("tensorboard") is None:
            options |= {"log.sinks": "[]"}
        command = [sys.executable, "-m", "shardwright", "train"]
        job = [str(ROOT / "examples" / "llama_debug.toml"), "--nproc", "1"]
        job += [text for key, value in options.items() for text in (f"--{key}", str(value))]
        for arguments in (job, ["--resume", str(run), "--train.steps", last]):
            done = subprocess.run([*command, *arguments], stdin=subprocess.DEVNULL)
            if done.returncode:
                raise RuntimeError(
                    f"shardwright train ended with status {done.returncode}; its output is above"
                )
        lines = (run / "metrics.jsonl").read_text().splitlines()
        losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the losses do not fall: {losses}")
    return {"found": f"{len(losses)} steps, loss {losses[0]:.2f} to {losses[-1]:.2f}, resumed after {first}"}


PARTS: dict[str, Callable[[Place], Found]] = {
    "versions": versions,
    "exchange": exchange,
    "page-locks": page_locks,
    "plain": lambda place: beside_plain_torch(place, None),
    "bf16": lambda place: beside_plain_torch(place, BF16),
    "waits": waits,
    "graph": lambda place: same_bits(place, graphed=True),
    "arena": lambda place: same_bits(place, "arena"),
    "graph-arena": lambda place: same_bits(place, "arena", graphed=True),
    "nccl": lambda place: same_bits(place, alone=True),
    "nccl-waits": lambda place: waits(place, alone=True),
    "nccl-arena": lambda place: same_bits(place, "arena", alone=True),
    "nccl-graph-arena": lambda place: same_bits(place, "arena", graphed=True, alone=True),
    "nccl-graph": lambda place: same_bits(place, graphed=True, alone=True),
    "trainer": trainer,
    "fault-capture": failed_capture,
}
for fault in ("hang", "abort", "chain"):
    PARTS[f"fault-{fault}"] = lambda place, cause=FAULTS[fault]: cause(place.device) or {}


def main() -> int:
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--result", type=Path, help="file for the result, as JSON")
    args = parser.parse_args()
    place = Place(args.device)

    def write(result: Found) -> None:
        text = json.dumps(result)
        print(text, flush=True)
        if args.result is not None:
            args.result.write_text(text)

    write({"begun": time.time()})
    try:
        write(PARTS[args.part](place))
    except Exception as error:
        write(described(error) | {"memory": memory_of(place.device)})
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a process group or a broken device may take for ever to end
