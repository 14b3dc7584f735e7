"""Print the table: ``python -m torch.distributed.run --nproc-per-node 2 -m tests.train.models.table [TYPE ...]``.

A line for each architecture, then each reason for which a cell does not work. The committed result is in
`benchmarks/results/architectures.txt`.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from tests.train.models.table.cells import CELLS, CRASH, LATE, PLAIN, REFUSED, WORKS, WRONG, outcomes
from tests.train.models.table.small import causal_types, small_config, unnoticed

HEADER = (
    "One training step of every architecture of transformers on 2 ranks, beside the plain model: loss and gradients.",
    "Cells of a line: activations.checkpoint none, full, layers, ops x train.loss_chunks 0, 2 x finetune.method full,",
    "lora, so that every pair occurs, and two of them with parallel.context = 2.",
    "refused: with one line before ranks start. refused in ranks: with one line on every rank, before the first step.",
    "not in transformers: the plain model itself does not load or run.",
)
COLUMNS = (WORKS, REFUSED, LATE, PLAIN, WRONG, CRASH)


def main(kinds: list[str]) -> int:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first, failures, totals = dist.get_rank() == 0, 0, Counter[str]()

    def say(line: str) -> None:
        if first:
            print(line, flush=True)

    for line in HEADER:
        say(line)
    say(f"torch {torch.__version__}, transformers {transformers.__version__}")
    say("")
    say(f"{'model type':28}" + "".join(f"{name:>20}" for name in COLUMNS))
    for kind in kinds or causal_types():
        try:
            with unnoticed():
                small_config(kind)
        except ValueError as error:
            say(f"{kind:28} no small model: {str(error)[:120]}")
            continue
        reasons: dict[tuple[str, str], int] = Counter()
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            box = [folder]
            dist.broadcast_object_list(box)
            for cell, outcome in outcomes(kind, Path(box[0]), CELLS):
                counts[outcome.word] += 1
                reasons[outcome.word, outcome.reason] += 1
                if outcome.word in (WRONG, CRASH):
                    print(f"  rank {dist.get_rank()}: {kind} {cell}: {outcome}", file=sys.stderr, flush=True)
            dist.barrier()
        totals += counts
        failures += counts[WRONG] + counts[CRASH]
        say(f"{kind:28}" + "".join(f"{counts[name]:20}" for name in COLUMNS))
        for (word, reason), count in reasons.items():
            if word != WORKS:
                say(f"    {count} {word}: {reason[:230].replace(str(box[0]), 'FOLDER')}")
    say(f"{'all':28}" + "".join(f"{totals[name]:20}" for name in COLUMNS))
    dist.destroy_process_group()
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
