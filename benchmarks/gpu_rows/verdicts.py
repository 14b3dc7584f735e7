"""Verdicts on the measured figures: medians and ratios, losses that disagree, and each target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu_rows.rows import FSDP2, PLAIN, SHARDWRIGHT, WARM_UP, Row, Variant
from benchmarks.peers.tables import ratios

Found = dict[str, Any]

OF_PLAIN = 1.02
OF_FSDP2 = {"eager": 0.95, "compiled": 1.0}
MFU = 0.5
RESERVED = 1.02
"""Largest time over plain torch's and over FSDP2's, least MFU of the compiled 3B, largest reserved over active."""
LOSS_TOLERANCE = 5e-2
"""For the losses of the first steps, as a part of the fall of the reference's losses in these steps: 1 is the distance
of an engine that does not train. The engines compute the same roundings, so the first losses have the same bits or
nearly. Backward of attention and of the embedding adds up in an order that changes, and AdamW makes that larger."""
NORM_TOLERANCE = 0.1
"""Relative, for the norms of the gradients of the first steps, which such noise changes more than it changes losses."""
KEPT = ("error", "traceback", "memory", "output", "skipped", "cut", "late")
"""Keys of a line that stay where it has no figures."""
PRECISION = (
    "float32 master weights and moments, computation in bfloat16, gradients cast to float32; plain torch: a model in "
    "bfloat16 beside float32 copies in the optimizer; FSDP2 and shardwright: MixedPrecisionPolicy(bfloat16, float32)"
)


def summary(row: Row, measured: Found, peak: float | None) -> Found:
    """All that is known of a row. ``measured`` is what ``crew.run_row`` returns; ``peak`` is in FLOP/s of a device."""
    variants: dict[str, Found] = {variant.name: {} for variant in row.variants}
    turns: dict[str, list[Found]] = {name: [] for name in variants}
    error = measured["error"]
    details = {"output": measured["output"]} if measured.get("output") else {}
    for line in measured["lines"]:
        name = line.get("variant")
        if name is None:
            error = error or line["error"]
            details |= {key: line[key] for key in ("traceback",) if key in line}
        elif "ms" in line:
            turns[name].append(line)
        else:
            variants[name] |= {key: line[key] for key in KEPT if key in line}
    for name, lines in turns.items():
        if lines:
            variants[name] |= _figures(lines, peak)
    for name, found in variants.items():
        if not found:
            found["row_failed" if error else "late"] = True
        for base, key in ((PLAIN, "of_plain"), (FSDP2, "of_fsdp2")):
            if name != base and turns[name] and turns.get(base):
                count = min(len(turns[name]), len(turns[base]))
                times = [[line["ms"] for line in turns[each][:count]] for each in (name, base)]
                found[key] = ratios(*times)
    result = {"row": row.as_json(), "title": row.title, "seconds": measured["seconds"], "variants": variants}
    result["disagree"] = disagreements(row, {name: lines for name, lines in turns.items() if lines}, variants)
    return result | ({"error": error, **details} if error else {})


def _figures(lines: Sequence[Found], peak: float | None) -> Found:
    found: Found = {"turns_ms": [line["ms"] for line in lines]}
    found["ms"] = statistics.median(ms for line in lines for ms in line["ms"])
    found["start_seconds"] = [line["start_seconds"] for line in lines]
    found["host_ms"] = statistics.median(line["host_ms"] for line in lines)
    for key in ("active_bytes", "reserved_bytes", "left_bytes"):
        if key in lines[0]:
            found[key] = max(line[key] for line in lines)
    found["flops_per_second"] = lines[0]["flops_per_step"] / found["ms"] * 1e3
    found["mfu"] = found["flops_per_second"] / peak if peak else None
    found |= {key: lines[0][key] for key in ("losses", "norms", "profile") if key in lines[0]}
    return found


def disagreements(row: Row, turns: dict[str, list[Found]], variants: dict[str, Found]) -> list[str]:
    """Variants whose numbers are not those of the first one. Adds each variant's distance to what is known of it."""
    problems = []
    names = [variant.name for variant in row.variants if variant.name in turns]
    for name in names:
        reference = turns[names[0]][0]
        fall = max(reference["losses"][:WARM_UP]) - min(reference["losses"][:WARM_UP])
        norm = max(map(abs, reference["norms"][:WARM_UP]))
        off = max(_off(line["losses"], reference["losses"], fall) for line in turns[name])
        norm_off = max(_off(line["norms"], reference["norms"], norm) for line in turns[name])
        variants[name] |= {"loss_off": off, "norm_off": norm_off}
        for what, distance, limit in (("losses", off, LOSS_TOLERANCE), ("norms", norm_off, NORM_TOLERANCE)):
            if distance > limit:
                problems.append(
                    f"{what} of {name} are {distance:.1e} away from those of {names[0]}, the limit is {limit:.0e}"
                )
    if row.exact:
        exact = [
            variant.name
            for variant in row.variants
            if variant.engine == SHARDWRIGHT and variant.name in turns
        ]
        for name in exact[1:]:
            if any(line["losses"] != turns[exact[0]][0]["losses"] for line in turns[name]):
                problems.append(f"losses of {name} have other bits than those of {exact[0]}")
    return problems


def _off(numbers: Sequence[float], reference: Sequence[float], scale: float) -> float:
    """The largest distance in the first steps, over the scale; infinite if a number is not finite."""
    pairs = list(zip(numbers, reference, strict=False))[:WARM_UP]
    if not pairs or not all(math.isfinite(x) for pair in pairs for x in pair):
        return math.inf
    distance = max(abs(a - b) for a, b in pairs)
    return distance / scale if scale else math.inf if distance else 0.0


def targets(rows: Sequence[Row], results: dict[str, Found], ranks: int, cuda: bool) -> list[Found]:
    """Every target with its figure and its verdict: met, not met, or not measured with the reason."""
    everything = [target for row in rows for target in _targets_of(row, results.get(row.name, {}), ranks)]
    for target in everything:
        value, limit = target["value"], target["limit"]
        if not cuda:
            target["reason"] = "times and memory of the CPU say nothing"
        if value is None or target["reason"]:
            target["verdict"] = "not measured"
            continue
        good = value >= limit if target["what"] == "MFU" else value <= limit
        target["verdict"] = "met" if good else "not met"
    return everything


def _targets_of(row: Row, result: Found, ranks: int) -> Iterator[Found]:
    if row.exact:
        return
    peers = {variant.engine for variant in row.variants}
    for variant in row.variants:
        if variant.engine != SHARDWRIGHT:
            continue
        found = result.get("variants", {}).get(variant.name, {})
        alone = "" if ranks == 1 else f"{ranks} devices; the target is for one"
        if PLAIN in peers and not variant.communicating:
            yield _target(
                row, variant, "time / plain torch", OF_PLAIN, _median(found, "of_plain"), found, alone
            )
        if FSDP2 in peers and not variant.communicating:
            limit = OF_FSDP2["compiled" if row.compile else "eager"]
            yield _target(row, variant, "time / FSDP2", limit, _median(found, "of_fsdp2"), found, alone)
        if row.model == "3B" and row.compile:
            yield _target(row, variant, "MFU", MFU, found.get("mfu"), found)
        if variant.memory == "arena" and not variant.graph:
            active, reserved = found.get("active_bytes"), found.get("reserved_bytes")
            value = reserved / active if active else None
            yield _target(row, variant, "reserved / active", RESERVED, value, found)


def _median(found: Found, key: str) -> float | None:
    return found[key]["median"] if key in found else None


def _target(
    row: Row, variant: Variant, what: str, limit: float, value: float | None, found: Found, reason: str = ""
) -> Found:
    if value is None and not reason:
        reason = reason_of(found) or "it has no figure to compare with"
    return {
        "row": row.name, "variant": variant.name, "what": what, "limit": limit, "value": value, "reason": reason,
    }  # fmt: skip


def reason_of(found: Found) -> str:
    """Why a variant has no figure; nothing if it has one."""
    if "ms" in found:
        return ""
    if "error" in found or "row_failed" in found:
        return "it failed" if "error" in found else "its row failed"
    return found.get("skipped") or found.get("cut") or "left out: no time"


def problems(results: dict[str, Found]) -> list[str]:
    """Problems that give the program status 1: rows and variants that failed, and numbers that disagree."""
    found = []
    for name, result in results.items():
        failed = [variant for variant, each in result["variants"].items() if "error" in each]
        found += [f"{name}: {variant} failed" for variant in failed]
        if "error" in result and not failed:
            found.append(f"{name}: {result['error'].splitlines()[0]}")
        found += [f"{name}: {each}" for each in result["disagree"]]
    return found


def largest_gap(rows: Sequence[Row], results: dict[str, Found]) -> tuple[Row, Variant, Variant, float] | None:
    """The row, variant and engine beside which shardwright is furthest above its target, and time over target."""
    gaps = []
    for row in rows:
        found = results.get(row.name, {}).get("variants", {})
        for variant in row.variants:
            each = found.get(variant.name, {})
            if row.exact or variant.engine != SHARDWRIGHT or variant.communicating or "ms" not in each:
                continue
            limit = OF_FSDP2["compiled" if row.compile else "eager"]
            for engine, key, target in ((PLAIN, "of_plain", OF_PLAIN), (FSDP2, "of_fsdp2", limit)):
                if key in each:
                    gaps.append((each[key]["median"] / target, row, variant, Variant(engine)))
    if not gaps:
        return None
    gap, row, variant, base = max(gaps, key=lambda each: each[0])
    return row, variant, base, gap
