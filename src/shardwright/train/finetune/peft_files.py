"""Adapters in the file format of peft: adapter_config.json and adapter_model.safetensors with peft's names.

peft itself is not needed. No rank holds more than one whole parameter: the files are written and read by
``save_pretrained`` and ``load_pretrained`` with a key map.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.checkpoint import KeyMap, open_stored, ranks_of, source_of, write_json, write_model
from shardwright.engine import OtherRankFailed
from shardwright.train.config.sections.finetune import FinetuneConfig
from shardwright.train.config.shapes.hub import is_hub_name
from shardwright.train.errors import UserError, as_user_errors
from shardwright.train.finetune.adapters import adapted_layers, is_adapter, trained_names
from shardwright.train.finetune.selection import is_mamba_output
from shardwright.train.models.foreign.module import ForeignModel
from shardwright.train.run.folder import RunFolder

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
OLD_WEIGHTS_FILE = "adapter_model.bin"
PREFIX = "base_model.model."
"""Prefix that peft puts before the names of the model that it wraps."""
_ENDS = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "lora_magnitude": "lora_magnitude_vector",
}
#: Names of the layers of experts in files of models whose experts transformers fuses when it reads them.
_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj"})
#: Keys of peft's configuration whose other values change what the adapters do, with the values that are supported here.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    # Others change the base, too (pissa, olora, corda, loftq, lora_ga).
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}


@dataclass(frozen=True)
class _Names:
    """The names in a file of adapters.

    Attributes:
        keys: by name of each parameter that the file holds, its key.
        targets: names of the adapted layers in the other model, or their last parts where these are enough.
        modules: names there of the modules whose parameters the file holds in full.
        copies: keys of tied parameters under their further names, and the key of the first name.
    """

    keys: dict[str, str]
    targets: list[str]
    modules: list[str]
    copies: dict[str, str]

    def key_map(self, name: str) -> str | None:
        return self.keys.get(name)


def write_adapters(
    model: nn.Module,
    folder: str | os.PathLike[str],
    settings: FinetuneConfig,
    *,
    key_map: KeyMap | None = None,
    base: str = "",
    task: str | None = "CAUSAL_LM",
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model's adapters, and the parameters in ``train_also``, into a folder that peft reads.

        write_adapters(model, "adapters", settings, key_map=hugging_face.key_map(shape), base="llama-folder")

    Called by every rank, between steps; the first one writes. The folder gets its name when it is complete.

    Args:
        model: adapted; plain or sharded.
        folder: must be new or empty.
        settings: the section `[finetune]` that the model was adapted with.
        key_map: names of the model's parameters in the base's own files, as for ``save_pretrained``. Default: equal.
        base: folder or hub name of the base, for peft's ``base_model_name_or_path``. The revision in a hub name
            ``owner/model@revision`` becomes peft's ``revision``.
        task: peft's ``task_type``. None: the base is a module that no library knows.
        dtype: floating-point tensors are converted to this dtype. Default: as the model has them.

    Raises:
        UserError: the folder is not empty or cannot be written, a trained parameter has no place in the format, or peft
            would take the adapters of a layer for those of experts.
    """
    final = Path(folder).absolute()
    names = _names(model, key_map)
    _check_peft_keeps(model)
    ranks_of(model).run_own(lambda: _check_place(final), others_raise=OtherRankFailed)

    def finish(partial: Path) -> None:
        os.replace(partial / "model.safetensors", partial / WEIGHTS_FILE)
        write_json(partial / CONFIG_FILE, _config(settings, names, base, task))

    try:
        write_model(
            model,
            final,
            key_map=names.key_map,
            max_shard_size=1 << 60,
            dtype=dtype,
            copies=names.copies,
            add_files=finish,
        )
    except OSError as error:
        raise UserError(f"{final}: cannot write: {error}; choose another folder") from error


def _check_peft_keeps(model: nn.Module) -> None:
    """Raise if peft would move adapters of linear layers to the fused experts of a model of transformers.

    peft (0.21, ``_convert_peft_config_moe``) does so with every target of such a name, also with a whole one.
    """
    inner = model.model if isinstance(model, ForeignModel) else model
    kind = getattr(getattr(inner, "config", None), "model_type", None)
    transformers = sys.modules.get("transformers.conversion_mapping")
    patterns: Mapping[str, str] = getattr(transformers, "_MODEL_TO_CONVERSION_PATTERN", {})
    if patterns.get(str(kind)) != "qwen2_moe":
        return
    for name, _ in adapted_layers(model):
        if name.rpartition(".")[2] in _EXPERTS:
            raise UserError(
                f"finetune.targets: peft takes adapters on {name!r} for adapters of experts, because experts of model "
                f"type {kind!r} have layers of this name; export the merged model instead, or leave these layers out "
                "of finetune.targets"
            )


def _check_place(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(
            f"{folder}: expected a new or empty folder for adapters, found files; choose another one"
        )


def read_adapters(
    model: nn.Module,
    folder: str | os.PathLike[str],
    settings: FinetuneConfig,
    *,
    key_map: KeyMap | None = None,
) -> None:
    """Read adapters that peft or :func:`write_adapters` wrote into an adapted model, sharded or not.

    Called by every rank. Each rank reads its part. Arguments are those of :func:`write_adapters`.

    Raises:
        UserError: there are no such files, they use a feature that is not supported, or they belong to another model
            or other settings. The error names the first difference, and the model is unchanged.
    """
    path = Path(folder)
    names = _names(model, key_map)
    # The files may be missing on one host alone. Then no other rank may wait in the collectives of load_pretrained.
    file = ranks_of(model).run_own(
        lambda: _checked_file(model, path, settings, names), others_raise=UserError
    )
    with as_user_errors(ValueError, OSError, prefix=f"{file}: cannot read the adapters: "):
        sw.load_pretrained(model, file, key_map=names.key_map, allow_unexpected=list(names.copies))


def _checked_file(model: nn.Module, folder: Path, settings: FinetuneConfig, names: _Names) -> Path:
    """Return the file of weights, which fits the model and the settings. Raises as :func:`read_adapters`."""
    _check_settings(folder, settings)
    file = _weights_file(folder)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name in names.keys}
    with as_user_errors(ValueError, OSError, prefix=f"{file}: cannot read the adapters: "):
        stored = open_stored(file)
    expected = {key: shapes[name] for name, key in names.keys.items()}
    expected |= {key: expected[first] for key, first in names.copies.items()}
    _check_tensors(file, {key: tuple(each.shape) for key, each in stored.items()}, expected)
    for key, first in names.copies.items():
        if not stored[key].equals(stored[first]):
            raise UserError(
                f"{file}: expected equal values of {first} and {key}, which the model ties, found others; these "
                "adapters were trained on a model that does not tie them"
            )
    return file


def base_in(folder: str | os.PathLike[str]) -> str | None:
    """Return the folder or hub name of the base in an adapter_config.json; None if it names none.

    Raises:
        UserError: there is no adapter_config.json, or it asks for a feature that is not supported here.
    """
    name = _read_config(Path(folder)).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


# -- names -------------------------------------------------------------------------------------------------------------


def _names(model: nn.Module, key_map: KeyMap | None) -> _Names:
    layers = dict(adapted_layers(model))
    if not layers:
        raise UserError("finetune.method: expected a model with adapters, found none; set method to 'lora'")
    keys: dict[str, str] = {}
    targets: dict[str, str] = {}
    for name, layer in layers.items():
        if is_mamba_output(model, name):
            raise UserError(
                f"finetune.targets: peft refuses adapters on {name!r}, the output of a Mamba layer; export the merged "
                "model instead"
            )
        targets[name] = _module_key(f"{name}.weight", key_map)
        for own in _ENDS:
            if getattr(layer, own) is not None:
                keys[f"{name}.{own}"] = f"{PREFIX}{targets[name]}.{_ENDS[own]}"
    modules: dict[str, None] = {}
    for name in trained_names(model):
        if is_adapter(name):
            continue
        owner = name.rpartition(".")[0]
        inside = next((other for other in layers if other == owner or other.startswith(f"{owner}.")), None)
        if inside is not None:
            raise UserError(
                f"finetune.train_also: peft's files cannot hold {name!r}, since its module also has adapters "
                f"({inside}); export the merged model instead"
            )
        modules[_module_key(name, key_map)] = None
        # peft reads whole modules, also the parameters of them that are frozen.
        for each, _ in model.get_submodule(owner).named_parameters():
            keys[f"{owner}.{each}"] = PREFIX + _key(f"{owner}.{each}", key_map)
    first_key: dict[int, str] = {}
    copies: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in keys:
            first_key[id(parameter)] = keys[name]
        elif id(parameter) in first_key:
            copies[PREFIX + _key(name, key_map)] = first_key[id(parameter)]
    return _Names(keys, _short(model, targets, key_map), list(modules), copies)


def _key(name: str, key_map: KeyMap | None) -> str:
    source = source_of(key_map, name)
    if isinstance(source, str):
        return source
    raise UserError(
        f"finetune: peft's files cannot hold {name!r}, which the base stores as {source!r}; export the merged model "
        "instead"
    )


def _module_key(name: str, key_map: KeyMap | None) -> str:
    return _key(name, key_map).rpartition(".")[0]


def _short(model: nn.Module, targets: Mapping[str, str], key_map: KeyMap | None) -> list[str]:
    """Last parts of names, if all linear layers with such a name are adapted; else whole names."""
    ends = {key.rpartition(".")[2] for key in targets.values()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in targets:
            source = source_of(key_map, f"{name}.weight")
            if isinstance(source, str) and source.split(".")[-2:-1] and source.split(".")[-2] in ends:
                return sorted(targets.values())
    return sorted(ends)


# -- adapter_config.json -----------------------------------------------------------------------------------------------


def _config(settings: FinetuneConfig, names: _Names, base: str, task: str | None) -> dict[str, Any]:
    alpha, revision = settings.alpha, ""
    if is_hub_name(base) and not os.path.isdir(base):
        base, _, revision = base.partition("@")
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base or None,
        "revision": revision or None,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "use_dora": settings.method == "dora",
        "target_modules": names.targets,
        "modules_to_save": names.modules or None,
        "ensure_weight_tying": bool(names.copies),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        way = "correct finetune.adapters"
        if RunFolder(folder).exists():
            way = f"write the adapters of this run with shardwright export --adapters {folder} DIR, and set that folder"
        raise UserError(
            f"{folder}: expected a folder of adapters, found no {CONFIG_FILE} in it; {way}"
        ) from None
    except NotADirectoryError:
        raise UserError(
            f"{folder}: expected a folder of adapters, found a file; correct finetune.adapters"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: expected JSON, found a file that cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: expected a table, found {config!r}")
    for key, supported in _SUPPORTED.items():
        value = config.get(key, supported[0])
        if value not in supported:
            raise UserError(
                f"{file}: {key}: expected {supported[0]!r}, found {value!r}; such adapters are not supported. Merge "
                "them with peft (merge_and_unload) and start from the merged model"
            )
    for key in ("r", "lora_alpha"):
        if isinstance(config.get(key), bool) or not isinstance(config.get(key), int | float):
            raise UserError(f"{file}: {key}: expected a number, found {config.get(key)!r}")
    return config


def _check_settings(folder: Path, settings: FinetuneConfig) -> None:
    config = _read_config(folder)
    pairs: list[tuple[str, Any, Any]] = [
        ("method", "dora" if config.get("use_dora") else "lora", settings.method),
        ("rank", config["r"], settings.rank),
        ("alpha", config["lora_alpha"], settings.alpha),
        ("rslora", bool(config.get("use_rslora")), settings.rslora),
    ]
    for key, stored, expected in pairs:
        if stored != expected:
            raise UserError(
                f"finetune.{key}: the adapters in {folder} have {stored!r}, found {expected!r}; set {key} to "
                f"{stored!r}"
            )


def _weights_file(folder: Path) -> Path:
    for name in (WEIGHTS_FILE, OLD_WEIGHTS_FILE):
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder}: expected {WEIGHTS_FILE}, found no such file beside {CONFIG_FILE}")


Shape = tuple[int, ...]


def _check_tensors(file: Path, stored: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Raise for the first tensor that only one side has, or that has another shape."""
    another = "these are adapters of another model, or finetune.targets or train_also differ"
    for key, shape in expected.items():
        if stored.get(key) != shape:
            found = f"shape {list(stored[key])}" if key in stored else "no such tensor"
            raise UserError(f"{file}: expected {key} of shape {list(shape)}, found {found}; {another}")
    for key, shape in stored.items():
        if key not in expected:
            raise UserError(f"{file}: expected no {key}, found one of shape {list(shape)}; {another}")
