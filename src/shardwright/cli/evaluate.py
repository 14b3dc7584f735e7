"""`shardwright evaluate`."""

from __future__ import annotations

from pathlib import Path

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser, integer
from shardwright.train.errors import UserError
from shardwright.train.report.progress import to_stderr


def _run(call: Call) -> int:
    from rich.console import Console

    from shardwright.train.commands.hugging_face.evaluate import check_tasks, evaluate
    from shardwright.train.commands.hugging_face.tables import of_tasks
    from shardwright.train.launch.evaluation_process import ending_with_run

    options = call.options
    tasks = [name for name in options.tasks.split(",") if name]
    if not tasks:
        raise UserError(f"--tasks: expected names or files, separated by commas, found {options.tasks!r}")
    with ending_with_run():
        if options.check:
            check_tasks(tasks)
            print("lm-eval knows these tasks")
            return 0
        if options.run is None:
            raise UserError("evaluate: expected RUN, found none; see shardwright evaluate --help")
        evaluated = evaluate(
            Path(options.run),
            tasks,
            step=options.step,
            dtype=options.dtype,
            limit=options.limit,
            device=options.device,
            batch_size=options.batch_size,
            chat=options.apply_chat_template,
            say=to_stderr,
        )
    Console().print(of_tasks(evaluated.step, evaluated.tasks))
    print(f"wrote {evaluated.file}")
    return 0


def _add_options(parser: Parser) -> None:
    parser.usage = (
        "shardwright evaluate RUN --tasks TASKS [--apply-chat-template] [--limit N] [--step N] [--dtype DTYPE]\n"
        "                            [--device DEVICE] [--batch-size N] [--debug]\n"
        "       shardwright evaluate --tasks TASKS --check"
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="run folder with a checkpoint, or a folder of `shardwright export`; not with --check",
    )
    parser.add_argument(
        "--tasks", metavar="TASKS", required=True,
        help="tasks of lm-evaluation-harness, separated by commas: names, or YAML files of tasks",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true", help="only check that lm-evaluation-harness knows the tasks"
    )
    parser.add_argument(
        "--apply-chat-template", action="store_true",
        help="put the texts of the tasks into the chat template of the run or the folder, as messages of a user",
    )  # fmt: skip
    parser.add_argument("--limit", metavar="N", type=integer(1), help="samples of each task (default: all)")
    parser.add_argument(
        "--step", metavar="N", type=integer(0), help="step of the checkpoint (default: the newest whole one)"
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", choices=("float32", "bfloat16", "float16"),
        help="float32, bfloat16 or float16 (default: as in the checkpoint)",
    )  # fmt: skip
    parser.add_argument(
        "--device", metavar="DEVICE", help="such as cpu or cuda:1 (default: a GPU if there is one)"
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=integer(1), default=8, help="samples at once (default 8)"
    )


COMMAND = Command(
    "evaluate", "compute tasks of lm-evaluation-harness on a checkpoint of a run", _add_options, _run
)
