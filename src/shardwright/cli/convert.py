"""`shardwright convert`."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser, wants_traceback
from shardwright.common.errors import Damaged
from shardwright.train.errors import UserError, counted
from shardwright.train.report.progress import to_stderr

if TYPE_CHECKING:
    from shardwright.checkpoint import Rule

FORMS = ("shardwright", "safetensors", "dcp", "torch")
DTYPES = ("float32", "bfloat16", "float16")
_BY_SUFFIX = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


def _run(call: Call) -> int:
    import torch

    from shardwright.checkpoint import convert_checkpoint

    options = call.options
    source, destination = options.source, options.destination
    to = options.to or _guessed(Path(destination))
    _check_options(options, to)
    _refuse_run(source)
    rules = [_rule(text) for text in options.key_map]
    try:
        key_map, config = (None, None) if rules else _names(options, source, to)
        converted = convert_checkpoint(
            source,
            destination,
            to,
            key=options.key,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            key_map=key_map,
            rules=rules,
            config=config,
            max_shard_size=options.max_shard_size or "5 GB",
        )
    except Damaged as error:
        if wants_traceback(call.arguments):
            traceback.print_exc()
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except OSError as error:
        raise UserError(_failure(error, source, destination)) from error
    except ValueError as error:
        raise UserError(f"convert: {error}") from error
    if converted.left_out:
        reason = "; safetensors hold the tensors of a model only" if to == "safetensors" else ""
        to_stderr(f"left out: {_abbreviated(sorted(converted.left_out))}{reason}")
    nbytes = converted.nbytes
    size = f"{counted(converted.tensors, 'tensor')}, "
    size += f"{nbytes / 1e6:.1f} MB" if nbytes >= 10**5 else counted(nbytes, "byte")
    print(f"{destination}: {size}; {_reader(to, destination, config)}")
    return 0


def _failure(error: OSError, source: str, destination: str) -> str:
    from shardwright.train.run.folder import checkpoints_near
    from shardwright.train.run.writing import unwritable

    if error.errno is None:  # of our own
        is_missing = "://" not in source and not os.path.lexists(source)
        return f"{error}{checkpoints_near(Path(source))}" if is_missing else str(error)
    if error.filename and Path(source) in (Path(error.filename), *Path(error.filename).parents):
        return f"{error.filename}: cannot read: {error.strerror}"
    return unwritable(Path(destination), error)


def _abbreviated(keys: Any) -> str:
    from shardwright.checkpoint import abbreviated

    # A name in a file can hold characters that change the terminal.
    return abbreviated([key if key.isprintable() else ascii(key) for key in keys])


def _guessed(destination: Path) -> str:
    if destination.suffix not in _BY_SUFFIX:
        raise UserError(
            f"--to: expected one of {', '.join(FORMS)}, found none, and the name {destination.name} does not say which"
        )
    return _BY_SUFFIX[destination.suffix]


def _check_options(options: Any, to: str) -> None:
    suffixes = [suffix for suffix, form in _BY_SUFFIX.items() if form == "torch"]
    destination = Path(options.destination)
    if to == "torch" and destination.suffix not in suffixes:
        raise UserError(
            f"DESTINATION: expected the name of a file ending in {', '.join(suffixes)} for --to torch, found "
            f"{destination.name}"
        )
    if _BY_SUFFIX.get(destination.suffix, to) != to:
        raise UserError(
            f"--to: expected a form for {destination.name}, found {to}; choose another name or form"
        )
    if to != "safetensors":
        only = {
            "--dtype": options.dtype,
            "--max-shard-size": options.max_shard_size,
            "--stored-names": options.stored_names,
        }
        for name, value in only.items():
            if value:
                raise UserError(f"{name}: expected --to safetensors with it, found --to {to}; leave it out")
    if options.max_shard_size and destination.suffix == ".safetensors":
        raise UserError(
            "--max-shard-size: expected a folder as DESTINATION, found the name of one file; leave it out"
        )
    if options.stored_names and options.key_map:
        raise UserError("--stored-names: expected none with --key-map; leave one of them out")


def _refuse_run(source: str) -> None:
    """Raise UserError for the folder of a run: one of its checkpoints can be converted."""
    from shardwright.train.run.folder import RunFolder
    from shardwright.train.run.position import saved_steps, step_folder

    run = RunFolder(Path(source))
    if run.exists():
        steps = saved_steps(run.checkpoints)
        example = step_folder(run.checkpoints, steps[0]) if steps else run.checkpoints / "step-N"
        raise UserError(f"convert: {source} is a run. Give one of its checkpoints, such as {example}")


def _rule(text: str) -> Rule:
    from shardwright.checkpoint import Rule

    old, equals, new = text.partition("=")
    if not old or not equals or (new and new.count("*") != old.count("*")):
        raise UserError(
            f"--key-map: expected OLD=NEW with as many * on both sides, or OLD= to leave tensors out, found {text!r}"
        )
    return Rule(old, new)


def _names(options: Any, source: str, to: str) -> tuple[Any, Any]:
    """Return the key map and the content of config.json."""
    from shardwright.train.commands.convert import names_of_run

    if to != "safetensors" or options.stored_names or options.key not in (None, "model"):
        return None, None
    names = None if "://" in source else names_of_run(Path(source))
    if names is None:
        return None, None
    if names.reason:
        to_stderr(f"the tensors keep their names in the checkpoint: {names.reason}")
    return names.key_map, names.config


def _reader(to: str, destination: str, config: dict[str, Any] | None) -> str:
    """Return the call that reads the result, for a message."""
    text = repr(destination)
    if to == "shardwright":
        return f"shardwright.load_checkpoint({text}, model) reads it"
    if to == "dcp":
        return f"torch.distributed.checkpoint.load(state, checkpoint_id={text}) reads it"
    if to == "torch":
        return f"torch.load({text}, weights_only=True) reads it"
    if Path(destination).suffix == ".safetensors":
        return f"safetensors.torch.load_file({text}) reads it"
    if config is not None and config["model_type"] != "shardwright_hybrid":
        return f"transformers.AutoModelForCausalLM.from_pretrained({text}) reads it"
    return f"shardwright.load_pretrained(model, {text}) reads it"


def _add_options(parser: Parser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a checkpoint of shardwright (runs/NAME/checkpoints/step-N, or a URL such as s3://bucket/step-N), a "
        "folder of torch.distributed.checkpoint, safetensors (file, index or folder), or a file of torch.save",
    )
    parser.add_argument(
        "destination",
        metavar="DESTINATION",
        help="the new folder, file or, for --to shardwright, URL; it must not exist yet",
    )
    parser.add_argument(
        "--to",
        choices=FORMS,
        help="form of DESTINATION (default: by its name, if that ends in .safetensors, .pt, .pth or .bin)",
    )
    parser.add_argument(
        "--key",
        metavar="KEY",
        help="write only this part of SOURCE, such as model (the default for safetensors) or optimizer",
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", choices=DTYPES,
        help="float32, bfloat16 or float16 for floating-point tensors of safetensors (default: as stored)",
    )  # fmt: skip
    parser.add_argument(
        "--key-map",
        metavar="OLD=NEW",
        action="append",
        default=[],
        help="another name for tensors; * stands for any text, such as 'layers.*.wq=h.*.q_proj'; the first rule that "
        "fits a name counts; 'OLD=' leaves tensors out; can be repeated",
    )
    parser.add_argument(
        "--stored-names",
        action="store_true",
        help="keep the names in the checkpoint of a run (default for safetensors: Hugging Face's names)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help='bytes in a file of safetensors, such as "5 GB" (the default)',
    )


COMMAND = Command(
    "convert", "convert a checkpoint to or from safetensors, DCP or torch.save", _add_options, _run
)
