"""`shardwright inspect`."""

from __future__ import annotations

import sys

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser
from shardwright.train.report.progress import to_stderr


def _run(call: Call) -> int:
    from shardwright.train.commands.inspect import inspect

    damage = inspect(
        call.options.path,
        quick=call.options.quick,
        tensors=call.options.tensors,
        show=lambda line: print(line),
        say=to_stderr,
    )
    if damage is None:
        return 0
    sys.stdout.flush()
    print("error:", " ".join(damage.split()), file=sys.stderr, flush=True)
    return 1


def _add_options(parser: Parser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint (runs/NAME/checkpoints/step-N, or a URL such as s3://bucket/step-N), or the folder of a run",
    )
    parser.add_argument("--tensors", action="store_true", help="list all tensors, not only the largest")
    parser.add_argument(
        "--quick", action="store_true", help="compare the sizes of files; do not read them and their digests"
    )


COMMAND = Command("inspect", "show what a checkpoint holds, and whether it is whole", _add_options, _run)
