#!/usr/bin/env python3
"""All that only a GPU shows, in one command of under nine minutes: `make gpu`, or `PYTHONPATH=src python tools/gpu.py`.

It runs the tests marked ``gpu`` and then trains a Llama of 150M parameters for some steps as a plain model, on torch's
FSDP2 and on this engine (over NCCL, one process for each GPU): losses, time of a step, active and reserved memory.
Results are in ``build/gpu/results.json`` and ``results.txt``. It needs torch and no installation; without pytest the
tests are left out, and the results say so.

``--device cpu`` rehearses the same on two gloo ranks with a tiny model.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from shardwright._torch import memory_can_be_swapped  # noqa: E402

#: Files with tests that need a GPU. Others may need packages that such a machine does not have.
TESTS = ["tests/engine/test_gpu.py", "tests/engine/test_sharing_a_device.py", "tests/init/test_devices.py"]
ENGINES = ["plain", "fsdp2", "shardwright", *(["shardwright arena"] if memory_can_be_swapped else [])]
SECONDS = {"tests": 300, "engine": 50}  # 300 + 4 * 50 s is the most that this takes
LOSSES_AGREE = 2e-2  # bfloat16 forwards: ranks sum gradients in another order than one process does


def run_tests(device: str) -> dict[str, Any]:
    """What pytest said of the tests marked ``gpu``."""
    if importlib.util.find_spec("pytest") is None:
        return {"status": "left out: this Python has no pytest"}
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
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *TESTS],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS["tests"],
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        tail = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return {"status": f"not done after {SECONDS['tests']} s", "output": tail[-4000:]}
    passed = done.returncode == 0 or (device == "cpu" and done.returncode == 5)  # 5: nothing was collected
    return {
        "status": "passed" if passed else f"failed, status {done.returncode}",
        "seconds": round(time.monotonic() - begun, 1),
        "output": (done.stdout + done.stderr)[-4000:],
    }


def train(rank: int, ranks: int, engine: str, args: argparse.Namespace, folder: str) -> None:
    """Train on one rank. Rank 0 writes what it measured."""
    import torch.distributed.fsdp as fsdp2

    import shardwright as sw
    from shardwright.train.models.llama import Llama
    from shardwright.train.models.presets import PRESETS, LlamaConfig

    cuda = args.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo", rank=rank, world_size=ranks, init_method=f"file://{folder}/store"
    )
    atexit.register(dist.destroy_process_group)
    seq, batch = (1024, 4) if cuda else (32, 2)
    tiny = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128}
    shape = LlamaConfig(**(PRESETS["150M"] if cuda else tiny), vocab_size=512, max_seq_len=seq)
    torch.manual_seed(0)
    model: torch.nn.Module = Llama(shape).to(device)
    clip: Any = torch.nn.utils.clip_grad_norm_
    if engine != "plain":
        library: Any = fsdp2 if engine == "fsdp2" else sw
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.layers:  # type: ignore[union-attr]
            library.fully_shard(block, mp_policy=policy)
        library.fully_shard(model, mp_policy=policy, **({"memory": "arena"} if "arena" in engine else {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=cuda)
    if engine.startswith("shardwright"):
        optimizer, clip = sw.fully_shard_optimizer(optimizer), sw.clip_grad_norm_
    losses, times = [], []
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(
            step
        )  # equal on every rank: the plain model has no other data
        tokens = torch.randint(0, 512, (batch, seq + 1), generator=generator).to(device)
        wait(device)
        begun = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=engine == "plain"):
            logits = model(tokens[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wait(device)
        times.append(time.perf_counter() - begun)
        losses.append(float(loss.detach()))
    if rank == 0:
        found: dict[str, Any] = {
            "losses": losses,
            "step_ms": statistics.median(times[args.steps // 3 :]) * 1e3,
        }
        if cuda:
            found["active_bytes"] = torch.cuda.memory_stats()["active_bytes.all.peak"]
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        Path(folder, "found.json").write_text(json.dumps(found))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train with one engine in processes of its own, so that the memory is its own."""
    ranks = 1 if engine == "plain" else torch.cuda.device_count() if args.device == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--device", args.device, "--steps", str(args.steps)]
        processes, errors = [], []
        for rank in range(ranks):
            log = Path(folder, f"rank{rank}.log")
            with log.open("w") as output:
                place = ["--train", str(rank), str(ranks), engine, folder]
                processes.append(subprocess.Popen([*command, *place], stdout=output, stderr=output))
        limit = SECONDS["engine" if args.device == "cuda" else "tests"]  # the CPU may have other things to do
        deadline = time.monotonic() + limit
        for rank, process in enumerate(processes):
            try:
                status: object = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = f"not done after {limit} s"
            if status != 0:
                text = Path(folder, f"rank{rank}.log").read_text(errors="replace")
                errors.append(f"rank {rank}: status {status}\n{text[-2000:]}")
        if errors:
            return {"error": "\n".join(errors)}
        return {"ranks": ranks, **json.loads(Path(folder, "found.json").read_text())}


def text_of(results: dict[str, Any]) -> str:
    tests = results["tests"]
    lines = [
        f"{results['machine']}, Python {results['python']}, torch {results['torch']}, {results['seconds']} s",
        f"tests marked gpu: {tests['status']}",
        *("  " + line for line in tests.get("output", "").splitlines()[-8:]),
        f"{'engine':20}{'ranks':>6}{'ms a step':>12}{'active MB':>12}{'reserved MB':>13}   first and last loss",
    ]
    for engine, found in results["engines"].items():
        if "error" in found:
            lines.append(f"{engine:20} failed\n{found['error']}")
            continue
        memory = [
            f"{found[key] / 1e6:,.0f}" if key in found else "-" for key in ("active_bytes", "reserved_bytes")
        ]
        first, last = found["losses"][0], found["losses"][-1]
        lines.append(
            f"{engine:20}{found['ranks']:>6}{found['step_ms']:>12.1f}{memory[0]:>12}{memory[1]:>13}"
            f"   {first:.4f} {last:.4f}"
        )
    lines.append(f"verdict: {'; '.join(results['problems']) or 'all is well'}")
    return "\n".join(lines) + "\n"


def problems_of(results: dict[str, Any]) -> list[str]:
    engines = results["engines"]
    problems = [f"{engine} failed" for engine, found in engines.items() if "error" in found]
    if results["tests"]["status"].startswith(("failed", "not done")):
        problems.append(f"tests: {results['tests']['status']}")
    whole = {engine: found["losses"] for engine, found in engines.items() if "error" not in found}
    reference = whole.get("plain")
    for engine, losses in whole.items():
        if reference and any(abs(a - b) > LOSSES_AGREE for a, b in zip(losses, reference, strict=True)):
            problems.append(f"losses of {engine} are not those of the plain model")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument(
        "--train", nargs=4, metavar=("RANK", "RANKS", "ENGINE", "FOLDER"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.train:
        rank, ranks, engine, folder = args.train
        train(int(rank), int(ranks), engine, args, folder)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu: this Python's torch finds no CUDA device. --device cpu rehearses without one.",
            file=sys.stderr,
        )
        return 2
    begun = time.monotonic()
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tests": run_tests(args.device),
        "engines": {},
    }
    for engine in ENGINES:
        results["engines"][engine] = measure(engine, args)
        results["seconds"] = round(time.monotonic() - begun, 1)
        results["problems"] = problems_of(results)
        args.out.mkdir(
            parents=True, exist_ok=True
        )  # after each engine: whoever ends this early has the others
        (args.out / "results.json").write_text(json.dumps(results, indent=2))
        (args.out / "results.txt").write_text(text_of(results))
    print(text_of(results), end="")
    return 1 if results["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
