"""`shardwright export`."""

from __future__ import annotations

import sys
from pathlib import Path

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser, integer


def _run(call: Call) -> int:
    from shardwright.train.export import export, in_words

    exported = export(
        Path(call.options.run),
        Path(call.options.folder),
        step=call.options.step,
        dtype=call.options.dtype,
        max_shard_size=call.options.max_shard_size,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(in_words(exported))
    return 0


def _add_options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder with a checkpoint")
    parser.add_argument("folder", metavar="DIR", help="the new folder; it must not exist yet")
    parser.add_argument(
        "--step", metavar="N", type=integer(0), help="step of the checkpoint (default: the newest whole one)"
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", choices=("float32", "bfloat16", "float16"),
        help="float32, bfloat16 or float16 (default: as in the checkpoint)",
    )  # fmt: skip
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5 GB",
        help='bytes in a file, such as "5 GB" (the default)',
    )


COMMAND = Command("export", "write a trained model as a folder of Hugging Face", _add_options, _run)
