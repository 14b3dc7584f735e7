"""Every kind of model the trainer knows, and what each offers: the one list to which a new kind is added.

The functions at the end look up what the kind of a shape offers.

Nothing here imports torch until it is asked for, so that configurations can be checked and `--help` printed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from shardwright.train.models.presets import HYBRID_PRESETS, PRESETS, HybridConfig, LlamaConfig, Shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardwright.checkpoint.names import Source
    from shardwright.train.models.decoder import Decoder
    from shardwright.train.models.plans import Plan


@dataclass(frozen=True)
class Offers:
    """What a kind of model has. Each takes a shape of that kind first.

    Attributes:
        model: makes the model, on the default device.
        tensor_plan: what each module becomes under tensor parallelism; with the mesh of spread experts, if any.
        uneven: see the function below.
        key_map: Hugging Face's names of its tensors.
        config_json: what config.json beside them says.
        shapes: by `model_type` of a config.json, the shape that it describes.
    """

    model: Callable[[Any], Decoder]
    tensor_plan: Callable[[Any, DeviceMesh | None], Plan]
    uneven: Callable[[Any, int, int], list[tuple[str, int, int]]]
    key_map: Callable[[Any], dict[str, Source | None]]
    config_json: Callable[[Any], dict[str, Any]]
    shapes: Mapping[str, Callable[[Mapping[str, Any]], Shape]]


@dataclass(frozen=True)
class Kind:
    """A kind of model, as `[model] kind` names it.

    Attributes:
        shape: the class of its shapes.
        presets: the shapes that have a name, with that name as the key.
        depth: the key that says how many layers there are.
        load: imports what the kind offers.
    """

    shape: type[Any]
    presets: Mapping[str, Shape]
    depth: str
    load: Callable[[], Offers]

    @property
    def numbers(self) -> set[str]:
        """The keys that shapes of this kind have."""
        return {field.name for field in fields(self.shape)}


def _llama() -> Offers:
    from shardwright.train.models import hugging_face_tables, llama, plans

    return Offers(
        model=llama.Llama,
        tensor_plan=plans.llama_plan,
        uneven=plans.llama_uneven,
        key_map=hugging_face_tables.llama_keys,
        config_json=hugging_face_tables.llama_config,
        shapes={"llama": hugging_face_tables.llama_shape},
    )


def _hybrid() -> Offers:
    from shardwright.train.models import hugging_face_tables, hybrid, plans

    return Offers(
        model=hybrid.Hybrid,
        tensor_plan=plans.hybrid_plan,
        uneven=plans.hybrid_uneven,
        key_map=hugging_face_tables.hybrid_keys,
        config_json=hugging_face_tables.hybrid_config,
        shapes={
            "nemotron_h": hugging_face_tables.hybrid_shape,
            "shardwright_hybrid": hugging_face_tables.hybrid_shape,
        },
    )


KINDS: dict[str, Kind] = {
    "llama": Kind(LlamaConfig, PRESETS, "model.n_layers", _llama),
    "hybrid": Kind(HybridConfig, HYBRID_PRESETS, "model.pattern", _hybrid),
}


def offers_of(shape: Shape) -> Offers:
    """What the kind of a shape offers.

    Raises:
        TypeError: no kind has shapes of this class. A subclass of a registered class is another kind, since its model
            may be another one.
    """
    for kind in KINDS.values():
        if type(shape) is kind.shape:
            return kind.load()
    known = ", ".join(kind.shape.__name__ for kind in KINDS.values())
    raise TypeError(
        f"expected the shape of a registered kind of model ({known}), found {type(shape).__name__}; add its kind to "
        "KINDS in shardwright/train/models/kinds.py"
    )


def tensor_plan(shape: Shape, experts: DeviceMesh | None = None) -> Plan:
    """By pattern of module names, what each becomes in a model of that shape.

    The experts of a hybrid may have been spread over `experts` before.
    """
    return offers_of(shape).tensor_plan(shape, experts)


def uneven(shape: Shape, seq_len: int, ranks: int) -> list[tuple[str, int, int]]:
    """Keys whose values these many tensor-parallel ranks cannot cut, the values, and of what they must be multiples."""
    return offers_of(shape).uneven(shape, seq_len, ranks)
