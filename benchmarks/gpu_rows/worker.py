"""One process of a row: it runs each variant in turn, writes every result at once, and gives the memory back.

It reads ``order.json`` of its folder and appends lines of JSON to ``rank<R>.jsonl``, so that a row which is ended early
still has the turns that it finished.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from benchmarks.gpu_rows.failures import described, memory_of
from benchmarks.gpu_rows.faults import FAULTS
from benchmarks.gpu_rows.rows import WARM_UP, Row, Variant, need
from benchmarks.gpu_rows.training import Training, wait_for

HOST_STEPS = 3
PROFILED_STEPS = 3
PROFILE_ENTRIES = 400  #: kernels and operators that are passed on, the longest first


class Rank:
    """One rank of a row. All ranks take the same decisions."""

    def __init__(self, order: dict[str, Any], rank: int, folder: Path) -> None:
        self.order, self.rank, self.folder = order, rank, folder
        self.row = Row.of_json(order["row"])
        self.ranks: int = order["ranks"]
        self.cuda = order["device"] == "cuda"
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")

    def start(self) -> None:
        if self.cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        if self.row.exact:
            torch.use_deterministic_algorithms(True)
        store = f"file://{self.folder}/store"
        backend = "nccl" if self.cuda else "gloo"
        dist.init_process_group(backend, rank=self.rank, world_size=self.ranks, init_method=store)

    def write(self, line: dict[str, Any]) -> None:
        with (self.folder / f"rank{self.rank}.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def everywhere(self, value: bool) -> bool:
        """Whether it holds on all ranks."""
        if self.ranks == 1:
            return value
        flag = torch.tensor(int(value), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def run(self) -> None:
        self.start()
        seconds: dict[str, float] = {}
        given_up: set[str] = set()
        for variant in self.row.order():
            name = variant.name
            if name in given_up:
                continue
            late = time.time() + seconds.get(name, 0.0) > self.order["deadline"]
            if not self.everywhere(not late):
                given_up.add(name)
                self.note({"variant": name, "late": True})
                continue
            if reason := self.reason_against(variant):
                given_up.add(name)
                self.note({"variant": name, "skipped": reason})
                continue
            begun = time.monotonic()
            self.note({"variant": name, "begun": time.time()})  # whoever ends this process sees what it did
            try:
                line = self.turn(variant)
            except Exception as error:
                given_up.add(name)
                self.write({"variant": name, **described(error), "memory": memory_of(self.device)})
                traceback.clear_frames(error.__traceback__)
                if self.ranks > 1 or not self.device_works():
                    raise  # the other ranks may wait for this one; after some errors a device does nothing more
            else:
                # The next turn finds compiled code in the cache.
                seconds[name] = (
                    time.monotonic() - begun - (line["start_seconds"] / 2 if self.row.compile else 0)
                )
                self.note({"variant": name, **line})
            self.forget()

    def note(self, line: dict[str, Any]) -> None:
        if self.rank == 0:
            self.write(line)

    def reason_against(self, variant: Variant) -> str:
        """Why this device does not take the variant; nothing if it does."""
        needed, free = need(self.row, variant, self.ranks), self.free_bytes()
        if self.everywhere(free is None or needed.total <= free):
            return ""
        return f"needs {needed}; {(free or 0) / 1e9:.1f} GB are free"

    def free_bytes(self) -> int | None:
        limit: int | None = self.order.get("limit_bytes")
        if not self.cuda:
            return limit
        free = torch.cuda.mem_get_info(self.device)[0]
        return free if limit is None else min(free, limit)

    def turn(self, variant: Variant) -> dict[str, Any]:
        """Build, warm up, time, and look at memory and the host."""
        left = self.active_bytes()
        begun = time.monotonic()
        training = Training(self.row, variant, self.device, self.order["backend"])
        if fault := self.order.get("faults", {}).get(variant.name):
            FAULTS[fault](self.device)
        self.forget()  # full weights, which were there before they were sharded
        for _ in range(WARM_UP):
            training.step()
        wait_for(self.device)
        line: dict[str, Any] = {"start_seconds": round(time.monotonic() - begun, 1), "left_bytes": left}
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        line["ms"] = self.timed(training)
        if self.cuda:
            stats = torch.cuda.memory_stats(self.device)
            line["active_bytes"] = stats["active_bytes.all.peak"]
            line["reserved_bytes"] = stats["reserved_bytes.all.peak"]
        line["host_ms"] = statistics.median(self.host_time(training) for _ in range(HOST_STEPS))
        if self.order["profile"]:
            line["profile"] = self.profiled(training)
        line["flops_per_step"] = training.flops_per_step
        line["losses"], line["norms"] = training.numbers()
        if training.graphed is not None and not training.graphed.captured:
            raise RuntimeError("the step was not captured in a CUDA graph")
        return line

    def timed(self, training: Training) -> list[float]:
        """Milliseconds of each step. The host runs ahead: nothing waits between the steps."""
        if not self.cuda:
            times = [time.perf_counter()]
            for _ in range(self.row.steps):
                training.step()
                times.append(time.perf_counter())
            return [1e3 * (b - a) for a, b in itertools.pairwise(times)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self.row.steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            training.step()
            mark.record()
        wait_for(self.device)
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    def host_time(self, training: Training) -> float:
        """Milliseconds until one step is queued on an idle device."""
        wait_for(self.device)
        begun = time.perf_counter()
        training.step()
        return 1e3 * (time.perf_counter() - begun)

    def profiled(self, training: Training) -> dict[str, Any]:
        """Milliseconds of a step by kernel of the device, and by operator on the host."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        for steps in (1, PROFILED_STEPS):  # the first profile of a process has the profiler's own start in it
            with profile(activities=activities) as seen:
                for _ in range(steps):
                    training.step()
                wait_for(self.device)
        device: dict[str, float] = {}
        host: dict[str, float] = {}
        for event in seen.key_averages():
            if getattr(event, "is_user_annotation", False) or event.key == "cudaDeviceSynchronize":
                continue  # a range around kernels that are counted themselves; this function's own wait
            on_device = "CPU" not in str(getattr(event, "device_type", "CPU"))
            value = getattr(event, "self_device_time_total" if on_device else "self_cpu_time_total", 0.0)
            times = device if on_device else host
            times[event.key] = times.get(event.key, 0.0) + value / 1e3 / PROFILED_STEPS
        return {"device_ms": longest(device), "host_ms": longest(host)}

    def active_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0

    def device_works(self) -> bool:
        try:
            wait_for(self.device)
        except RuntimeError:
            return False
        return True

    def forget(self) -> None:
        """Give back memory that no tensor has any more."""
        gc.collect()
        if self.cuda:
            wait_for(self.device)
            torch.cuda.empty_cache()


def longest(times: dict[str, float]) -> dict[str, float]:
    names = sorted(times, key=lambda name: -times[name])[:PROFILE_ENTRIES]
    return {name: round(times[name], 4) for name in names}


def work(folder: Path, rank: int) -> NoReturn:
    """Run the row as one of its ranks. Does not return: process groups and compilers may take forever to end."""
    order = json.loads((folder / "order.json").read_text())
    process = Rank(order, rank, folder)
    status = 0
    try:
        process.run()
        process.everywhere(True)  # no rank ends while another one still communicates with it
    except Exception as error:
        traceback.print_exc()
        process.write(described(error))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
