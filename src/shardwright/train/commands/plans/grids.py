"""The settings that a search of plans tries: grids of a job, and further settings that it has a reason to try.

Nothing here makes a plan, except to ask whether the loss of a model can be computed in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from shardwright.planner import Axis, Figures, Keys, Plan, corners, first_keys, with_keys
from shardwright.train.commands.plans.planned_job import PlannedJob
from shardwright.train.config import Config
from shardwright.train.config.axes import AXES
from shardwright.train.errors import UserError, did_you_mean

SIZES = (2, 4, 8)  #: of tensor and expert parallelism, up to a node
#: Bytes of a rank's logits in a step, in float32, from which on chunks of the loss are tried.
LOGITS = 1 << 30


SEARCHED = (
    "train.micro_batch", "activations.checkpoint", "train.compile", "train.loss_chunks", "parallel.strategy",
    "parallel.replicas", "parallel.reshard_after_forward", *(axis.key for axis in AXES),
    "activations.offload", "parallel.offload", "parallel.layout",
)  # fmt: skip
"""All keys that a search may change."""


def with_only(job: PlannedJob, only: Sequence[str]) -> PlannedJob:
    """Return the job for a search that changes these keys alone: the others are given, with their own values.

    Raises:
        UserError: no search changes one of the keys.
    """
    for key in only:
        if key not in SEARCHED:
            near = did_you_mean(key, SEARCHED)
            raise UserError(f"--only: expected keys of {', '.join(SEARCHED)}, found {key!r}{near}")
    config, given = job(), dict(job.keys)
    others = [key for key in SEARCHED if key not in only and key not in given]
    return replace(job, keys=(*job.keys, *((key, str(config.value_at(key))) for key in others)))


def further_settings(
    config: Config, ranks: int, figures: Figures, given: Mapping[str, str]
) -> tuple[list[tuple[Keys, ...]], list[tuple[Keys, ...]], list[Keys]]:
    """Return values of expert and of tensor parallelism, of context parallelism, and of offload, that may be tried.

    Args:
        config: the job.
        ranks: of the job.
        figures: of the device.
        given: keys that stay as they are.
    """
    sizes = [size for size in SIZES if size <= figures.node and not ranks % size]
    facts = config.parallel.facts
    free = [axis for axis in AXES if axis.is_known_to(facts) and axis.key not in given]
    further = [
        _values(axis.key, sizes) for what in ("experts", "layers") for axis in free if axis.divides == what
    ]
    smaller = [_values(axis.key, sizes) for axis in free if axis.divides == "samples"]
    last: list[Keys] = []
    if figures.knows_host:
        if not {"activations.offload", "activations.checkpoint"} & given.keys():
            last.append((("activations.offload", "inputs"), ("activations.checkpoint", "full")))
        if facts.has_own_keys and "parallel.offload" not in given:
            last += _values("parallel.offload", ("optimizer", "cpu"))
    return further, smaller, last


def divides_loss(job: PlannedJob, config: Config, plan: Plan, grids: Sequence[Sequence[Axis]]) -> bool:
    """Return whether all logits of a step together are large, and the loss of this model can be computed in chunks.

    ``grids``: with chunks of the loss. A plan of the first point shows whether they are possible, and is needed later.
    """
    dims = config.parallel.dims(job.ranks)
    tokens = config.train.global_batch // dims.data * config.train.seq_len
    shape = config.model.shape()
    if "train.loss_chunks" in dict(job.keys) or 4 * tokens * shape.vocab_size < LOGITS:
        return False
    chunks = ("train.loss_chunks", "auto")
    points = [keys for axes in grids[:1] if chunks in (keys := first_keys(axes))]
    return config.model.facts.has_output_layer or any(
        plan(keys)() is not None for keys in (*points, (chunks,))
    )


def grids_of(
    job: PlannedJob, config: Config, node: int, chunks: bool, keys: Keys, better: Keys = ()
) -> list[list[Axis]]:
    """Return the grids with these settings beside; none if they do not go together with the job.

    ``chunks``: of the loss. ``better``: settings that all points have, unless they are given or do not go together.
    """
    given = dict(job.keys)
    plain = [(axis.key, "1") for axis in AXES]
    plain += [("parallel.offload", "none"), ("activations.offload", "none")]
    for axis in AXES:
        if axis.key in dict(keys):
            plain += [(key, str(config.default_of(key))) for key in axis.needs if key in SEARCHED]
    fixed = with_keys(changed(config, tuple(pair for pair in plain if pair[0] not in given)), keys)
    may_change = config.parallel.facts.has_own_keys and not any(key in given for key, _ in better)
    if better and may_change and (grids := grids_of(job, config, node, chunks, with_keys(better, keys))):
        return grids
    # Values of the axes that divide any number of ranks.
    least: Keys = (("train.micro_batch", "1"),)
    if config.parallel.facts.has_own_keys and not {"parallel.strategy", "parallel.replicas"} & given.keys():
        least = (*least, ("parallel.strategy", "zero3"), ("parallel.replicas", "1"))
    least = tuple(pair for pair in least if pair[0] not in given)
    try:
        settings = job(with_keys(least, fixed))
        grids = list(axes_of(settings, job.ranks, node, {**given, **dict(plain), **dict(keys)}, chunks))
        grids = [[*axes, Axis("further", (fixed,))] for axes in grids] if fixed else grids
        return [axes for axes in grids if not keys or _divides(job, next(corners(axes)))]
    except UserError:
        return []


def _divides(job: PlannedJob, keys: Keys) -> bool:
    from shardwright.train.parallel.checks import check_division  # which imports torch

    try:
        check_division(job(keys), job.ranks)
    except UserError:
        return False
    return True


def axes_of(
    config: Config, ranks: int, node: int, given: Mapping[str, str], chunks: bool = False
) -> Iterator[list[Axis]]:
    """Yield the grids of settings: one with blocks that inductor compiles, and one with the job's own `train.compile`.

    Args:
        config: the job.
        ranks: of the job.
        node: devices of a node.
        given: keys that stay as they are.
        chunks: try chunks of the loss, too.
    """
    dims = config.parallel.dims(ranks)
    data = dims.data
    axes = [
        Axis("strategy", tuple(_strategies(config, data, dims.data_groups_on(node)))),
        # A step of one micro-batch adds up no gradients, which takes memory, too.
        Axis("micro-batch", _values("train.micro_batch", _micro_batches(config, data)), lone=True),
        Axis("checkpoint", _values("activations.checkpoint", ("none", "ops", "half_ops", "full"))),
    ]
    if chunks:
        axes.append(Axis("loss chunks", _values("train.loss_chunks", ("0", "auto"))))
    axes = [axis for axis in axes if not any(key in given for keys in axis.values for key, _ in keys)]
    ways = [config.train.compile] if "train.compile" in given else [config.train.compile, "inductor"]
    for way in dict.fromkeys(reversed(ways)):
        yield [Axis("compile", _values("train.compile", (way,))), *axes]


def _values(key: str, values: Iterable[object]) -> tuple[Keys, ...]:
    """Return the settings in which one key has each of the values."""
    return tuple(((key, str(value)),) for value in values)


def _micro_batches(config: Config, data: int) -> list[int]:
    """Return sizes of micro-batches that divide a rank's samples of a step, each at least twice the one after it."""
    whole = config.train.global_batch // data
    sizes = [1]
    for n in range(2, whole + 1):
        if whole % n == 0 and n >= 2 * sizes[-1]:
            sizes.append(n)
    return sizes[::-1]


def _strategies(config: Config, data: int, node: int) -> Iterator[Keys]:
    """Yield ways to divide the model over `data` ranks with data of their own, those that communicate least first.

    `node`: the number of such ranks on a node.
    """
    if not config.parallel.facts.has_own_keys or data == 1:
        yield ()
        return

    def keys(strategy: str, replicas: int, reshard: str) -> Keys:
        return (
            ("parallel.strategy", strategy),
            ("parallel.replicas", str(replicas)),
            ("parallel.reshard_after_forward", reshard),
        )

    if data > node and data % node == 0:  # replicas of whole nodes
        replicas = data // node
        while replicas > 1:
            yield keys("hsdp", replicas, "default")
            replicas = next((n for n in range(replicas // 2, 0, -1) if data // node % n == 0), 1)
    else:
        yield keys("zero2", 1, "default")
    yield keys("zero3", 1, "never")
    yield keys("zero3", 1, "default")


def changed(config: Config, keys: Keys) -> Keys:
    """Return the keys whose values are not those of the job."""
    return tuple((key, value) for key, value in keys if str(config.value_at(key)) != value)
