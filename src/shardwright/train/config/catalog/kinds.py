"""Kinds of models, for `[model] kind`, and what each offers.

``models/offers.py`` looks up what the kind of a shape offers.

Nothing here imports torch until it is asked for, so that configurations can be checked and `--help` printed at once.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from shardwright.engine.extend import Registry, check_signature
from shardwright.train.config.shapes.foreign import HuggingFaceShape, PythonShape
from shardwright.train.config.shapes.presets import HYBRID_PRESETS, PRESETS, HybridConfig, LlamaConfig, Shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    Plan = dict[str, ParallelStyle]

    from shardwright.checkpoint import TensorSource
    from shardwright.context import Split


def near_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name of the nearest size if the text has a size, such as 7B; else the one with nearly these
    letters."""
    names = list(names)
    if size := _size_of(name):
        sized = {each: number for each in names if (number := _size_of(each))}
        near = min(sized, key=lambda each: abs(math.log(sized[each] / size)), default=None)
        if near is not None and max(sized[near] / size, size / sized[near]) <= 2:
            return near
    lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), lower, 1)
    return lower[close[0]] if close else None


def _size_of(name: str) -> float:
    """Return the number of parameters that a name such as 8B, llama-7b or hybrid:9B ends with; 0: none."""
    match = re.search(r"(?:^|[^0-9A-Za-z.])(\d+(?:\.\d+)?)([MBT])$", name, re.IGNORECASE)
    return float(match[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[match[2].lower()] if match else 0.0


@dataclass(frozen=True)
class Layers:
    """The layers of a model.

    Attributes:
        kinds: a value for each layer, equal for layers that do the same.
        with_these: keys of ``[model]`` and their values for the model with some of the layers, by their numbers; None:
            there is no such model.
    """

    kinds: Sequence[Hashable]
    with_these: Callable[[Sequence[int]], dict[str, Any] | None]


@dataclass(frozen=True)
class Experts:
    """The experts of a model.

    Attributes:
        pattern: its layers, in which an E has experts.
        number: in each such layer.
    """

    pattern: str
    number: int


@dataclass(frozen=True)
class Offers:
    """The functions of a kind of model. Each takes a shape of that kind first, except `divide_samples`.

    A job that needs a function that is None gets an error.

    Attributes:
        model: makes the model, on the default device.
        tensor_plan: what each module becomes under tensor parallelism; with the mesh of spread experts, if any.
        uneven: see the function below; None: no value is wrong.
        key_map: Hugging Face's names of its tensors.
        config_json: what config.json beside them says.
        shapes: by `model_type` of a config.json, the shape that it describes.
        divide_samples: lets ranks divide the samples of a model, which then computes this rank's tokens as with whole
            samples. Takes the model, and the ranks, a ``shardwright.context.Split``. None: no ranks can.
        check: refuses, with a UserError, a job that the model cannot run. It also takes the whole configuration, a
            ``shardwright.train.config.Config``. The launcher and each rank call it, before anything is allocated. It
            may fetch files.
        try_ahead: finds by real computation, and keeps, what the model asks when it is built. Takes the same. A plan
            calls it before its trace, in which nothing is computed.
        expert_layers: the names of the modules that have experts, which `parallel.expert` spreads.
        layers: the layers, if a model with some of them has the same keys.
        fingerprints: digests of the files behind a model, which all ranks must have, by their names in messages.
    """

    model: Callable[[Any], Any]
    tensor_plan: Callable[[Any, DeviceMesh | None], Plan] | None = None
    uneven: Callable[[Any, int, int], list[tuple[str, int, int]]] | None = None
    key_map: Callable[[Any], dict[str, TensorSource | None]] | None = None
    config_json: Callable[[Any], dict[str, Any]] | None = None
    shapes: Mapping[str, Callable[[Mapping[str, Any]], Shape]] = field(default_factory=dict)
    divide_samples: Callable[[Any, Split], None] | None = None
    check: Callable[[Any, Any], None] | None = None
    try_ahead: Callable[[Any, Any], None] | None = None
    expert_layers: Callable[[Any], list[str]] | None = None
    layers: Callable[[Any], Layers] | None = None
    fingerprints: Callable[[Any], dict[str, str]] = lambda shape: {}

    def __post_init__(self) -> None:
        check_signature("Offers: model", self.model, "shape")


BUILT_IN = ("llama", "hybrid", "hf", "python")  #: kinds whose Offers ``models/offers.py`` has
_KIND = "_shardwright_kind"  #: the attribute of a class of shapes that has its kind, also one in no registry


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        name: by which `[model] kind` knows it.
        summary: what it is, in a sentence.
        shape: the dataclass of its shapes, which has at least ``vocab_size`` and ``max_seq_len``. Its fields are keys
            of `[model]`. It belongs to the first kind that is made with it.
        presets: the shapes that have a name, with that name as the key; one is "debug", the default of
            `[model] preset`. Empty: shapes begin with the defaults of the dataclass.
        load: imports what the kind offers. None: a kind of this package, which ``models/offers.py`` knows.
        depth: the key that says how many layers there are, for an error message. Without presets: the key that names
            the model.
        divides_layers: a tensor or expert axis may divide layers; whether one does depends on the Offers.
        no_cuda_graph: the reason why a step of its models is no CUDA graph. Empty: it can be one.
        is_users_code: code of the user makes its models, which can change while the configuration stays.
        experts: the experts of a shape's model; None if it has none.
        has_output_layer: every one of its models says which module makes the logits. Others may.
        predicts_further: whether a shape's model also predicts the token after the next one.
        base: the model of transformers of whose files a shape's model is made: its tokenizer and its settings are
            beside its weights. None for other models.
    """

    name: str
    summary: str
    shape: type[Any]
    presets: Mapping[str, Any]
    load: Callable[[], Offers] | None
    depth: str = ""
    divides_layers: bool = True
    no_cuda_graph: str = ""
    is_users_code: bool = False
    experts: Callable[[Any], Experts | None] = lambda shape: None
    has_output_layer: bool = False
    predicts_further: Callable[[Any], bool] = lambda shape: False
    base: Callable[[Any], HuggingFaceShape | None] = lambda shape: None

    def __post_init__(self) -> None:
        if self.load is None and self.name not in BUILT_IN:
            raise ValueError(f"Kind {self.name!r}: expected a function for load, found None")
        if self.load is not None:
            check_signature(f"Kind {self.name!r}: load", self.load)
        if _KIND not in vars(self.shape):
            setattr(self.shape, _KIND, self)

    @property
    def numbers(self) -> set[str]:
        """The keys that shapes of this kind have."""
        return {each.name for each in fields(self.shape)}

    def shape_of(self, preset: str, values: Mapping[str, Any]) -> Any:
        """Return the shape of a preset with some values replaced.

        Raises:
            ValueError: there is no such preset, or the values do not fit. The message begins with the key.
        """
        if not self.presets:
            if preset != "debug":
                raise ValueError(
                    f"preset: kind {self.name!r} has no presets; expected none, found {preset!r}"
                )
            return self.shape(**values)
        if preset not in self.presets:
            raise ValueError(
                f"preset: expected one of {', '.join(self.presets)} with kind {self.name!r}, found {preset!r}"
                + (f"; did you mean {near!r}?" if (near := near_name(preset, self.presets)) else "")
            )
        return replace(self.presets[preset], **values)

    def type_of(self, key: str) -> Any:
        """Return the type that the shape's class declares for a key."""
        return get_type_hints(self.shape)[key]


def _experts_of_hybrid(shape: HybridConfig) -> Experts | None:
    pattern = shape.pattern + shape.mtp_pattern
    return Experts(pattern, shape.n_experts) if "E" in pattern else None


kinds: Registry[Kind] = Registry(
    "kind of model",
    "models",
    Kind,
    (
        Kind(
            "llama", "Llama 3.", LlamaConfig, PRESETS, None, "model.n_layers", has_output_layer=True
        ),
        Kind(
            "hybrid", "Mamba-2, attention, mixture-of-experts and dense layers in any order.",
            HybridConfig, HYBRID_PRESETS, None, "model.pattern",
            experts=_experts_of_hybrid, has_output_layer=True,
            predicts_further=lambda shape: bool(shape.mtp_pattern),
        ),
        Kind(
            "hf", "Any causal language model of transformers: set model.path.", HuggingFaceShape, {},
            None, "model.path", divides_layers=False,
            no_cuda_graph="models of transformers make masks whose kind depends on values", base=lambda shape: shape,
        ),
        Kind(
            "python", "Your own module: set model.target.", PythonShape, {}, None, "model.target",
            divides_layers=False, is_users_code=True,
        ),
    ),
)  # fmt: skip


def kind_named(name: str) -> Kind:
    """Return the kind that `[model] kind` names.

    Raises:
        ValueError: there is none, or another kind has shapes of its class.
    """
    kind = kinds.get(name)
    for other in (*kinds.known(), vars(kind.shape)[_KIND]):
        if other.shape is kind.shape and other is not kind:
            raise ValueError(
                f"kind: kinds {other.name!r} and {kind.name!r} have the same class of shapes, {kind.shape.__name__}, "
                "by which their models are chosen. Give each kind a dataclass that no other has"
            )
    return kind


def kinds_that(has: Callable[[Kind], bool]) -> str:
    """Return the names of the built-in kinds with a fact, for a message: "llama and hybrid"."""
    return " and ".join(
        kind.name for kind in kinds.known() if kinds.origin(kind.name) == "built in" and has(kind)
    )


def kind_of(shape: Any) -> Kind:
    """Return the kind of a shape.

    Raises:
        TypeError: no kind has shapes of this class. A subclass of such a class is another kind, since its model may be
            another one.
    """
    kind: Kind | None = vars(type(shape)).get(_KIND)
    if kind is not None:
        return kind
    shapes = ", ".join(kind.shape.__name__ for kind in kinds.known())
    raise TypeError(
        f"expected the shape of a registered kind of model ({shapes}), found {type(shape).__name__}; add its kind to "
        "shardwright.train.extend.kinds"
    )


def is_of_this_package(shape: Any) -> bool:
    """Return whether the kind of a shape is one of this package, and no user's."""
    return kinds.origin(kind_of(shape).name) == "built in"


def model_in_words(shape: Any, name: str = "") -> str:
    """Return the model of a shape, for messages: with its value of the key that names models, such as model.target, or
    with `name`, the setting `model.kind`."""
    kind = kind_of(shape)
    place = None if kind.presets else getattr(shape, kind.depth.removeprefix("model."), None)
    return f"the model of kind {(name or kind.name)!r}" if place is None else f"the model of {place!r}"


def experts_of(shape: Any) -> Experts | None:
    """Return the experts of a shape's model; None if it has none."""
    return kind_of(shape).experts(shape)


def base_of(shape: Any) -> HuggingFaceShape | None:
    """Return the model of transformers of whose files a shape's model is made, if any."""
    return kind_of(shape).base(shape)
