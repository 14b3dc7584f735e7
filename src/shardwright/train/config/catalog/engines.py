"""The engines that `[parallel] engine` can name, and what each one supports. Nothing here imports torch.

An engine is a row here, with its name in `EngineName`, and a class in `parallel/engines`. Other files ask for a fact of
the row, and never for a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

EngineName = Literal["shardwright", "fsdp2", "fsdp1", "ddp", "none"]


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Facts of an engine that are known before it is imported.

    Attributes:
        name: in `[parallel] engine`.
        has_own_keys: supports the keys of `[parallel]` in `OWN_KEYS`.
        shards: divides parameters over the ranks.
        reshards_to_groups: `parallel.reshard_after_forward` can be a number.
        divides_layers: supports tensor parallelism.
        builds_in_shards: shards a model without memory, and draws or reads its values into the shards.
        casts_weights: computes with copies of the weights in `parallel.param_dtype`; without it under autocast.
        reduces_low: can reduce gradients in another dtype than float32.
        captures_graphs: forward and backward can be one CUDA graph.
        steps_in_backward: the optimizer can step in backward.
        steps_whole: optimizers that need whole tensors or blocks step on its parameters.
        gathers_float8: gathers weights in float8 if the recipe has one scale for each tensor.
        flattens: makes one flat parameter of several ones.
        reads_adapters: files of adapters can be read into its parameters.
        shows_gradients: hooks see the gradients of a rank before they are reduced.
        clips_not_finite: scales gradients by a norm that is not finite, which makes all of them nan.
        reports_memory: reports the memory that it holds and leases.
        is_planned: its steps can be planned.
        one_rank: runs on one rank only.
        no_compile: the reason why it does not run compiled blocks. Empty: it does.
        no_compile_divided: the same where ranks divide layers.
    """

    name: EngineName
    has_own_keys: bool = False
    shards: bool = False
    reshards_to_groups: bool = False
    divides_layers: bool = False
    builds_in_shards: bool = False
    casts_weights: bool = False
    reduces_low: bool = False
    captures_graphs: bool = False
    steps_in_backward: bool = False
    steps_whole: bool = False
    gathers_float8: bool = False
    flattens: bool = False
    reads_adapters: bool = False
    shows_gradients: bool = False
    clips_not_finite: bool = False
    reports_memory: bool = False
    is_planned: bool = False
    one_rank: bool = False
    no_compile: str = ""
    no_compile_divided: str = ""


#: Keys of `[parallel]` that need an engine with keys of its own. Other engines take their defaults.
OWN_KEYS = (
    "strategy", "replicas", "layout", "memory", "prefetch", "offload", "accumulate_dtype", "grad_dtype",
    "keep_float32", "full_precision_in_eval",
)  # fmt: skip

_ROWS = (
    EngineFacts(
        name="shardwright",
        has_own_keys=True,
        shards=True,
        reshards_to_groups=True,
        divides_layers=True,
        builds_in_shards=True,
        casts_weights=True,
        reduces_low=True,
        captures_graphs=True,
        steps_in_backward=True,
        steps_whole=True,
        gathers_float8=True,
        reads_adapters=True,
        shows_gradients=True,
        reports_memory=True,
        is_planned=True,
    ),
    EngineFacts(
        name="fsdp2",
        shards=True,
        reshards_to_groups=True,
        divides_layers=True,
        casts_weights=True,
        reduces_low=True,
        gathers_float8=True,
        is_planned=True,
        no_compile_divided=(
            "the embedding would get no gradient: the first compiled block gets the embedding's output before its "
            "communication is over, and torch then drops its graph"
        ),
    ),
    EngineFacts(
        name="fsdp1",
        shards=True,
        casts_weights=True,
        reduces_low=True,
        flattens=True,
        clips_not_finite=True,
        no_compile="its hooks inside blocks break the graph",
    ),
    EngineFacts(name="ddp", steps_whole=True, reads_adapters=True, shows_gradients=True),
    EngineFacts(
        name="none",
        reduces_low=True,  # it reduces nothing
        steps_whole=True,
        reads_adapters=True,
        shows_gradients=True,
        is_planned=True,
        one_rank=True,
    ),
)
ENGINES: dict[EngineName, EngineFacts] = {row.name: row for row in _ROWS}
assert tuple(ENGINES) == get_args(EngineName)


def engines_that(
    has: Callable[[EngineFacts], bool], last: str = "or", style: Callable[[str], str] = str
) -> str:
    """Return the names of the engines with a fact, for a message: "shardwright, ddp or none". `style`: repr for
    quotes."""
    *names, final = (style(row.name) for row in _ROWS if has(row))
    return f"{', '.join(names)} {last} {final}" if names else final
