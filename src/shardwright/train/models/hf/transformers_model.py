"""Causal language models of transformers as models of the trainer. transformers is imported when a model is made.

The model itself is transformers' own class, unchanged. Code from the hub is never executed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.checkpoint import (
    SAFETENSORS_INDEX,
    FileTensor,
    TensorSource,
    load_pretrained,
    open_stored,
    ranks_of,
    stored_key_map,
    transformers_key_map,
)
from shardwright.engine import OtherRankFailed
from shardwright.train.config.shapes.foreign import CONFIG, FILES_OF_PATH, HuggingFaceShape, is_folder
from shardwright.train.config.shapes.hub import fetch_file, fetch_files, fetch_first
from shardwright.train.config.shapes.rope_tables import one_place
from shardwright.train.errors import UserError
from shardwright.train.models.foreign.module import ADAPTER_PARAMETERS, PREFIX, ForeignModel
from shardwright.train.models.foreign.units import Units
from shardwright.train.models.hf.building import build, config_of, imported_transformers, units_in
from shardwright.train.models.hf.context import Divided
from shardwright.train.models.hf.documents import Separation, separation_of
from shardwright.train.models.hf.flops import Uncountable, flops_of_model
from shardwright.train.models.language_model import draws_numbers
from shardwright.train.models.packed import IGNORED, within_trained

_WEIGHTS = (SAFETENSORS_INDEX, "model.safetensors")
#: Tensors of which a fingerprint has values. Each is a page of a file, which may be on a slow disk.
_SAMPLED = 256
#: Keys of configurations: how many experts a layer has, and how many of them a token uses.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "moe_k", "top_k")


class Routing(NamedTuple):
    """Values from which a balance loss is computed."""

    loss: Callable[..., Tensor]  #: of transformers
    top_k: int
    logits: tuple[Tensor, ...] | None  #: of each layer of experts: [B * S, E]


class HuggingFaceModel(ForeignModel):
    """A causal language model of transformers. Its parameters have transformers' names after "model."."""

    def __init__(self, shape: HuggingFaceShape) -> None:
        """Make the model in float32, on the default device.

        Without values where `shape` has pretrained weights: `read_weights` gives them, or a checkpoint.

        Raises:
            UserError: transformers is not installed, or has no causal language model of this type.
        """
        super().__init__()
        self.config = shape
        self.model = build(shape)
        self.units: Units = units_in(self.model, shape)
        self.tied = self.units.tied
        values = self.model.config.get_text_config()
        self.draws = draws_numbers(self.model) or _has_dropout(values.to_dict())
        self.float32_names = _float32_names(self.model)
        self.divided: Divided | None = None  #: set where ranks divide samples
        self.balance_loss = (
            balance_loss(type(self.model)) if getattr(values, "output_router_logits", False) else None
        )
        if self.balance_loss is not None:
            weight = getattr(values, "router_aux_loss_coef", getattr(values, "aux_loss_coef", 0.0))
            self.auxiliary = {"balance": float(weight)}
            # transformers adds up the loads of a token's experts, so equal loads do not give 1.
            self.meanings = {"balance": f"load of the experts; {self.model.num_experts_per_tok}: all equal"}
            self.whole_graph = False  # transformers' hooks that collect the logits of routers break graphs

    @functools.cached_property
    def separation(self) -> Separation:
        """The way in which forward keeps documents apart. The first use in a process tries a small model of this class.

        Raises:
            UserError: this class mixes them.
        """
        return separation_of(config_of(self.config))

    @property
    def separates(self) -> bool:  # type: ignore[override]
        return bool(self.separation)

    def forward(
        self,
        tokens_BS: Tensor,
        extras: bool = False,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Any:
        """Logits [B, S, V]. With `extras` also the `Routing` of all experts."""
        arguments: dict[str, Any] = {"use_cache": False, "return_dict": True}
        if self.divided is not None:
            arguments |= self.divided.arguments(tokens_BS, documents)
        elif documents is not None:
            dtype = self.model.get_input_embeddings().weight.dtype
            arguments |= self.separation.arguments(documents, positions, dtype)
        if self.balance_loss is not None:
            arguments["output_router_logits"] = extras
        output = self.model(input_ids=tokens_BS, **arguments)
        if not extras:
            return output.logits
        assert self.balance_loss is not None
        logits = output.router_logits
        if self.divided is not None and logits:
            logits = self.divided.whole_logits(logits, len(tokens_BS))
        return output.logits, Routing(self.balance_loss, self.model.num_experts_per_tok, logits)

    @staticmethod
    def auxiliary_sums(extras: Any, targets_BS: Tensor) -> dict[str, Tensor]:
        """balance: transformers' loss over the tokens of a micro-batch up to the last trained one of each sample, for
        each trained token."""
        counted_BS, trained = within_trained(targets_BS), (targets_BS != IGNORED).sum()
        # A mean over no token is not a number, even if it counts for nothing.
        counted_BS = counted_BS | (trained == 0)
        if not extras.logits:  # a layer of experts is not in every model of the class
            return {"balance": torch.zeros((), device=targets_BS.device)}
        logits = tuple(each.flatten(0, -2) for each in extras.logits)
        loss = extras.loss(logits, logits[0].shape[-1], extras.top_k, counted_BS)
        return {"balance": loss.float() * trained}

    def read_weights(self) -> None:
        """Read the safetensors of the model's path: each rank no more than its part.

        Raises:
            UserError: the files do not fit the model, on every rank.
        """
        if self.config.weights != "pretrained":
            return
        computed = [f"{PREFIX}{name}" for name in self.model._keys_to_ignore_on_save or ()]
        # Files may be damaged on one host alone. Then no other rank may wait in the collectives of load_pretrained.
        path, sources, unneeded = ranks_of(self).run_own(
            lambda: places_of_weights(self), others_raise=UserError
        )
        with _as_files_of_path():
            load_pretrained(
                self,
                path,
                key_map=sources,
                allow_missing=[*computed, *(f"*.{name}" for name in ADAPTER_PARAMETERS)],
                allow_unexpected=unneeded,
            )

    counts_frozen = True

    def flops_per_token(self, seq_len: int) -> int:
        """Return the operations of a trace without memory, see `flops`, and those of adapters, whose weights are all
        trained.

        For a model that cannot be traced so: six for each weight that a token is multiplied with, four for a frozen
        one, and 12 x heads x head_dim x length for each attention.
        """
        own = dict(self.model.named_parameters())
        added = sum(6 * p.numel() for name, p in own.items() if _is_adapter(name) and p.ndim == 2)
        frozen = frozenset(name for name, p in own.items() if not p.requires_grad and not _is_adapter(name))
        try:
            return round(flops_of_model(self.config, seq_len, frozen, added > 0) / seq_len) + added
        except Uncountable:
            return self._estimated_flops(seq_len) + added

    def _estimated_flops(self, seq_len: int) -> int:
        values = self.model.config.get_text_config()
        own = [p for name, p in self.model.named_parameters() if not _is_adapter(name)]
        embedding = self.model.get_input_embeddings()
        looked_up = 0 if self.tied or embedding is None else sum(p.numel() for p in embedding.parameters())
        trained = sum(p.numel() for p in own if p.requires_grad and p.ndim > 1)
        weights = sum(p.numel() for p in own if p.ndim > 1)
        # Experts have weights of three dimensions. A token uses only the share of its experts.
        experts = next((n for key in _EXPERTS if (n := getattr(values, key, 0))), 0)
        used = next((n for key in _USED if (n := getattr(values, key, 0))), experts)
        stacked = sum(p.numel() for p in own if experts and p.ndim == 3 and p.shape[0] == experts)
        unused = stacked - stacked * used // experts if experts else 0
        share = (weights - looked_up - unused) / max(1, weights)
        children = [{name for name, _ in block.named_children()} for block in self.blocks()]
        attentions = sum(any("attn" in name or "attention" in name for name in names) for names in children)
        heads = int(getattr(values, "num_attention_heads", 0) or 0)
        head = getattr(values, "head_dim", None) or int(getattr(values, "hidden_size", 0)) // max(1, heads)
        return round(share * (4 * weights + 2 * trained)) + 12 * attentions * heads * int(head) * seq_len


def _is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in ADAPTER_PARAMETERS


_BALANCE_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def balance_loss(of: type[nn.Module]) -> Callable[..., Tensor] | None:
    """Return the function that a class of transformers computes its balance loss with. None: the class adds no such
    loss.

    Raises:
        UserError: the function has other arguments than those of nearly all classes.
    """
    function: Callable[..., Tensor] | None = getattr(
        sys.modules[of.__module__], "load_balancing_loss_func", None
    )
    if function is not None and list(inspect.signature(function).parameters) != _BALANCE_ARGUMENTS:
        raise UserError(
            f"model.path: expected a model whose balance loss takes {', '.join(_BALANCE_ARGUMENTS)}, found the one of "
            f"{of.__name__}; set output_router_logits to false in its {CONFIG}, which trains without this loss"
        )
    return function


# -- building ----------------------------------------------------------------------------------------------------------


def _float32_names(model: Any) -> frozenset[str]:
    """Parameters that transformers itself keeps in float32 beside others in bfloat16, such as routers."""
    parts = [re.escape(part) for part in model._keep_in_fp32_modules_strict or ()]
    if not parts:
        return frozenset()
    pattern = re.compile(rf"(^|\.)({'|'.join(parts)})(\.|$)")
    return frozenset(f"{PREFIX}{name}" for name, _ in model.named_parameters() if pattern.search(name))


def _has_dropout(values: Mapping[str, Any]) -> bool:
    """Return whether a configuration asks for random numbers in training. Heads for other tasks do not count."""
    words = ("drop", "jitter", "noise")
    return any(
        isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        for key, value in values.items()
        if any(word in key for word in words) and not key.startswith(("classifier", "summary"))
    )


# -- weights -----------------------------------------------------------------------------------------------------------


def weights_path(shape: HuggingFaceShape) -> Path:
    """Return the index of the safetensors, or the one file. They are fetched if the path is a name on the hub.

    Raises:
        UserError: there are no such files.
    """
    if is_folder(shape.path):
        folder = Path(shape.path)
        names = {file.name for file in folder.iterdir()}
    else:
        name = shape.resolved().path
        file = fetch_first(name, _WEIGHTS, "model.path")
        if file is not None and file.name == SAFETENSORS_INDEX:
            fetch_files(name, [SAFETENSORS_INDEX, *_files_of(file)], "model.path")
        folder = fetch_file(name, CONFIG, "model.path").parent if file is None else file.parent
        names = {path.name for path in folder.iterdir()} if file is None else {file.name}
    for weights in _WEIGHTS:
        if weights in names:
            return folder / weights
    found = ", ".join(sorted(name for name in names if name.endswith((".bin", ".safetensors", ".pt")))[:3])
    raise UserError(
        f"model.path: expected weights ({' or '.join(_WEIGHTS)}) in {shape.path}, found {found or 'none'}; set a model "
        'that has them, or model.weights = "random" to train from scratch'
    )


def places_of_weights(model: HuggingFaceModel) -> tuple[Path, dict[str, TensorSource], list[str]]:
    """Return the files of a model's weights, where each of its tensors is in them, and keys that it does not need.

    Raises:
        UserError: a file is missing or damaged, or transformers computes weights that no rank can read in parts.
    """
    stored = opened_files(model.config)
    ignored = [re.compile(text) for text in model.model._keys_to_ignore_on_load_unexpected or ()]
    with _as_files_of_path():
        sources = transformers_key_map(model.model, _names(model), stored) or {}
    unneeded = [key for key in stored if any(text.search(key) for text in ignored)]
    return weights_path(model.config), {f"{PREFIX}{name}": each for name, each in sources.items()}, unneeded


@contextlib.contextmanager
def _as_files_of_path() -> Iterator[None]:
    """Errors about files that do not fit the model are UserErrors that name model.path."""
    try:
        yield
    except (ValueError, OSError, OtherRankFailed) as error:
        reason = " ".join(str(error).split())
        # The rest is for callers in Python.
        reason, converts, _ = reason.partition(" Load the model with transformers' ")
        reason = reason.partition(" If names differ, ")[0].rstrip(".")
        advice = "set another model" if converts else f"take {CONFIG} and the weights from the same model"
        raise UserError(f"model.path: {reason}; {advice}") from error


def _files_of(index: Path) -> list[str]:
    """Return the files that an index names; none if it is damaged, which is said when it is opened."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def opened_files(shape: HuggingFaceShape) -> dict[str, FileTensor]:
    """Return the headers of all files of weights.

    Raises:
        UserError: a file is missing or damaged.
    """
    try:
        return open_stored(weights_path(shape))
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"model.path: {reason}; copy or fetch the files of the model again") from error


def fingerprints(shape: HuggingFaceShape) -> dict[str, str]:
    """Return the digest of the files behind `model.path`, under their name in messages."""
    return {FILES_OF_PATH: _fingerprint(shape)}


def _fingerprint(shape: HuggingFaceShape) -> str:
    """Equal for folders with the same model, wherever they are: a digest of config.json, and of pretrained weights the
    names, shapes and dtypes and a few values. For a name on the hub: the name with the commit.

    Raises:
        UserError: a file of weights is missing or damaged.
    """
    if not is_folder(shape.path):
        return shape.resolved().path
    digest = hashlib.sha256(json.dumps(shape.config, sort_keys=True).encode())
    if shape.weights == "pretrained":
        stored = sorted(opened_files(shape).values(), key=lambda each: each.key)
        forms = [(each.key, tuple(each.shape), str(each.dtype)) for each in stored]
        digest.update(repr(forms).encode())
        for each in stored[:: max(1, len(stored) // _SAMPLED)]:
            values = each.view().reshape(-1)
            middle = values.numel() // 2
            digest.update(bytes(values[middle : middle + 16].view(torch.uint8).tolist()))
    return digest.hexdigest()


def _names(model: nn.Module) -> list[str]:
    """Transformers' names of all parameters and buffers of a `HuggingFaceModel`, sharded or not."""
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return [name.removeprefix(PREFIX) for name, _ in tensors]


def key_map(shape: HuggingFaceShape) -> dict[str, TensorSource | None]:
    """Return the keys under which transformers itself would save each tensor of the model of that shape."""
    with torch.device("meta"):
        inner = HuggingFaceModel(shape).model
    tensors = inner.state_dict()
    ties: Mapping[str, str] = inner.all_tied_weights_keys or {}
    keys = (
        stored_key_map(inner, {name: each.shape for name, each in tensors.items() if name not in ties}) or {}
    )
    return {f"{PREFIX}{name}": keys.get(ties.get(name, name), name) for name in tensors}


def config_json(shape: HuggingFaceShape) -> dict[str, Any]:
    """Return the content of config.json beside weights in float32."""
    values = dict(shape.config)
    for key in ("auto_map", "torch_dtype", "_name_or_path"):
        values.pop(key, None)
    values = one_place(values)
    if isinstance(inner := values.get("text_config"), Mapping):
        values["text_config"] = one_place(inner)
    return {**values, "dtype": "float32", "architectures": [_architecture(shape)]}


def _architecture(shape: HuggingFaceShape) -> str:
    imported_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[shape.config["model_type"]]
    return str(name if isinstance(name, str) else name[0])
