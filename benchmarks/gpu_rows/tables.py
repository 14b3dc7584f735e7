"""The results as text. Pure functions."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_rows.verdicts import Found, reason_of
from benchmarks.peers.tables import table

GB = 1e9
ENTRIES = 12
HEADER = ("", "ms", "of plain", "of FSDP2", "MFU", "host ms", "active GB", "reserved GB", "ratio", "loss off")


def row_table(variants: dict[str, Found]) -> str:
    lines = []
    for name, found in variants.items():
        if "ms" not in found:
            lines.append([name, *["-"] * (len(HEADER) - 1)])
            continue
        active, reserved = found.get("active_bytes"), found.get("reserved_bytes")
        lines.append([
            name, f"{found['ms']:.1f}", _ratio(found, "of_plain"), _ratio(found, "of_fsdp2"),
            _number(found["mfu"], "{:.1%}"), f"{found['host_ms']:.1f}",
            _number(active and active / GB, "{:.3f}"), _number(reserved and reserved / GB, "{:.3f}"),
            _number(active and reserved / active, "{:.3f}"), f"{found['loss_off']:.0e}",
        ])  # fmt: skip
    return table(HEADER, lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _ratio(found: Found, key: str) -> str:
    return f"{found[key]['median']:.3f}" if key in found else "-"


def notes(result: Found) -> list[str]:
    """Notes beside a row's table: failures, omissions, numbers that disagree, memory that was left."""
    lines = []
    for name, found in result["variants"].items():
        reason = reason_of(found)
        if "error" in found:
            lines.append(f"{name} failed: {found['error']}")
        elif "skipped" in found:
            lines.append(f"{name}: skipped: {reason}")
        elif reason:
            lines.append(f"{name}: {reason}")
        elif "cut" in found:
            lines.append(f"{name}: in a later turn {found['cut']}")
        elif "late" in found:
            lines.append(f"{name}: {len(found['turns_ms'])} turn, no time for another")
        if found.get("left_bytes", 0) > 0.01 * found.get("active_bytes", 0) > 0:
            lines.append(f"{name}: {found['left_bytes'] / GB:.3f} GB of variants before it were still active")
    if "error" in result and not any("error" in found for found in result["variants"].values()):
        lines.append(f"the row failed: {result['error']}")
    return lines + [f"DISAGREE: {each}" for each in result["disagree"]]


def details(results: dict[str, Any]) -> list[str]:
    """All that is known of each failure: the traceback with its causes, the device's memory, and the output."""
    lines = []
    for row, result in results["rows"].items():
        failures = {f"{row}, {name}": found for name, found in result["variants"].items() if "error" in found}
        if "error" in result and not failures:
            failures[row] = result
        for name, found in failures.items():
            lines += ["", f"==== {name}: {found['error']}"]
            lines += found.get("traceback", "").splitlines()
            if found.get("memory"):
                lines.append(f"memory: {found['memory']}")
            if found.get("output"):
                lines += ["output:", *found["output"].splitlines()]
    return lines


def target_lines(targets: list[Found]) -> list[str]:
    rows = []
    for target in targets:
        sign = ">=" if target["what"] == "MFU" else "<="
        value = "-" if target["value"] is None else f"{target['value']:.3f}"
        verdict = target["verdict"]
        if verdict == "not measured":
            verdict += f": {target['reason']}"
        where = f"{target['row']}, {target['variant']}"
        rows.append([where, f"{target['what']} {sign} {target['limit']:.2f}", value, verdict])
    return table(["target", "limit", "found", "verdict"], rows).splitlines()


def profile_lines(profile: Found) -> list[str]:
    """Where the time of the largest gap is: kernels and host operators of both, the largest difference first."""
    lines = [
        f"profile of the largest gap: {profile['row']}, {profile['variant']} beside {profile['base']}, "
        f"{profile['gap']:.3f} of its target"
    ]
    if "error" in profile:
        return [*lines, f"failed: {profile['error']}"]
    both = [profile["variants"][profile[key]] for key in ("variant", "base")]
    if any("profile" not in found for found in both):
        reasons = [found.get("error") or reason_of(found) for found in both]
        return [*lines, *filter(None, reasons)]
    names = (profile["variant"], profile["base"])
    for key, what in (
        ("device_ms", "kernels, ms of a step"),
        ("host_ms", "host operators, own ms of a step"),
    ):
        ours, theirs = (found["profile"][key] for found in both)
        total = [sum(times.values()) for times in (ours, theirs)]
        if not ours and not theirs:
            continue
        differences = {n: ours.get(n, 0.0) - theirs.get(n, 0.0) for n in {*ours, *theirs}}
        order = sorted(differences, key=lambda n: (-abs(differences[n]), n))[:ENTRIES]
        longest = sorted(ours, key=lambda n: -ours[n])[:ENTRIES]
        cells = [["all", f"{total[0]:.3f}", f"{total[1]:.3f}", f"{total[0] - total[1]:+.3f}"]]
        for name in dict.fromkeys([*order, *longest]):
            numbers = [ours.get(name, 0.0), theirs.get(name, 0.0)]
            cells.append([name[:60], *[f"{n:.3f}" for n in numbers], f"{differences[name]:+.3f}"])
        lines += ["", table([what, *names, "difference"], cells)]
    host = [f"{name} {found['host_ms']:.1f} ms" for name, found in zip(names, both, strict=True)]
    return [*lines, "", f"host time of a step on an idle device: {', '.join(host)}"]


def text_of(results: dict[str, Any]) -> str:
    machine = results["machine"]
    lines = [
        f"{machine['device']} x {results['ranks']}, {machine['memory']}, torch {machine['torch']}, "
        f"Python {machine['python']}, {machine['more']}",
        f"{results['seconds']:.0f} s of {results['limit_seconds']:.0f} s",
        f"precision: {results['precision']}",
        "A step is forward, backward, clipping to norm 1.0 and fused AdamW. Turns: every engine of a row after the "
        "other, then backwards, each newly built; ms: median of all steps; ratios: median over the turns.",
        "MFU: FLOPs of the model (PaLM's count, without recomputation) over the device's peak in bfloat16.",
    ]
    for name, result in results["rows"].items():
        lines += [
            "",
            f"{name}: {result['title']} ({result['seconds']:.0f} s)",
            "",
            row_table(result["variants"]),
        ]
        lines += notes(result)
    if results["left_out"]:
        lines += ["", *[f"left out: no time: {name}" for name in results["left_out"]]]
    if results["targets"]:
        lines += ["", *target_lines(results["targets"])]
    if results["profile"]:
        lines += ["", *profile_lines(results["profile"])]
    lines += ["", f"verdict: {'; '.join(results['problems']) or verdict_of(results)}"]
    return "\n".join([*lines, *details(results)]) + "\n"


def verdict_of(results: dict[str, Any]) -> str:
    """Without problems: whether there are any numbers."""
    found = [variant for row in results["rows"].values() for variant in row["variants"].values()]
    return "all numbers agree" if any("ms" in variant for variant in found) else "nothing was measured"
