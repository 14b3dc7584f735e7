"""`shardwright export`: the checkpoint of a run as a folder of Hugging Face, with tokenizer and generation settings.

Or as safetensors with the names of a user's module, or the adapters alone as files of peft. One process reads one
tensor after another, so the model never is in memory as a whole. For a run with adapters it holds the frozen base once,
and folds one layer at a time. The folder gets its name when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint import (
    bytes_of,
    open_stored,
    stored_model_of,
    write_json,
    write_stored_model,
)
from shardwright.train.config.shapes.presets import Shape
from shardwright.train.config.values import BuildSettings
from shardwright.train.data.dataset import read_template
from shardwright.train.data.tokens import byte_tokenizer
from shardwright.train.data.tokens.tokenizers import CONFIG, FILE, Tokenizer, open_tokenizer
from shardwright.train.errors import UserError, as_user_errors
from shardwright.train.finetune import adapters
from shardwright.train.finetune.base import base_of, check_same_base
from shardwright.train.finetune.finetuning import peft_names
from shardwright.train.finetune.peft_files import WEIGHTS_FILE, write_adapters
from shardwright.train.models import hugging_face
from shardwright.train.models.build import model_of
from shardwright.train.models.foreign.module import module_names
from shardwright.train.models.generation_settings import generation_settings, with_ids
from shardwright.train.models.offers import offers_of
from shardwright.train.run.folder import RunFolder, checkpoints_of
from shardwright.train.run.position import Position
from shardwright.train.run.same_job import check_same_tokenizer, recorded_tokenizer
from shardwright.train.run.writing import unwritable
from shardwright.train.step import loading
from shardwright.train.step.loading import Read

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FILES_BESIDE_TOKENIZER = (
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        folder, step: the new folder, and the optimizer step of its weights.
        tensors, nbytes: number of stored tensors, and their bytes.
        reader: how another program reads the folder, in words.
    """

    folder: Path
    step: int
    tensors: int
    nbytes: int
    reader: str


def export(
    run: Path,
    folder: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5 GB",
    say: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write a checkpoint of a run as safetensors with config.json, generation_config.json and tokenizer files.

    A kind of model without Hugging Face's names, such as "python", gets safetensors with the names of its own module,
    and tokenizer files.

    Args:
        run: the folder of a run, of any engine and any number of ranks.
        folder: the new folder.
        step: the step of the checkpoint. None: the newest whole one.
        dtype: a name in `DTYPES` for floating-point tensors. None: as the checkpoint has them.
        max_shard_size: bytes of tensors in a file, such as "5 GB".
        say: gets notices, such as a damaged checkpoint that is passed over.

    Raises:
        UserError: `run` is no run or has no whole checkpoint, `folder` exists or cannot be written, or the tokenizer
            is not the one of the run or does not belong to the model. Nothing is written then.
    """
    chosen = _dtype_named(dtype)
    with as_user_errors(ValueError):
        bytes_of(max_shard_size, "--max-shard-size")
    _check_new(folder)
    source = RunFolder(run)
    record, config = source.record(), source.config()
    name = recorded_tokenizer(record, config.data)
    template = read_template(config.data, ", which the run was trained with", "restore the file")
    tokenizer = open_tokenizer(name)
    check_same_tokenizer(source, name, tokenizer.fingerprint)
    shape = config.model.shape()
    check_vocabulary(tokenizer.vocab_size, shape.vocab_size)
    named = offers_of(shape).key_map is not None
    values = hugging_face.config_json(shape) if named else None
    generation = generation_settings(config.model, tokenizer, say) if named else None
    merges = config.finetune.has_base
    model = _with_base(config.for_building) if merges else _without_values(shape)
    if not merges and any(not parameter.requires_grad for parameter in model.parameters()):
        model = _with_base(config.for_building)
    key_map = hugging_face.key_map(shape) if named else module_names(model)
    shapes = loading.shapes_of(model)

    def write(position: Position, read: Read) -> Exported:
        if merges:
            _read_adapters(model, config.for_building, source, read)
        with as_user_errors(ValueError, prefix="export: "):
            stored = stored_model_of(
                model, key_map, chosen, with_values=False, keeps=lambda name: not adapters.is_adapter(name)
            )
        layers = {id(layer.weight): layer for _, layer in adapters.adapted_layers(model)}

        def read_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            if merges:
                return {name: _folded(tensor, layers, chosen) for name, tensor in tensors.items()}
            saved = {
                name: torch.empty_like(tensor, device="cpu")
                for name, tensor in tensors.items()
                if name in shapes
            }
            if saved:
                read(saved)
            return {name: tensor.detach() for name, tensor in tensors.items()} | saved

        def add_files(partial: Path) -> None:
            if generation is not None:
                write_json(partial / "generation_config.json", generation)
            write_tokenizer(partial, tokenizer, config.train.seq_len, template or tokenizer.chat_template)
            if template is not None:
                (partial / "chat_template.jinja").write_text(template, encoding="utf-8")

        settings = (
            None
            if values is None
            else {**with_ids(values, config.model, tokenizer), "dtype": stored.main_dtype()}
        )
        write_stored_model(
            folder, stored, read_tensors, max_shard_size=max_shard_size, config=settings, add_files=add_files
        )
        nbytes = stored.total_bytes
        reader = _reader_of(model, folder) if values is None else _reader_by_type(values["model_type"])
        return Exported(folder, position.step, len(stored.keys), nbytes, reader)

    try:
        return loading.with_weights(checkpoints_of(source, config.checkpoint), step, shapes, write, say)
    except OSError as error:
        raise UserError(unwritable(folder, error)) from error


def export_adapters(
    run: Path,
    folder: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write the adapters of a run's checkpoint, and the parameters in `finetune.train_also`, as files of peft.

    Args:
        run, folder, step, dtype, say: as for :func:`export`.

    Raises:
        UserError: as :func:`export`, or the run has no adapters, or peft's files cannot hold them.
    """
    chosen = _dtype_named(dtype)
    _check_new(folder)
    source = RunFolder(run)
    source.record()  # raises an error for a folder that is no run
    config = source.config()
    if config.finetune.method == "full":
        raise UserError(
            f'--adapters: expected a run with finetune.method "lora" or "dora", found "full" in {run}; leave out '
            "--adapters to export the whole model"
        )
    shape = config.model.shape()
    settings = config.for_building
    model = _with_base(settings)
    base = str(config.model.path) if getattr(shape, "weights", None) == "pretrained" else ""
    task = None if offers_of(shape).key_map is None else "CAUSAL_LM"

    def write(position: Position, read: Read) -> Exported:
        _read_adapters(model, settings, source, read)
        names = peft_names(model, shape)
        write_adapters(model, folder, config.finetune, key_map=names, base=base, task=task, dtype=chosen)
        stored = open_stored(folder / WEIGHTS_FILE).values()
        nbytes = sum(each.shape.numel() * each.dtype.itemsize for each in stored)
        return Exported(
            folder, position.step, len(stored), nbytes, _reader_of_adapters(settings, base, folder)
        )

    return loading.with_weights(
        checkpoints_of(source, config.checkpoint), step, loading.shapes_of(model), write, say
    )


def _dtype_named(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise UserError(f"--dtype: expected {', '.join(DTYPES)}, found {name}")
    return None if name is None else DTYPES[name]


def _check_new(folder: Path) -> None:
    if os.path.lexists(folder):
        raise UserError(f"export: expected a new folder, found that {folder} exists; choose another name")


def _without_values(shape: Shape) -> nn.Module:
    with torch.device("meta"):
        return model_of(shape)


def _with_base(settings: BuildSettings) -> nn.Module:
    """Return the model with its frozen parameters, which no checkpoint holds, and with the run's adapters before
    training."""
    torch.manual_seed(settings.seed)
    model = model_of(settings.model.shape())
    model.read_weights()
    adapters.adapt(model, settings.finetune, settings.seed)
    return model


def _read_adapters(model: nn.Module, settings: BuildSettings, source: RunFolder, read: Read) -> None:
    """Give a model the trained values of a checkpoint. Raises UserError if its base is not that of the run."""
    shapes = loading.shapes_of(model)
    values = {name: tensor for name, tensor in model.state_dict().items() if name in shapes}
    read(values)
    model.load_state_dict(values, strict=False)
    check_same_base(source.base_file, base_of(model, settings.source))


def _folded(tensor: Tensor, layers: Mapping[int, adapters.Adapter], dtype: torch.dtype | None) -> Tensor:
    """Return a tensor of the model, with the adapter of its layer folded in.

    Such a weight is rounded to the dtype of the export at once: rounded to that of a narrower base before, it would
    lose a part of what the adapters have learnt. `layers`: by the identity of their weights.
    """
    layer = layers.get(id(tensor))
    return tensor.detach() if layer is None else layer.merged(dtype)


def _reader_by_type(model_type: str) -> str:
    if model_type == "shardwright_hybrid":
        return "only shardwright reads this kind of model"
    return "transformers.AutoModelForCausalLM.from_pretrained reads it"


def reader_by_kind(shape: Shape) -> str | None:
    """Return the model_type in the config.json of an export, or None if the kind of the model has no config.json."""
    if offers_of(shape).key_map is None:
        return None
    return str(hugging_face.config_json(shape)["model_type"])


def _reader_of(model: nn.Module, folder: Path) -> str:
    """Return the call that loads safetensors with the names of a module.

    torch's ``load_state_dict`` reports the further names of tied weights as missing, so it is not for these.
    """
    file = folder / "model.safetensors"
    names = dict(model.named_parameters(remove_duplicate=False))
    load = f"shardwright.load_pretrained(module, {str(folder)!r})"
    if file.exists() and len(set(map(id, names.values()))) == len(names):
        load = f"module.load_state_dict(safetensors.torch.load_file({str(file)!r}))"
    return f"with the names of your module, and the tokenizer; load the weights with {load}"


def _reader_of_adapters(settings: BuildSettings, base: str, folder: Path) -> str:
    if base:
        read = f"peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r})"
        return f"{read} reads these adapters and their base {base}"
    return (
        f"peft.PeftModel.from_pretrained(base, {str(folder)!r}) reads these adapters; no folder has their base, which "
        f"is drawn from {settings.source}"
    )


def in_words(exported: Exported) -> str:
    """Return the line that the command prints."""
    size = f"{exported.tensors} tensors, {exported.nbytes / 1e6:.1f} MB"
    return f"{exported.folder}: step {exported.step}, {size}; {exported.reader}"


# ---------------------------------------------------------------------------------------------------------------
# Tokenizer and settings


def check_vocabulary(tokenizer: int, model: int) -> None:
    """Raise a UserError if the tokenizer has more ids than the model."""
    if tokenizer > model:
        raise UserError(
            f"data.tokenizer: expected at most the model's {model} ids, found a tokenizer with {tokenizer}; it does "
            "not belong to this model"
        )


def write_tokenizer(folder: Path, tokenizer: Tokenizer, longest: int, template: str | None = None) -> None:
    """Put the tokenizer's files into a folder, under the names that transformers looks for. `template`: the chat
    template beside them."""
    if tokenizer.file is None:
        write_json(folder / FILE, byte_tokenizer.tokenizer_json())
        write_json(folder / CONFIG, byte_tokenizer.tokenizer_config(longest))
        return
    shutil.copyfile(tokenizer.file, folder / FILE)
    for name in FILES_BESIDE_TOKENIZER:
        if (tokenizer.file.parent / name).is_file():
            shutil.copyfile(tokenizer.file.parent / name, folder / name)
    if not (folder / CONFIG).exists():
        write_json(folder / CONFIG, tokenizer_config(tokenizer, template))


def tokenizer_config(tokenizer: Tokenizer, template: str | None = None) -> dict[str, Any]:
    """Return the content of tokenizer_config.json for a tokenizer.json without one.

    Without it transformers takes the class of tokenizer that the model type has, and no tokens that begin and end a
    text. A name that the chat template uses stays without a text, as it was in training.
    """
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    marks = {"bos_token": tokenizer.begin_token, "eos_token": tokenizer.end_token}
    found = {key: text for key, text in marks.items() if text is not None and key not in (template or "")}
    return {**values, **found, **tokenizer.names}
