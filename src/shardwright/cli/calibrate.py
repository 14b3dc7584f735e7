"""`shardwright calibrate`."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser, integer, number
from shardwright.train.errors import UserError

RANKS = 2  #: that measure a CPU; collectives need two
MOST = 0.15  #: by which repeated measurements may differ


def _run(call: Call) -> int:
    from shardwright.train.commands import calibrate

    options = call.options
    out = None if options.out is None else Path(options.out).expanduser()
    if out is not None:
        calibrate.check_place(out, options.force)  # mistakes are reported before anything is measured

    if options.system is not None:
        if (options.device, options.nproc, options.most) != ("auto", None, MOST):
            raise UserError("--import measures nothing; leave out --device, --nproc and --most")
        if out is None:
            out = calibrate.default_place(calibrate.CUDA, options.system)
            calibrate.check_place(out, options.force)
        return calibrate.import_system(options.system, out)

    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cuda" and not gpus:
        raise UserError("--device: expected a CUDA device, found none; set --device to cpu or auto")
    kind = calibrate.CUDA if gpus and options.device != "cpu" else calibrate.CPU
    most = gpus if kind == calibrate.CUDA else os.cpu_count() or 1
    ranks = options.nproc or (gpus if kind == calibrate.CUDA else min(RANKS, most))
    if ranks > most:
        of = "GPUs" if kind == calibrate.CUDA else "cores"
        raise UserError(f"--nproc: expected at most the {most} {of} of this machine, found {ranks}")
    if out is None:
        out = calibrate.default_place(kind)
        calibrate.check_place(out, options.force)
    return calibrate.calibrate(out, ranks, kind, options.most)


def _add_options(parser: Parser) -> None:
    parser.usage = (
        "shardwright calibrate [--out FILE.toml] [--force] [--device auto|cpu|cuda] [--nproc N]\n"
        "                             [--most PART] [--debug]\n"
        "       shardwright calibrate --import SYSTEM [--out FILE.toml] [--force] [--debug]"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE.toml",
        help="the file to write, for `shardwright plan JOB.toml --on 8x./FILE.toml`; default: the name of the device, "
        "in this folder",
    )  # fmt: skip
    parser.add_argument(
        "--import", dest="system", metavar="SYSTEM",
        help="measure nothing, and take the tables of a system such as h100_sxm from the installed package "
        "aiconfigurator-core",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="measure the GPUs of this machine, or its CPU; auto: GPUs if there are any (default)",
    )  # fmt: skip
    parser.add_argument(
        "--nproc", metavar="N", type=integer(1),
        help="ranks that measure at the same time; default: as many as GPUs, on the CPU 2 of one thread each",
    )  # fmt: skip
    parser.add_argument(
        "--most", metavar="PART", type=number(0), default=MOST,
        help="the part by which repeated measurements may differ; if they do more, nothing is written (default: 0.15)",
    )  # fmt: skip


COMMAND = Command(
    "calibrate",
    "measure this machine, for plans with its times",
    _add_options,
    _run,
)
