"""Settings that no command takes together, checked when a configuration is read. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.engine.extend import strategies
from shardwright.train.config.axes import AXES, ParallelAxis, axes_that_divide
from shardwright.train.config.catalog.engines import OWN_KEYS, EngineFacts, engines_that
from shardwright.train.config.catalog.kinds import kind_of
from shardwright.train.config.catalog.records import LOSSES, of_sets
from shardwright.train.config.conflicts.table import Conflict
from shardwright.train.config.sections.all import Sections
from shardwright.train.config.sections.finetune import FinetuneConfig
from shardwright.train.config.sections.validation import ValidationConfig
from shardwright.train.errors import did_you_mean


def _only_if(
    allowed: Callable[[Sections], bool], other: str, message: str, *keys: str
) -> tuple[Conflict[Sections], ...]:
    """Return a row for each key that keeps its default unless the job is allowed to change it.

    Args:
        allowed: whether a job may have another value.
        other: the key on which that depends.
        message: a template of all rows, in which {found} and {default} are the key's values, and {name} is the key
            without its section.
        keys: the keys.
    """

    def row(key: str) -> Conflict[Sections]:
        name = key.partition(".")[2]
        return Conflict(
            (key, other),
            lambda c: c.changes(key) and not allowed(c),
            lambda c: message.format_map(
                {**vars(c), "name": name, "found": c.value_at(key), "default": c.default_of(key)}
            ),
        )

    return tuple(map(row, keys))


def _shown(value: object) -> str:
    """Return a value of a key for a message."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def must_be(
    expected: object, key: str, other: str, applies: Callable[[Sections], bool], why: str = ""
) -> Conflict[Sections]:
    """Return the row for a key that has one possible value in jobs to which another key's value applies."""
    return Conflict(
        (key, other),
        lambda c: c.value_at(key) != expected and applies(c),
        lambda c: (
            f"expected {_shown(expected)} with {other}"
            + ("" if c.value_at(other) is True else f" = {_shown(c.value_at(other))}")
            + f", found {_shown(c.value_at(key))}{why and f'; {why}'}"
        ),
    )


def apart(key: str, other: str, why: str = "") -> Conflict[Sections]:
    """Return the row for two keys of which a job may change one alone. The message refuses the value of the first."""
    return must_be(Sections().default_of(key), key, other, lambda c: c.changes(other), why)


def only_with_engine(key: str, supports: Callable[[EngineFacts], bool], why: str) -> Conflict[Sections]:
    """Return the row for a key that keeps its default unless the engine supports it. `why` is a template."""
    return Conflict(
        (key, "parallel.engine"),
        lambda c: c.changes(key) and not supports(c.parallel.facts),
        lambda c: (
            f"expected {_shown(c.default_of(key))} with parallel.engine {c.parallel.engine!r}, found "
            f"{_shown(c.value_at(key))}; {why.format_map(vars(c))}"
        ),
    )


#: Keys of `[finetune]` that freeze parameters without adapters.
FREEZING = ("freeze", "train_only")


def _losses(config: Sections) -> list[str]:
    """Return the figures of a run without hooks of which one can be the best."""
    return [*LOSSES, *of_sets(config.data.validation_sets)]


#: The field of `EngineFacts` of engines that take `OWN_KEYS`.
OWN_KEYS_FACT = "has_own_keys"


def _unknown_to_engine(axis: ParallelAxis) -> Conflict[Sections]:
    """Return the row for an engine that does not support this axis."""
    return Conflict(
        (axis.key, "parallel.engine"),
        lambda c: c.value_at(axis.key) > 1 and not axis.is_known_to(c.parallel.facts),
        f"engine {{parallel.engine!r}} has no {axis.title}; expected 1, found {{{axis.key}}}",
    )


WITHIN_SECTIONS: tuple[Conflict[Sections], ...] = (
    *_only_if(
        lambda c: not c.data.sources,
        "data.sources",
        "expected it in each of data.sources, found {found!r} beside them; move it there",
        *("data.source", "data.kind", "data.text_key", "data.messages_key", "data.prompt_key"),
        "data.completion_key",
    ),
    Conflict(
        ("data.validation_source", "data.validation_sources"),
        lambda c: bool(c.data.validation_source and c.data.validation_sources),
        "expected it in one of data.validation_sources, found {data.validation_source!r} beside them; move it "
        "there",
    ),
    Conflict(
        ("data.document_mask", "data.packing"),
        lambda c: c.data.packing == "none" and c.data.document_mask is True,
        "expected 'auto' with packing 'none', which puts one document in a sample, found true",
    ),
    Conflict(
        ("data.document_mask", "data.packing"),
        lambda c: c.data.packing == "best_fit" and c.data.document_mask is False,
        "expected 'auto' with packing 'best_fit', which puts whole documents that nothing else separates in a "
        "sample, found false; or set data.packing to 'split'",
    ),
    Conflict(
        ("train.epochs", "train.steps"),
        lambda c: c.train.epochs > 0 and "steps" in c.train.model_fields_set,
        "expected 0 with train.steps = {train.steps}, found {train.epochs:g}; set one of the two",
    ),
    *_only_if(
        lambda c: c.activations.checkpoint == "layers",
        "activations.checkpoint",
        "only for checkpoint = 'layers'; with {activations.checkpoint!r} expected {default}, found {found}",
        "activations.every",
    ),
    *_only_if(
        lambda c: c.activations.checkpoint == "budget",
        "activations.checkpoint",
        "only for checkpoint = 'budget'; with {activations.checkpoint!r} expected {default}, found {found}",
        "activations.budget",
    ),
    Conflict(
        ("activations.offload", "activations.checkpoint"),
        lambda c: c.activations.offload == "inputs" and c.activations.checkpoint == "none",
        "expected 'none' or 'blocks' with activations.checkpoint = 'none', found {activations.offload!r}; without "
        "checkpointing a block keeps more than its inputs. Or set activations.checkpoint to 'full'",
    ),
    *_only_if(
        lambda c: c.finetune.method != "full",
        "finetune.method",
        "found {found!r} with method 'full', which trains all parameters and has no adapters; set finetune.method to "
        "'lora' or 'dora', or leave {name} out",
        *(f"finetune.{name}" for name in FinetuneConfig.model_fields if name not in ("method", *FREEZING)),
    ),
    *_only_if(
        lambda c: not c.finetune.has_adapters,
        "finetune.method",
        "found {found!r} with method {finetune.method!r}, which freezes all but adapters; name what else is trained in "
        "train_also, or leave {name} out",
        *(f"finetune.{name}" for name in FREEZING),
    ),
    Conflict(
        ("finetune.train_only", "finetune.freeze"),
        lambda c: bool(c.finetune.train_only and c.finetune.freeze),
        "expected one of train_only and freeze, found both; name the trained parameters, or the frozen ones",
    ),
    Conflict(
        ("finetune.dropout", "finetune.method"),
        lambda c: c.finetune.method == "dora" and c.finetune.dropout > 0,
        "expected 0 with method 'dora', found {finetune.dropout}; or set finetune.method to 'lora'",
    ),
    Conflict(
        ("optimizer.in_backward", "optimizer.name"),
        lambda c: c.optimizer.in_backward and not c.optimizer.entry.in_backward,
        lambda c: (
            f"expected false with optimizer {c.optimizer.name!r}"
            + (f", which steps whole {c.optimizer.entry.whole}" if c.optimizer.entry.whole else "")
            + ", found true"
        ),
    ),
    *_only_if(
        lambda c: c.optimizer.name == "muon",
        "optimizer.name",
        "optimizer {optimizer.name!r} does not have this key; expected {default}, found {found}. Only muon has it",
        "optimizer.momentum",
        "optimizer.ns_steps",
    ),
    *_only_if(
        lambda c: bool(c.validation.tasks),
        "validation.tasks",
        "expected {default!r} without validation.tasks, found {found!r}; set validation.tasks or leave {name} out",
        *(f"validation.{name}" for name in ValidationConfig.model_fields if name.startswith("tasks_")),
    ),
    *_only_if(
        lambda c: c.parallel.facts.has_own_keys,
        "parallel.engine",
        "expected {default!r} with engine {parallel.engine!r}, found {found!r}; only the engine "
        f"{engines_that(lambda engine: engine.has_own_keys)} supports other values",
        *(f"parallel.{name}" for name in OWN_KEYS),
        *(axis.key for axis in AXES if axis.fact == OWN_KEYS_FACT),
    ),
    Conflict(
        ("parallel.keep_float32", "parallel.param_dtype"),
        lambda c: bool(c.parallel.keep_float32) and c.parallel.param_dtype == "float32",
        "expected no patterns with param_dtype 'float32', since all parameters are then gathered in float32",
    ),
    Conflict(
        ("parallel.grad_dtype", "parallel.accumulate_dtype"),
        lambda c: (
            "auto" not in (own := (c.parallel.grad_dtype, c.parallel.accumulate_dtype)) and len(set(own)) > 1
        ),
        "expected 'auto' or accumulate_dtype, {parallel.accumulate_dtype!r}, found {parallel.grad_dtype!r}; "
        "reduced micro-batches add up in the gradients",
    ),
    *(_unknown_to_engine(axis) for axis in AXES if axis.fact not in ("", OWN_KEYS_FACT)),
    Conflict(
        ("parallel.replicas", "parallel.strategy"),
        lambda c: strategies.get(c.parallel.strategy).axes == 2 and c.parallel.replicas < 2,
        "expected at least 2 with strategy {parallel.strategy!r}, found {parallel.replicas}; or set strategy = "
        "'zero3', which has no replicas",
    ),
    Conflict(
        ("parallel.replicas", "parallel.strategy"),
        lambda c: strategies.get(c.parallel.strategy).axes is None and c.parallel.replicas > 1,
        "expected 1 with strategy {parallel.strategy!r}, which treats all ranks alike, found {parallel.replicas}; "
        "set strategy = 'hsdp' for groups of ranks that each hold a whole model",
    ),
    Conflict(
        ("parallel.reshard_after_forward", "parallel.strategy"),
        lambda c: (
            c.parallel.strategy_keeps_parameters
            and c.parallel.reshard_after_forward not in ("default", "never")
        ),
        "strategy {parallel.strategy!r} keeps parameters whole until the optimizer's step; expected 'default' or "
        "'never', found {parallel.reshard_after_forward!r}",
    ),
    Conflict(
        ("parallel.reshard_after_forward", "parallel.engine"),
        lambda c: not c.parallel.facts.shards and c.parallel.reshard_after_forward != "default",
        "expected 'default' with engine {parallel.engine}, which shards nothing, found "
        "{parallel.reshard_after_forward!r}",
    ),
    Conflict(
        ("parallel.reshard_after_forward", "parallel.engine"),
        lambda c: (
            not c.parallel.facts.reshards_to_groups and isinstance(c.parallel.reshard_after_forward, int)
        ),
        "engine {parallel.engine!r} does not support a number; expected 'default', 'always' or 'never', found "
        "{parallel.reshard_after_forward}",
    ),
)
"""Settings of one section, in any configuration."""


def _rewinds(key: str) -> tuple[Conflict[Sections], ...]:
    """`key`: says what a run does about a fault."""
    return (
        Conflict(
            (key, "checkpoint.every"),
            lambda c: c.value_at(key) == "rewind" and not c.checkpoint.every,
            "expected another value than 'rewind' with checkpoint.every = 0; there is no checkpoint to go back to",
        ),
        Conflict(
            (key, "optimizer.in_backward"),
            lambda c: c.value_at(key) == "skip" and c.optimizer.in_backward,
            "expected 'rewind' or the default with optimizer.in_backward, found 'skip'; the weights are already "
            "updated when the loss of all ranks is known",
        ),
    )


def _too_short(key: str) -> Conflict[Sections]:
    return Conflict(
        ("fault.rewind_steps", key, "checkpoint.every", "train.steps"),
        lambda c: (
            c.value_at(key) == "rewind"
            and c.train.knows_steps
            and c.fault.rewind_steps + c.checkpoint.every > c.train.steps
        ),
        lambda c: (
            f"expected rewind_steps + checkpoint.every <= train.steps = {c.train.steps} with {key} = 'rewind', "
            f"found {c.fault.rewind_steps} + {c.checkpoint.every}; no checkpoint would be old enough"
        ),
    )


_GATHERED_IN_FLOAT8: tuple[tuple[str, object], ...] = (
    ("optimizer.name", "adamw"),
    ("parallel.offload", "none"),
    ("parallel.full_precision_in_eval", False),
)
"""Keys with the values that they must have if weights are gathered in float8."""


def _longest(config: Sections) -> int | None:
    return config.model.shape().max_seq_len


def _compiled_in_parts(axis: ParallelAxis) -> Conflict[Sections]:
    """Return the row for an engine that does not run compiled blocks where this axis divides layers."""
    return Conflict(
        ("train.compile", "parallel.engine", axis.key),
        lambda c: (
            c.train.compile != "none"
            and c.value_at(axis.key) > 1
            and bool(c.parallel.facts.no_compile_divided)
        ),
        f"expected 'none' with parallel.engine {{parallel.engine!r}} and {axis.key} = {{{axis.key}}}, found "
        "{train.compile!r}; {parallel.facts.no_compile_divided}",
    )


BETWEEN_SECTIONS: tuple[Conflict[Sections], ...] = (
    Conflict(
        ("train.seq_len", "model.max_seq_len"),
        lambda c: (longest := _longest(c)) is not None and c.train.seq_len > longest,
        lambda c: (
            "expected at most "
            + (
                f"model.max_seq_len = {_longest(c)}"
                if "max_seq_len" in kind_of(c.model.shape()).numbers
                else f"{_longest(c)}, the positions that the model has"
            )
            + f", found {c.train.seq_len}"
        ),
    ),
    Conflict(
        ("train.seq_len", "model.mtp_pattern"),
        lambda c: c.train.seq_len < 2 and kind_of(shape := c.model.shape()).predicts_further(shape),
        "expected at least 2 with a model.mtp_pattern, found 1",
    ),
    only_with_engine(
        "train.cuda_graph",
        lambda engine: engine.captures_graphs,
        f"only steps of the engine {engines_that(lambda engine: engine.captures_graphs)} can be captured",
    ),
    must_be(
        "before_step",
        "fault.check",
        "optimizer.name",
        lambda c: not c.optimizer.entry.stays_on_flag,
        'its step cannot be left out on the device, or set optimizer.name = "adamw"',
    ),
    apart("fault.check", "optimizer.in_backward", "it steps before any number is known"),
    apart("fault.check", "parallel.offload", "the host takes part in each step"),
    apart("fault.check", "run.hooks", "hooks see the model after each step, before the next one"),
    apart("fault.check", "fault.verify_every", "the host waits for each comparison"),
    *_rewinds("fault.on_non_finite"),
    *_rewinds("fault.on_spike"),
    Conflict(
        ("checkpoint.keep_best", "run.hooks"),
        lambda c: (
            bool(c.checkpoint.keep_best) and not c.run.hooks and c.checkpoint.keep_best not in _losses(c)
        ),
        lambda c: (
            f"expected one of {', '.join(_losses(c))}, found {c.checkpoint.keep_best!r}"
            + (
                did_you_mean(c.checkpoint.keep_best, _losses(c), 1, 0.8)
                or "; metrics of your own come from run.hooks"
            )
        ),
    ),
    Conflict(
        ("checkpoint.keep_best", "validation.every", "checkpoint.every"),
        lambda c: (
            c.checkpoint.keep_best.startswith("validation_")
            and bool(not c.validation.every or c.checkpoint.every % c.validation.every)
        ),
        "expected a validation at each checkpoint for {checkpoint.keep_best!r}, found validation.every = "
        "{validation.every} and checkpoint.every = {checkpoint.every}; make checkpoint.every a multiple of "
        "validation.every",
    ),
    only_with_engine(
        "optimizer.in_backward",
        lambda engine: engine.steps_in_backward,
        f"only the engine {engines_that(lambda engine: engine.steps_in_backward)} steps in backward",
    ),
    must_be(
        0,
        "train.max_norm",
        "optimizer.in_backward",
        lambda c: c.optimizer.in_backward,
        "the norm of all gradients is known only when backward is over, and the first gradients are already used and "
        "freed then",
    ),
    apart("train.cuda_graph", "optimizer.in_backward", "the optimizer steps outside the graph"),
    Conflict(
        ("parallel.engine", "finetune.method"),
        lambda c: c.finetune.method != "full" and c.parallel.facts.flattens,
        f"expected {engines_that(lambda engine: not engine.flattens, style=repr)} with "
        "finetune.method = {finetune.method!r}, found {parallel.engine!r}; it keeps frozen and trained parameters in "
        "one flat parameter",
    ),
    Conflict(
        ("parallel.engine", "finetune.freeze", "finetune.train_only"),
        lambda c: bool(c.finetune.freeze or c.finetune.train_only) and c.parallel.facts.flattens,
        f"expected {engines_that(lambda engine: not engine.flattens, style=repr)} with finetune.freeze or "
        "finetune.train_only, found {parallel.engine!r}",
    ),
    only_with_engine(
        "train.loss_chunks",
        lambda engine: not engine.flattens,
        "the weight of its output layer is part of a flat parameter",
    ),
    apart("train.float8", "finetune.method", "layers in float8 have no adapters"),
    *(apart("train.float8", f"finetune.{name}") for name in FREEZING),
    apart(
        "train.cuda_graph",
        "finetune.dropout",
        "the numbers of the samples change between micro-batches of one graph",
    ),
    only_with_engine(
        "finetune.base_dtype",
        lambda engine: engine.casts_weights,
        "this engine computes with weights in the precision in which they are stored",
    ),
    apart("parallel.offload", "train.cuda_graph", "the host takes part in a step with offload"),
    Conflict(
        ("parallel.grad_dtype", "optimizer.name"),
        lambda c: c.parallel.grad_dtype not in ("auto", "float32") and not c.optimizer.entry.any_gradients,
        "expected 'auto' with optimizer.name {optimizer.name!r}, which takes only float32 gradients, found "
        "{parallel.grad_dtype!r}; use adamw8bit for other dtypes",
    ),
    Conflict(
        ("activations.checkpoint", "train.compile"),
        lambda c: c.activations.checkpoint == "budget" and c.train.compile != "inductor",
        "expected train.compile = 'inductor' with 'budget', found {train.compile!r}; only the compiler knows "
        "which activations a block keeps. Or use 'ops'",
    ),
    only_with_engine(
        "activations.offload",
        lambda engine: not engine.flattens,
        "its weights are views of flat memory, and would move with the activations",
    ),
    only_with_engine("train.compile", lambda engine: not engine.no_compile, "{parallel.facts.no_compile}"),
    *map(_compiled_in_parts, axes_that_divide("layers")),
    Conflict(
        ("train.float8", "train.micro_batch", "train.seq_len"),
        lambda c: c.train.float8 != "none" and c.train.micro_batch_tokens % 16 > 0,
        "expected 'none' with {train.micro_batch_tokens} tokens in a micro-batch, found {train.float8!r}; the number "
        "of tokens must be a multiple of 16",
    ),
    *(apart(axis.key, key, why) for axis in AXES for key, why in axis.excludes.items()),
    must_be("bfloat16", "parallel.param_dtype", "train.float8", lambda c: c.train.float8 != "none"),
    apart("train.cuda_graph", "train.float8"),
    *(
        must_be(value, key, "train.float8", lambda c: c.for_building.gathers_float8)
        for key, value in _GATHERED_IN_FLOAT8
    ),
    only_with_engine("train.float8", lambda engine: not engine.flattens, "its weights are flat"),
    Conflict(
        ("optimizer.name", "parallel.engine"),
        lambda c: bool(c.optimizer.entry.whole) and not c.parallel.facts.steps_whole,
        "{optimizer.name} needs whole {optimizer.entry.whole}, and only the engine "
        f"{engines_that(lambda engine: engine.shards and engine.steps_whole)} supports that on shards; expected "
        "'adamw' with parallel.engine {parallel.engine!r}, found {optimizer.name!r}",
    ),
    Conflict(
        ("validation.every", "data.validation_fraction"),
        lambda c: c.validation.every > 0 and not c.data.validates,
        "expected 0, since data.validation_fraction = 0 leaves no text to validate on, found {validation.every}; "
        "or set data.validation_source",
    ),
)
"""Settings of several sections, in any configuration."""

LENGTH: tuple[Conflict[Sections], ...] = (
    _too_short("fault.on_non_finite"),
    _too_short("fault.on_spike"),
    Conflict(
        ("profile.steps", "train.steps"),
        lambda c: bool(c.profile.steps) and c.train.knows_steps and c.profile.steps[-1] > c.train.steps,
        lambda c: (
            f"expected [FIRST, LAST] with LAST <= train.steps = {c.train.steps}, found {list(c.profile.steps)}; the "
            "run has no such step"
        ),
    ),
)
"""Settings that need a longer run, checked before the first step. With `train.epochs` that is once the data is read."""
