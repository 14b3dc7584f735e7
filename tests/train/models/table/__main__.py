"""Print the table of all architectures:

    python -m tests.train.models.table --records table.jsonl    # plans, in one process
    python -m torch.distributed.run --nproc-per-node 2 -m tests.train.models.table --records table.jsonl    # steps

A line for each architecture, then each reason for which a cell does not work. The committed result is in
`benchmarks/results/architectures.txt`. The records keep what is known of each type, so that the second command prints
the plans of the first, and a run that was interrupted goes on where it was. Names of types after the command: these
alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.train.models.table.cells import (
    CELLS,
    CRASH,
    LATE,
    PLAIN,
    REFUSED,
    WORKS,
    WRONG,
    Outcome,
    outcomes,
    planned,
)
from tests.train.models.table.small import causal_types, small_config, unnoticed

HEADER = (
    "One training step of every architecture of transformers on 2 ranks, beside the plain model: loss and gradients.",
    "Cells of a line: activations.checkpoint none, full, layers, ops x train.loss_chunks 0, 2 x finetune.method full,",
    "lora, so that every pair occurs, and two of them with parallel.context = 2. Beside them a plan of ops, 2, full.",
    "refused: with one line before ranks start. refused in ranks: with one line on every rank, before the first step.",
    "not in transformers: the plain model itself does not load or run.",
)
COLUMNS = (WORKS, REFUSED, LATE, PLAIN, WRONG, CRASH)
#: The word of a plan in the table, by its outcome.
PLANS = {WORKS: "planned", REFUSED: "no plan"}
#: Seconds after which a type counts as hanging: the process ends with the stacks of its threads.
HANGS = 1200


def main(kinds: list[str], records: Path | None) -> int:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    steps = dist.is_torchelastic_launched()
    if steps:
        dist.init_process_group("gloo")
    first = not steps or dist.get_rank() == 0
    part = "steps" if steps else "plan"
    known: dict[str, dict[str, Any]] = {kind: {} for kind in kinds or causal_types()}
    if records is not None and records.exists():
        for each in map(json.loads, records.read_text().splitlines()):
            known.setdefault(each["type"], {}).update(each)
    if steps:
        dist.barrier()  # before the first rank adds to the file

    for kind in kinds or causal_types():
        if part in known[kind] or "none" in known[kind]:
            continue
        faulthandler.dump_traceback_later(HANGS, exit=True)
        record = {"type": kind, **_record(kind, steps)}
        faulthandler.cancel_dump_traceback_later()
        known[kind].update(record)
        if first:
            print(f"{kind}: {record}"[:300], file=sys.stderr, flush=True)
            if records is not None:
                with records.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    if first:
        _print({kind: known[kind] for kind in kinds or causal_types()})
    if steps:
        dist.destroy_process_group()
    words = [word for each in known.values() for word, _, _ in each.get("steps", [])]
    words += [each["plan"][0] for each in known.values() if "plan" in each]
    return int(WRONG in words or CRASH in words)


def _record(kind: str, steps: bool) -> dict[str, Any]:
    """Train a type in every cell, or plan it. Return the outcomes: of steps each word and reason, with its number."""
    try:
        with unnoticed():
            small_config(kind)
    except ValueError as error:
        return {"none": str(error)[:120]}
    with tempfile.TemporaryDirectory() as folder:
        if not steps:
            return {"plan": _named(planned(kind, Path(folder)), folder)}
        box = [folder]
        dist.broadcast_object_list(box)
        counts: Counter[Outcome] = Counter()
        for cell, outcome in outcomes(kind, Path(box[0]), CELLS):
            counts[_named(outcome, box[0])] += 1
            if outcome.word in (WRONG, CRASH):
                print(f"  rank {dist.get_rank()}: {kind} {cell}: {outcome}", file=sys.stderr, flush=True)
        dist.barrier()
    return {"steps": [[*outcome, count] for outcome, count in counts.items()]}


def _named(outcome: Outcome, folder: str) -> Outcome:
    return outcome._replace(reason=outcome.reason.replace(folder, "FOLDER"))


def _print(records: dict[str, dict[str, Any]]) -> None:
    import transformers

    totals: Counter[str] = Counter()
    for line in HEADER:
        print(line)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}\n")
    print(f"{'model type':28}" + "".join(f"{name:>20}" for name in (*COLUMNS, "plan")))
    for kind, each in records.items():
        if "none" in each:
            print(f"{kind:28} no small model: {each['none']}")
            continue
        counts: Counter[str] = Counter()
        for word, _, count in each.get("steps", []):
            counts[word] += count
        word, reason = each.get("plan", ("", ""))
        plan = PLANS.get(word, word)
        totals.update(counts)
        totals[plan] += 1
        print(f"{kind:28}" + "".join(f"{counts[name]:20}" for name in COLUMNS) + f"{plan:>20}")
        for word, reason_of_cells, count in each.get("steps", []):
            if word != WORKS:
                print(f"    {count} {word}: {reason_of_cells[:230]}")
        if reason and not any(reason == of_cells for _, of_cells, _ in each.get("steps", [])):
            print(f"    {plan}: {reason[:230]}")
    print(f"{'all':28}" + "".join(f"{totals[name]:20}" for name in (*COLUMNS, PLANS[WORKS])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--records", type=Path)
    arguments = parser.parse_args()
    sys.exit(main(arguments.types, arguments.records))
