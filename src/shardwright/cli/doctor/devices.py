"""The GPUs: free memory, other processes, health, and how two of them reach each other.

nvidia-smi's tables are read if the program is there; torch, in a process of its own, says the rest. The readers of
tables and the verdicts are pure functions. Nothing here computes on a GPU.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.cli.doctor.children import Unmeasured, measure_in_children
from shardwright.cli.doctor.finding import Finding, joined, unmeasured
from shardwright.cli.doctor.words import GIB, size

SECONDS = 25.0
"""Limit of torch's look at the GPUs, which starts CUDA on each."""
QUERY_SECONDS = 10.0
"""Limit of a call of nvidia-smi, which hangs if the driver does."""
LEAST_FREE = 0.9
"""Free share of a GPU that nobody uses. The driver and the context of this program take the rest."""
LEAST_HELD = GIB
"""Bytes that a process must hold to be named. Contexts, such as this program's, hold less."""

COLUMNS = {
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "total": "memory.total",
    "free": "memory.free",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "temperature": "temperature.gpu",
    "width": "pcie.link.width.current",
    "most_width": "pcie.link.width.max",
}
THROTTLE_COLUMNS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The new name and the old one of the same column. nvidia-smi refuses a query with a name that it does not know."""
THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake (hardware)",
}
"""Bits of the reasons for lower clocks that are faults. The others, idleness and limits of power, are normal."""


# ------------------------------------------------------------------------------
# Tables of nvidia-smi


def gpu_rows(text: str) -> list[dict[str, Any]]:
    """The rows of the query for `COLUMNS`: bytes and numbers. None where nvidia-smi has no value."""
    rows: list[dict[str, Any]] = []
    for fields in _csv(text):
        if len(fields) != len(COLUMNS):
            continue
        row: dict[str, Any] = dict(zip(COLUMNS, fields, strict=True))
        for name in COLUMNS:
            if name not in ("uuid", "name"):
                row[name] = _number(row[name])
        for name in ("total", "free"):
            row[name] = None if row[name] is None else row[name] * 2**20
        rows.append(row)
    return rows


def throttles(text: str) -> dict[str, list[str]]:
    """Faults that lower the clocks, by uuid of the GPU, from rows of uuid and a hexadecimal mask."""
    found: dict[str, list[str]] = {}
    for fields in _csv(text):
        if len(fields) == 2 and re.fullmatch(r"0x[0-9a-fA-F]+", fields[1]):
            mask = int(fields[1], 16)
            found[fields[0]] = [name for bit, name in THROTTLES.items() if mask & bit]
    return found


def processes(text: str) -> dict[str, list[tuple[int, int]]]:
    """Processes and the bytes that they hold, by uuid of the GPU, from rows of uuid, process and MiB."""
    found: dict[str, list[tuple[int, int]]] = {}
    for fields in _csv(text):
        if len(fields) == 3:
            process, held = _number(fields[1]), _number(fields[2])
            if process is not None and held is not None:
                found.setdefault(fields[0], []).append((process, held * 2**20))
    return found


def topology(text: str) -> dict[tuple[int, int], str]:
    """The link of each pair of GPUs, such as NV18, PIX or SYS, from `nvidia-smi topo -m`."""
    lines = [
        re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t" if "\t" in line else None)
        for line in text.splitlines()
    ]
    cells = [[each.strip() for each in line] for line in lines]
    header = next((line for line in cells if "GPU0" in line), [])
    # Some versions begin the header with an empty cell, others do not: count its GPUs, not its cells.
    columns = [int(each[3:]) for each in header if re.fullmatch(r"GPU\d+", each)]
    links: dict[tuple[int, int], str] = {}
    for line in cells:
        if line and (row := re.fullmatch(r"GPU(\d+)", line[0])) and len(line) > len(columns):
            for column, link in zip(columns, line[1:], strict=False):
                if int(row[1]) < column and re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", link):
                    links[int(row[1]), column] = link
    return links


def _csv(text: str) -> list[list[str]]:
    return [[each.strip() for each in row] for row in csv.reader(text.splitlines())]


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d+", text) else None


def _nvidia_smi(*arguments: str) -> str:
    """The output of nvidia-smi. Empty if it is missing, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=QUERY_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# ------------------------------------------------------------------------------
# Verdicts


def find_devices(there: int) -> list[Finding]:
    """Look at the GPUs, of which torch has found so many, and judge them."""
    as_csv = "--format=csv,noheader,nounits"
    rows = gpu_rows(_nvidia_smi(f"--query-gpu={','.join(COLUMNS.values())}", as_csv))
    if not there:
        return [judge_absent(len(rows))]
    masks = (_nvidia_smi(f"--query-gpu=uuid,{name}", as_csv) for name in THROTTLE_COLUMNS)
    slow = throttles(next(filter(None, masks), ""))
    held = processes(_nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory", as_csv))
    try:
        (seen,) = measure_in_children([("gpus",)], SECONDS)
    except Unmeasured as error:
        advice = "see the end of `dmesg` for Xid errors, and restart the host's driver or the host"
        return [unmeasured("devices", f"torch's look at the GPUs failed: {error}", advice)]
    by_uuid = {row["uuid"]: row for row in rows}
    found = []
    for number, gpu in enumerate(seen["gpus"]):
        row = by_uuid.get(gpu["uuid"], {})
        found.append(judge_gpu(number, gpu, row, slow.get(gpu["uuid"], []), held.get(gpu["uuid"], [])))
    if len(seen["gpus"]) > 1:
        links = topology(_nvidia_smi("topo", "-m"))
        indices = [by_uuid.get(gpu["uuid"], {}).get("index") for gpu in seen["gpus"]]
        between = {
            (one, other): links.get((min(a, b), max(a, b)), "")
            for one, a in enumerate(indices)
            for other, b in enumerate(indices)
            if one < other and a is not None and b is not None
        }
        found.append(
            judge_pairs(len(indices), [tuple(pair) for pair in seen["without_peer_access"]], between)
        )
    return found


def judge_absent(listed: int) -> Finding:
    """The verdict where torch has no GPU and nvidia-smi lists so many."""
    if not listed:
        return Finding("devices", "no GPU, ranks train on the CPU", "", {"gpus": 0})
    advice = "install a torch for this driver, or look at CUDA_VISIBLE_DEVICES; `problems` has the versions"
    return Finding("devices", f"nvidia-smi lists {listed} GPUs, torch finds none", advice, {"gpus": 0})


def judge_gpu(
    number: int,
    gpu: Mapping[str, Any],
    row: Mapping[str, Any],
    slow: Sequence[str],
    held: Sequence[tuple[int, int]],
) -> Finding:
    """The verdict on a GPU.

    Arguments:
        number: torch's.
        gpu: name, and bytes total and free, from torch.
        row: of `gpu_rows`; empty without nvidia-smi.
        slow: of `throttles`.
        held: of `processes`.
    """
    total, free = gpu["total"], gpu["free"]
    facts = [f"{gpu['name']}, {size(free)} free of {size(total)}"]
    advice = []
    others = [(process, nbytes) for process, nbytes in held if nbytes >= LEAST_HELD]
    if others:
        facts.append(
            f"held by {', '.join(f'process {process} ({size(nbytes)})' for process, nbytes in others)}"
        )
        advice.append("end these processes, or choose other GPUs with CUDA_VISIBLE_DEVICES")
    elif free < LEAST_FREE * total:
        advice.append(
            "another program or container holds its memory: nvidia-smi on the host names it; or choose other GPUs with "
            "CUDA_VISIBLE_DEVICES"
        )
    if errors := row.get("ecc_errors"):
        facts.append(f"{errors} uncorrected ECC errors")
        advice.append(
            "its memory is faulty: drain the host and reset the GPU (nvidia-smi -r); if they return, have it exchanged"
        )
    if row.get("temperature") is not None:
        facts.append(f"{row['temperature']} degrees C")
    if slow:
        facts.append(f"clocks lowered by {', '.join(slow)}")
        advice.append(
            "every step waits for this GPU: check cooling and power supply (nvidia-smi -q -d PERFORMANCE)"
        )
    width, most = row.get("width"), row.get("most_width")
    if width and most and width < most:
        facts.append(f"PCIe x{width} of x{most}")
        advice.append(
            "copies between host and GPU are slower than they could be: check the slot and the BIOS"
        )
    figures = {
        "index": number,
        "name": gpu["name"],
        "total": total,
        "free": free,
        "processes": [{"process": process, "bytes": nbytes} for process, nbytes in held],
        "uncorrected_ecc_errors": row.get("ecc_errors"),
        "temperature": row.get("temperature"),
        "throttled_by": list(slow),
        "pcie_width": width,
        "pcie_most_width": most,
    }
    return Finding(f"device {number}", ", ".join(facts), joined(advice), figures)


def judge_pairs(
    count: int, without_access: Sequence[tuple[int, ...]], links: Mapping[tuple[int, int], str]
) -> Finding:
    """The verdict on pairs of GPUs: those without peer access, and the link of each pair; empty where unknown."""
    kinds = Counter(
        "NVLink" if link.startswith("NV") else f"PCIe ({link})" for link in links.values() if link
    )
    facts = [f"{count} GPUs"]
    advice = []
    if kinds:
        facts.append(", ".join(f"{number} pairs by {kind}" for kind, number in kinds.most_common()))
    else:
        facts.append("links unknown, since nvidia-smi prints none")
    if without_access:
        shown = ", ".join("-".join(map(str, pair)) for pair in without_access[:4])
        facts.append(f"no peer access between {shown}{', ...' if len(without_access) > 4 else ''}")
        advice.append(
            "NCCL copies through the host's memory: turn off ACS and the IOMMU for the GPUs, or take GPUs with a "
            "common switch (nvidia-smi topo -m)"
        )
    else:
        facts.append("peer access between all pairs")
    if kinds and not kinds["NVLink"]:
        advice.append(
            "communication is limited by PCIe: fewer and larger micro-batches ([train] micro_batch) communicate less "
            "often; `shardwright plan` shows what a step waits for"
        )
    elif 0 < kinds["NVLink"] < kinds.total():
        advice.append("some pairs have no NVLink: choose GPUs that have, with CUDA_VISIBLE_DEVICES")
    figures = {
        "links": {f"{one}-{other}": link for (one, other), link in links.items()},
        "without_peer_access": [list(pair) for pair in without_access],
    }
    return Finding("GPU links", ", ".join(facts), joined(advice), figures)


# ------------------------------------------------------------------------------
# In the process that measures


def measure_gpus() -> dict[str, Any]:
    """Name, uuid and memory of each GPU, and the pairs without peer access."""
    import torch

    count = torch.cuda.device_count()
    gpus = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        uuid = str(getattr(properties, "uuid", ""))
        uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        gpus.append({"name": properties.name, "uuid": uuid, "free": free, "total": total})
    pairs = [
        [one, other]
        for one in range(count)
        for other in range(one + 1, count)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    return {"gpus": gpus, "without_peer_access": pairs}
