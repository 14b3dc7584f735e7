"""`shardwright export`."""

from __future__ import annotations

from pathlib import Path

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser, integer
from shardwright.train.errors import UserError
from shardwright.train.report.progress import to_stderr


def _run(call: Call) -> int:
    from shardwright.train.commands.export import export, export_adapters, in_words

    run, folder = Path(call.options.run), Path(call.options.folder)
    step, dtype, size = call.options.step, call.options.dtype, call.options.max_shard_size
    if call.options.adapters and size is not None:
        raise UserError(
            "--max-shard-size: expected none with --adapters, since peft reads one file; leave it out"
        )
    push = None
    if call.options.push is not None:
        from shardwright.train.commands.hugging_face.push import Push

        push = Push(call.options.push)
    if call.options.adapters:
        exported = export_adapters(run, folder, step=step, dtype=dtype, say=to_stderr)
    else:
        exported = export(
            run,
            folder,
            step=step,
            dtype=dtype,
            max_shard_size=size if size is not None else "5 GB",
            say=to_stderr,
        )
    print(in_words(exported))
    if push is not None:
        print(f"pushed to {push.upload(folder, f'{run.resolve().name}, step {exported.step}')}")
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
        help='bytes in a file, such as "5 GB" (the default)',
    )
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="write the adapters of a run with finetune.method lora or dora as files of peft, in place of the whole "
        "model",
    )
    parser.add_argument(
        "--push",
        metavar="NAME",
        help="push the folder to this model on the Hugging Face hub, such as owner/model; a new one is private. Needs "
        "HF_TOKEN",
    )


COMMAND = Command("export", "write a trained model as a folder of Hugging Face", _add_options, _run)
