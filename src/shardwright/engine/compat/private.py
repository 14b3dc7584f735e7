"""Private functions and classes of torch that the package uses, probed at import.

If a torch version lacks one of them, this file raises an error that names it at import, not later inside a step.
Other files name aten operations with a leading underscore, and attributes of torch's objects such as ``_local_tensor``.
CONTRIBUTING.md describes these.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import _functional_collectives, distributed_c10d as _c10d, fsdp as _fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _dtensor_spec, placement_types
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import (
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_map_only as tree_map_only,
    tree_unflatten as tree_unflatten,
)

from shardwright.engine.compat.swap import (
    MissingCompilerError as MissingCompilerError,
    load as _load_exchange,
)


def _probe(owner: Any, *names: str) -> Any:
    for name in names:
        if not hasattr(owner, name):
            raise ImportError(
                f"shardwright supports torch >=2.11,<2.16; this is torch {torch.__version__}, which has no "
                f"{getattr(owner, '__name__', type(owner).__name__)}.{name}. Install a supported torch."
            )
        owner = getattr(owner, name)
    return owner


if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims
else:
    try:
        from torch.distributed.fsdp import DataParallelMeshDims
    except ImportError:  # before torch 2.12

        @dataclass(frozen=True)
        class DataParallelMeshDims:
            """The mesh dimensions that shard and those that replicate, as in torch 2.13."""

            shard: str | tuple[str, ...] | None = None
            replicate: str | tuple[str, ...] | None = None


_DTensorSpec, _TensorMeta = _probe(_dtensor_spec, "DTensorSpec"), _probe(_dtensor_spec, "TensorMeta")

AllgatherOptions = _probe(_c10d, "AllgatherOptions")
AllreduceOptions = _probe(_c10d, "AllreduceOptions")
AllToAllOptions = _probe(_c10d, "AllToAllOptions")
ReduceScatterOptions = _probe(_c10d, "ReduceScatterOptions")

#: ``chunk_cat(tensors, dim, num_chunks, out=)``: pads, cuts, casts and packs rank-major in one pass.
chunk_cat: Callable[..., torch.Tensor] = _probe(torch, "_chunk_cat")

_next_number = _probe(torch.autograd, "_get_sequence_nr")
_running_node = _probe(torch._C, "_current_autograd_node")
_default_store = _probe(_c10d, "_get_default_store")
_engine = _probe(torch.autograd.Variable, "_execution_engine")
_is_functorch = _probe(torch._C, "_functorch", "is_functorch_wrapped_tensor")
_is_batched = _probe(torch._C, "_functorch", "is_legacy_batchedtensor")
_run_backward = _probe(torch.autograd, "_engine_run_backward")
_probe(torch.autograd.graph, "_engine_run_backward")
_graph_task_id = _probe(torch._C, "_current_graph_task_id")
_keeps_graph = _probe(torch._C, "_autograd", "_get_current_graph_task_keep_graph")
_dispatch_mode = _probe(torch._C, "_get_dispatch_mode")
_FAKE = _probe(torch._C, "_TorchDispatchModeKey").FAKE
_peek_sequence_number = _probe(torch._C, "_autograd", "_get_sequence_nr")
_use_count = _probe(torch._C, "_storage_Use_Count")

_profiler_enabled = _probe(torch.autograd, "_profiler_enabled")
_ProfilerConfig = _probe(torch._C, "_profiler", "_ExperimentalConfig")

#: Inside this context reads of attributes of our tensor classes are as fast as for plain tensors.
quick_attributes = _probe(torch._C, "DisableTorchFunctionSubclass")

#: Whether a transform of torch.func (grad, jvp, vmap, functionalize) is under way. To read the stack of transforms
#: instead would make that stack, which autograd then copies with every node of a graph.
transformed: Callable[[], bool] = _probe(torch._C, "_are_functorch_transforms_active")
_any_autocast = _probe(torch._C, "_is_any_autocast_enabled")
_pop_transform = _probe(torch._C, "_functorch", "pop_dynamic_layer_stack")
_push_transform = _probe(torch._C, "_functorch", "push_dynamic_layer_stack")
_unwrap_transformed = _probe(torch._C, "_functorch", "get_unwrapped")
_dispatch_modes = _probe(torch._C, "_len_torch_dispatch_stack")
_function_modes = _probe(torch._C, "_len_torch_function_stack")
_pop_function_mode = _probe(torch._C, "_pop_torch_function_stack")
_push_function_mode = _probe(torch._C, "_push_on_torch_function_stack")
_no_dispatch = _probe(torch._C, "_disabled_torch_dispatch_impl")
_disable_dispatch_modes = _probe(_python_dispatch, "_disable_current_modes")
_dispatch_mode_stack = _probe(_python_dispatch, "_get_current_dispatch_mode_stack")
_push_dispatch_mode = _probe(_python_dispatch, "_push_mode")
_pop_dispatch_mode = _probe(_python_dispatch, "_pop_mode")

#: Whether a tensor's class has ``__tensor_flatten__``: it is made of other tensors.
is_made_of_tensors: Callable[[torch.Tensor], bool] = _probe(_python_dispatch, "is_traceable_wrapper_subclass")
_PROXY = _probe(torch._C, "_TorchDispatchModeKey", "PROXY")
_graph = _probe(torch.autograd, "graph")
_probe(_graph, "_allow_mutation_on_saved_tensors_enabled")
_CloneArgBeforeMutateMode = _probe(_graph, "_CloneArgBeforeMutateMode")

#: Moves version counters without an operation.
increment_version = _probe(torch.autograd.graph, "increment_version")
#: Called with a tuple of tensors and a tuple of numbers: what their version counters become.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = _probe(
    torch._C, "_autograd", "_unsafe_set_version_counter"
)

#: Unlike ``Tensor.__dlpack__`` it serves devices that were added to torch, and no stream waits for another.
_to_dlpack = _probe(torch._C, "_to_dlpack")

#: Whether two storages can exchange their memory without a compiled helper, as torch 2.12 and later can.
SWAPS_MEMORY = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

if SWAPS_MEMORY:
    #: Exchanges the memory and the sizes of two storages. Views of them see it.
    swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], Any]
    swap_memory = torch.UntypedStorage._swap_data_ptr_  # type: ignore[attr-defined]

    def prepare_to_swap_memory() -> None:
        """Compile what :func:`swap_memory` needs, where torch lacks it.

        Raises:
            MissingCompilerError: on torch 2.11, without a C++ compiler.
        """

else:
    _probe(torch.UntypedStorage, "_cdata")
    _exchange = functools.cache(_load_exchange)

    def swap_memory(one: torch.UntypedStorage, two: torch.UntypedStorage) -> None:
        if _exchange()(one._cdata, two._cdata):
            raise RuntimeError(
                f"storages of {one.nbytes()} bytes on {one.device} and of {two.nbytes()} bytes on {two.device} cannot "
                "exchange memory: they must be on one device, and of one size or empty"
            )

    def prepare_to_swap_memory() -> None:
        _exchange()


_top_hooks_of_saved_tensors = _probe(torch._C, "_autograd", "_top_saved_tensors_default_hooks")


_hooks_of_saved_tensors_enabled = _probe(torch._C, "_autograd", "_saved_tensors_hooks_is_enabled")
_forward_ad = _probe(torch.autograd, "forward_ad")
_probe(_forward_ad, "_current_level")


def takes_hooks_of_saved_tensors() -> bool:
    """Return whether hooks may decide now what autograd saves.

    Not inside of transforms of ``torch.func``, inside of ``disable_saved_tensors_hooks``, and inside of a level of
    forward-mode AD: its formulas read saved tensors during forward, and torch crashes if they are others.
    """
    return not transformed() and _hooks_of_saved_tensors_enabled() and _forward_ad._current_level < 0


def saves_for_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` (not its reentrant form) decides what autograd saves now."""
    return hook_of_checkpoint() is not None


def hook_of_checkpoint() -> Any:
    """The hook by which ``torch.utils.checkpoint`` decides what autograd saves now; each call of it has its own."""
    hooks = _top_hooks_of_saved_tensors(True)
    from_checkpoint = hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
    return hooks[0] if from_checkpoint else None


def kept_results(storage: Any) -> list[tuple[Any, Any, Any]]:
    """The results in the ``storage`` of the forward mode of ``create_selective_checkpoint_contexts``.

    Returns:
        A container, a key of it, and the entry there, for each. The leaves of an entry are wrappers that have the
        tensor as ``val``. Backward calls their ``get_val``.
    """
    found = []
    for entries in storage.values():
        keys = list(entries) if isinstance(entries, dict) else range(len(entries))
        found += [(entries, key, entries[key]) for key in keys]
    return found


#: torch's own mark for results that are computed again. Versions that keep results in lists have none.
_LET_GO = getattr(torch.utils.checkpoint, "_RECOMPUTE", object())


def let_go_result(container: Any, key: Any) -> None:
    """Let backward compute one of the `kept_results` again."""
    container[key] = _LET_GO


def was_let_go(storage: Any, operation: Any) -> bool:
    """Return whether the result that a recomputation takes next for this operation was let go, and take it.

    Only for versions of torch that keep lists of results: they ask the policy in the recomputation, and only then.
    """
    entries = storage.get(operation)
    if not entries or entries[0] is not _LET_GO:
        return False
    entries.pop(0)
    return True


def block_of(memory: torch.Tensor, nbytes: int) -> torch.UntypedStorage:
    """A storage over the first bytes of a flat tensor of bytes, whose memory it keeps alive."""
    return torch.from_dlpack(_to_dlpack(memory[:nbytes])).untyped_storage()


def override_stale_capture_streams() -> None:
    """Let backward run on the capturing stream what would run on a stream of before the capture. From torch 2.13."""
    enable = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if enable is not None:
        enable(True)


def symmetric_pool(device: torch.device, backend: Literal["NCCL"]) -> Any:
    """torch's pool of symmetric memory. Raises NotImplementedError if torch has none."""
    from torch.distributed import _symmetric_memory

    if not hasattr(_symmetric_memory, "get_mem_pool"):
        raise NotImplementedError(f"torch {torch.__version__} has no pools of symmetric memory")
    _symmetric_memory.set_backend(backend)
    return _symmetric_memory.get_mem_pool(device)


def make_symmetric(memory: torch.Tensor, group: Any) -> None:
    """Exchange the addresses of this memory among the ranks of the group. All must call it."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.rendezvous(memory, group)


#: The flight recorders of torch: of gloo's and other CPU collectives, and of NCCL's. A build may have both.
_FLIGHT_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def flight_entries() -> list[dict[str, Any]] | None:
    """The collectives that torch's flight recorders remember of this process; None: this torch has no recorder.

    Without stacks: with them a recorder may wait for the interpreter.
    """
    dumps = [getattr(torch._C._distributed_c10d, name, None) for name in _FLIGHT_RECORDERS]
    records = []
    for dump in dumps:
        if dump is not None:
            with suppress(RuntimeError, ValueError):
                records.append(json.loads(dump(True, False)))
    entries = [record.get("entries", []) for record in records if isinstance(record, dict)]
    return list(itertools.chain.from_iterable(entries)) if entries else None


def ranks_by_group_name() -> dict[str, list[int]]:
    """The ranks of each process group of this process, by the name that the flight recorder has for it."""
    return {name: dist.get_process_group_ranks(group) for group, name in list(_c10d._world.pg_names.items())}


def another_client(store: Any) -> Any:
    """Another connection to a store, for another thread: one call of a connection blocks the next ones."""
    return store.clone() if hasattr(store, "clone") else store


def call_before_compiling(action: Callable[[], None]) -> None:
    """Call this whenever torch begins to compile a graph. It stays for the life of the process."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: action())


def record_memory_history(enabled: bool) -> None:
    """Start or stop the CUDA allocator's record of allocations and releases, with stack traces."""
    torch.cuda.memory._record_memory_history(enabled="all" if enabled else None)


def dump_memory_history(path: str) -> None:
    """Write what it remembers into a file for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


#: Its name before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

foreach_copy_ = _probe(torch, "_foreach_copy_")
foreach_mul_ = _probe(torch, "_foreach_mul_")
foreach_norm = _probe(torch, "_foreach_norm")

#: The operation that sets several tensors to zero.
foreach_zero = _probe(torch.ops.aten, "_foreach_zero_", "default")

_foreach_clamp_min_ = _probe(torch, "_foreach_clamp_min_")
_foreach_clamp_max_ = _probe(torch, "_foreach_clamp_max_")


def foreach_clamp_(tensors: list[torch.Tensor], most: float) -> None:
    """Clamp each to [-most, most] in place."""
    _foreach_clamp_min_(tensors, -most)
    _foreach_clamp_max_(tensors, most)


#: A tensor subclass with this goes by its ``__torch_dispatch__`` alone.
disabled_torch_function = _probe(torch._C, "_disabled_torch_function_impl")


def annotate(name: str, unit: str = "") -> AbstractContextManager[Any]:
    """A range in the profiler's trace, named as FSDP2 names it; nothing while no profiler runs."""
    if not _profiler_enabled():
        return NOTHING
    return torch.profiler.record_function(f"FSDP::{name} ({unit})" if unit else f"FSDP::{name}")


def is_profiling() -> bool:
    """Whether torch's profiler records this thread."""
    return _profiler_enabled()  # type: ignore[no-any-return]


def synchronisation_events() -> Any:
    """Settings of torch's profiler with which waits of streams for events are in the trace."""
    return _ProfilerConfig(enable_cuda_sync_events=True)


class _Nothing:
    """A context that does nothing. Both methods are C functions, so it takes half of ``nullcontext``'s time."""

    __enter__ = __exit__ = "".format


NOTHING: AbstractContextManager[Any] = _Nothing()  # type: ignore[assignment]


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that all transforms of torch.func have wrapped."""
    while _is_functorch(tensor):
        tensor = _unwrap_transformed(tensor)
    return tensor


def traced() -> bool:
    """Whether make_fx records what runs now."""
    return bool(_dispatch_modes()) and any(map(_traces, _dispatch_mode_stack()))


def modes_are_active() -> bool:
    """Whether a dispatch mode sees the operations of this thread."""
    return bool(_dispatch_modes())


def outside_dispatch_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode sees the operations of this thread."""
    return _disable_dispatch_modes()  # type: ignore[no-any-return]


def infers_shapes(types: Iterable[type]) -> bool:
    """Whether an operation runs on fake tensors, or inside the mode that makes them."""
    return FakeTensor in types or _dispatch_mode(_FAKE) is not None


def dispatches(kind: type) -> bool:
    """Whether operations on tensors of this class go to its ``__torch_dispatch__``."""
    return kind.__torch_dispatch__ is not _no_dispatch  # type: ignore[attr-defined]


def mutation_allowed() -> bool:
    """Whether ``allow_mutation_on_saved_tensors`` copies saved tensors when others write to their memory."""
    return _graph._allow_mutation_on_saved_tensors_enabled  # type: ignore[no-any-return]


def alone(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, operations run outside of whatever the caller has around them that would change what they do.

    Those are transforms of torch.func, function modes, autocast on ``device``, and dispatch modes that trace, fake or
    copy. Other dispatch modes stay: they count operations and collectives, and are to see these, too. Mostly nothing is
    around, and that is all that is looked at then.
    """
    if not (_dispatch_modes() or transformed() or _function_modes() or _any_autocast()):
        return NOTHING
    return _alone(device.type)


def _traces(mode: Any) -> bool:
    return getattr(mode, "_mode_key", None) is _PROXY


def _changes_results(mode: Any) -> bool:
    return getattr(mode, "_mode_key", None) is not None or isinstance(mode, _CloneArgBeforeMutateMode)


@contextmanager
def _alone(device: str) -> Iterator[None]:
    with ExitStack() as stack:
        while transformed():
            stack.callback(_push_transform, _pop_transform())
        while _function_modes():
            stack.callback(_push_function_mode, _pop_function_mode())
        if torch.is_autocast_enabled(device):
            torch.set_autocast_enabled(device, False)
            stack.callback(torch.set_autocast_enabled, device, True)
        modes = _dispatch_mode_stack()
        if any(map(_changes_results, modes)):
            stack.enter_context(_disable_dispatch_modes())
            for mode in modes:
                if not _changes_results(mode):
                    _push_dispatch_mode(mode)
                    stack.callback(_pop_dispatch_mode)
        yield


_COMPILER_RULES = "torch._dynamo.trace_rules"


def hide_from_dynamo(files: Callable[[], Iterable[str]]) -> None:
    """Let torch.compile neither trace nor inline code of these files: it breaks its graph there and goes on after.

    ``files`` is called when the compiler is imported: now if it was imported before, else at that time. Programs that
    compile nothing do not wait for that import.
    """
    _when_imported(_COMPILER_RULES, lambda rules: _hide_files(rules, files))


def _hide_files(rules: Any, files: Callable[[], Iterable[str]]) -> None:
    # rules.add() takes one module and compiles the expression of all that are hidden, in 7 ms each.
    rules.SKIP_DIRS.extend(files())
    rules._recompile_re()


class _WhenImported(MetaPathFinder):
    """Finds a module as Python would, and calls a function with it as soon as it is executed."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self._name, self._function = name, function
        self._asking_others = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._asking_others:
            return None
        self._asking_others = True
        try:
            spec = find_spec(name)
        finally:
            self._asking_others = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._function(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _when_imported(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call a function with a module, now or after its import."""
    if name in sys.modules:
        function(importlib.import_module(name))  # waits while another thread imports it
    else:
        sys.meta_path.insert(0, _WhenImported(name, function))


# -- torch's own fully_shard, whose place this engine takes

#: The class that its sharded modules have, and by which torch and others know such.
if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
else:
    TorchFSDPModule = _probe(_fsdp, "FSDPModule")

_contract: Any = importlib.import_module("torch.distributed._composable.contract")
_STATE_KEY, _REGISTRY_KEY = _probe(_contract, "STATE_KEY"), _probe(_contract, "REGISTRY_KEY")
_RegistryItem = _probe(_contract, "RegistryItem")
#: Under which a module has its state: the function inside torch's decorator.
_sharding: Any = _probe(_fsdp, "fully_shard", "__wrapped__")
#: Read by torch.compile, and by transformers: every rank then runs the same layers and the same generation steps.
_MANAGED = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
#: Attributes of modules that say so.
SHARDED_MARKS = (_STATE_KEY, _REGISTRY_KEY, *_MANAGED)


def mark_fully_sharded(module: torch.nn.Module, state: Any) -> None:
    """Let torch find ``state`` by ``fully_shard.state(module)``, and the module among those that are sharded."""
    module.__dict__.setdefault(_STATE_KEY, {})[_sharding] = state
    module.__dict__.setdefault(_REGISTRY_KEY, {})[_sharding.__name__] = _RegistryItem()


def mark_managed(module: torch.nn.Module) -> None:
    """The module is sharded, or inside a sharded one."""
    module.__dict__.update(dict.fromkeys(_MANAGED, True))


def unmark_fully_sharded(module: torch.nn.Module) -> None:
    """Undo that: the module is a plain one."""
    module.__dict__.get(_STATE_KEY, {}).pop(_sharding, None)
    module.__dict__.get(_REGISTRY_KEY, {}).pop(_sharding.__name__, None)


def sharded_state_of(module: torch.nn.Module) -> Any:
    """The state that :func:`mark_fully_sharded` or torch's own ``fully_shard`` has put on a module, if any."""
    return module.__dict__.get(_STATE_KEY, {}).get(_sharding)


def sharded_or_replicated_by_torch(module: torch.nn.Module) -> str | None:
    """The name of torch's function that was applied to the module itself. This engine's modules have the same marks."""
    registry = module.__dict__.get(_REGISTRY_KEY, {})
    return next((name for name in (_sharding.__name__, "replicate") if name in registry), None)


_FSDP2_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
_FSDP2_NAMES = (
    "FSDPModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
_torchs_own = {name: getattr(_fsdp, name, None) for name in _FSDP2_NAMES}


def fsdp2_modules() -> list[ModuleType]:
    """The modules from which programs import FSDP2, if this torch has them."""
    modules = []
    for name in _FSDP2_MODULES:
        try:
            modules.append(importlib.import_module(name))
        except ImportError:
            pass
    return modules


def torchs_own(name: str) -> Any:
    """Torch's own object with a name of FSDP2, also after a replacement; None if this torch lacks it."""
    return _torchs_own[name]


class _FSDPClasses(dict[type, type]):
    """The sharded class of each class, as torch keeps them. Ours are there for those who look, not for torch to use."""

    def __init__(self, torchs: dict[type, type]) -> None:
        super().__init__(torchs)
        self.ours: dict[type, type] = {}

    def __contains__(self, cls: object) -> bool:
        return super().__contains__(cls) or cls in self.ours

    def __missing__(self, cls: type) -> type:
        return self.ours[cls]


def _share_classes() -> Any:
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    known = getattr(module, "cls_to_fsdp_cls", {})
    if hasattr(known, "ours"):  # of this file under another name, or imported before
        return known
    classes = _FSDPClasses(known)
    if hasattr(
        module, "cls_to_fsdp_cls"
    ):  # else this torch has no such table, and nothing that looks into it
        module.cls_to_fsdp_cls = classes
    return classes


#: The sharded class of each class, where torch.compile looks for it.
fsdp_classes: dict[type, type] = _share_classes().ours


#: Lets torch.compile run a function as it is, with all that it calls.
uncompiled: Callable[[Callable[..., Any]], Callable[..., Any]] = _probe(torch, "_compile", "_disable_dynamo")


def called_by_compiler() -> bool:
    """Whether the caller was called by torch.compile's own code, as it runs or traces a graph."""
    caller = str(sys._getframe(2).f_globals.get("__name__"))
    return caller.startswith(("torch._functorch.", "torch._dynamo.", "torch._subclasses."))


def called_by_parameter() -> bool:
    """Whether the caller was called by ``nn.Parameter(...)``, which wants ``detach`` to give a tensor of one class."""
    return sys._getframe(2).f_code is torch.nn.Parameter.__new__.__code__


def called_by_stager() -> bool:
    """Whether the caller was called by the stager of asynchronous checkpoints.

    To it an address that is not 0 says that the tensor itself has the memory, not a tensor inside it.
    """
    name = sys._getframe(2).f_globals.get("__name__")
    return name == "torch.distributed.checkpoint._state_dict_stager"


def boxes_to_save(name: str, tensor: torch.Tensor) -> list[tuple[Sequence[int], torch.Tensor]]:
    """Offsets and memory of the boxes of a tensor that this rank gives to a checkpoint.

    By the protocol of torch's distributed checkpoint, for DTensors, ShardedTensors and tensors that have it.
    """
    from torch.distributed.checkpoint.planner_helpers import _create_write_items
    from torch.distributed.checkpoint.utils import find_state_dict_object

    boxes: list[tuple[Sequence[int], torch.Tensor]] = []
    for item in _create_write_items(name, tensor):
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        boxes.append((chunk.offsets, find_state_dict_object({name: tensor}, item.index)))
    return boxes


def boxes_to_load(name: str, tensor: torch.Tensor) -> list[tuple[Sequence[int], torch.Tensor]]:
    """Offsets and memory of the boxes of a tensor that this rank takes from a checkpoint."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
    from torch.distributed.checkpoint.utils import find_state_dict_object

    return [
        (
            chunk.offsets,
            find_state_dict_object({name: tensor}, MetadataIndex(name, chunk.offsets, number)),
        )
        for number, chunk in enumerate(_create_chunk_list(tensor))
    ]


def flatten_state_dict(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Values of nested containers by names, and the path to each, as torch's distributed checkpoint has them."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten

    return flatten(state)


def storage_info(file: str, start: int, length: int) -> Any:
    """An entry of torch's distributed checkpoint: the bytes of a value in a file."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, length)


_SPLIT_BACKWARD = "torch.distributed.pipelining._backward"


def called_by_split_backward() -> bool:
    """Whether the caller was called by a zero-bubble pipeline schedule, or its ``parameters()`` was.

    Such a schedule looks for these parameters in the graph and puts gradients into them.
    """
    frame: Any = sys._getframe(2)
    if frame.f_code is torch.nn.Module.parameters.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _SPLIT_BACKWARD


_PARAMETRIZE = "torch.nn.utils.parametrize"


def refusal(message: str) -> RuntimeError:
    """The error for an operation that a sharded tensor does not support: NotImplementedError where torch lets it pass.

    ``register_parametrization`` takes NotImplementedError for a missing inverse, and goes on without the weight.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _PARAMETRIZE:
        frame = frame.f_back
    return NotImplementedError(message) if frame is None else RuntimeError(message)


def called_by_torchs_fully_shard() -> bool:
    """Whether the caller was called by torch's ``fully_shard``, which is about to take over a module's parameters."""
    return str(sys._getframe(2).f_globals.get("__name__")).endswith("._fully_shard._fsdp_init")


def compiled_graphs() -> int:
    """Number of graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


_InductorWrapper: Any = _probe(torch, "_TorchCompileInductorWrapper")
#: Graphs of one function that traces may make one after another.
_MOST_GRAPHS = 128


@contextmanager
def compile_by(compiler: Callable[[Any, Sequence[Any]], Callable[[list[Any]], Any]]) -> Iterator[None]:
    """Inside the context torch.compile gives the graphs of its own backend to ``compiler``, forward and backward apart:
    a graph of torch.fx and examples of its inputs, for a function that takes the inputs as a list and empties it.

    What was compiled before is forgotten, and so is afterwards what was compiled inside.
    """
    wrapper = _InductorWrapper
    before = wrapper.__call__
    used: int | None = None  #: the limit of graphs before the first one

    def compile_graph(self: Any, graph: Any, inputs: Any, **_: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

        def divide(joint: Any, *arguments: Any, **options: Any) -> Any:
            joint_graph_passes(joint)
            return min_cut_rematerialization_partition(joint, *arguments, **options)

        nonlocal used
        if used is None:
            limits = torch._dynamo.config
            used, limits.recompile_limit = limits.recompile_limit, max(limits.recompile_limit, _MOST_GRAPHS)
        return aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            decompositions=select_decomp_table(),
            partition_fn=divide,
        )(graph, inputs)

    if "torch._dynamo" in sys.modules and compiled_graphs():
        torch._dynamo.reset()
    wrapper.__call__ = compile_graph  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        wrapper.__call__ = before  # type: ignore[method-assign]
        if used is not None:
            torch._dynamo.config.recompile_limit = used
            torch._dynamo.reset()


#: The class of an operation with a schema, as graphs of torch.fx have them.
OpOverload: Any = _probe(torch._ops, "OpOverload")


def donated_inputs(graph: Any) -> set[int]:
    """The numbers of the inputs of a graph that nobody reads after it: saved tensors, if the graph is a backward.

    Called by a ``compiler``, see :func:`compile_by`.
    """
    if not any(
        str(node.target).startswith("tangents") for node in graph.graph.nodes if node.op == "placeholder"
    ):
        return set()
    context = torch._guards.TracingContext.try_get()
    facts = None if context is None else context.fw_metadata
    return set(getattr(facts, "bw_donated_idxs", None) or ())


def set_activation_memory_budget(part: float) -> None:
    """Let torch.compile keep this part of what it would keep for backward; of 0 the inputs only. For the process."""
    import torch._functorch.config as config

    config.activation_memory_budget = part


def allow_graphs(count: int) -> None:
    """Let torch.compile make at least so many graphs of one function. For the process."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, count)


#: Name, in ``torch.nn.init``, of what fills a tensor with truncated normal numbers, in a loop that looks at them.
fill_truncated_normal = "_no_grad_trunc_normal_"
_probe(torch.nn.init, fill_truncated_normal)

#: ``make_subclass(kind, tensor)``: the tensor's memory as an instance of a subclass.
make_subclass: Callable[..., Any] = _probe(torch.Tensor, "_make_subclass")

#: ``make_wrapper(kind, shape, dtype=, device=, ...)``: an instance of a subclass, without memory of its own.
make_wrapper: Callable[..., Any] = _probe(torch.Tensor, "_make_wrapper_subclass")


def tensor_without_memory(kind: type, meta: torch.Tensor, device: torch.device) -> Any:
    """A tensor of class ``kind`` over the storage of ``meta`` that reports ``device`` as its device.

    The class is asked for its device (``prim.device``) and about every operation.
    """
    return make_subclass(kind, meta, False, dispatch_device=True, device_for_backend_keys=device)


def generator_key(generator: torch.Generator) -> int:
    """The same for every Python object that stands for one generator, which operations are handed others of."""
    return generator._cdata  # type: ignore[attr-defined,no-any-return]


def set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """``tensor.data = new``, whatever the class of ``tensor`` makes of that."""
    torch.Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]


def _subclasses_dispatch() -> bool:
    # Elsewhere C++ takes every DTensor past Python, and what stands there only says so.
    code = DTensor.__torch_dispatch__.__code__
    return not any("should not actually get called" in str(constant) for constant in code.co_consts)


#: Whether subclasses of DTensor are asked about operations on them. In torch 2.11 they are not.
subclasses_dispatch = _subclasses_dispatch()


#: Set an object's class also where its class gives another one as ``__class__`` (``tensors/same_object.py``).
set_class: Callable[[Any, type], None] = object.__dict__["__class__"].__set__
_exchange_tensors = getattr(torch._C, "_swap_tensor_impl", None)
_EMPTY = torch.empty(0, device="cpu")
#: The number of C++ references to a tensor: one by its Python object, and one by each graph that uses it.
_references_to = _probe(torch.Tensor, "_use_count")
#: Whether an object that is laid out as ``nn.Parameter`` can become a sharded tensor.
objects_become_sharded = subclasses_dispatch and _exchange_tensors is not None


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Let two Python objects exchange what they are: tensor, class and attributes. References to them stay.

    As ``torch.utils.swap_tensors``, but weak references and graphs may refer to them. A graph keeps the tensor, not the
    object. Both objects must have the same gradient hooks, which stay where they are.

    Raises:
        RuntimeError, TypeError: the objects are laid out differently, or C++ refers to a tensor weakly. Nothing has
            changed then.
    """
    if _exchange_tensors is None:
        raise RuntimeError(f"torch {torch.__version__} cannot exchange tensors")
    kinds = type(one), type(other)
    slots = [name for name in DTensor.__slots__ if all(_is_slot(kind, name) for kind in kinds)]
    set_class(one, kinds[1])
    try:
        set_class(other, kinds[0])
        _exchange_tensors(one, other)
    except BaseException:
        set_class(one, kinds[0])
        set_class(other, kinds[1])
        raise
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    for name in slots:
        values = getattr(one, name), getattr(other, name)
        setattr(one, name, values[1])
        setattr(other, name, values[0])


def _is_slot(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), MemberDescriptorType)


def moved_into(kind: type, source: Any) -> Any:
    """Return an object of class ``kind``, laid out as a plain tensor, that is the tensor ``source``.

    ``source`` is an empty tensor afterwards. Its slots are attributes of the result.
    """
    assert _exchange_tensors is not None
    made = make_subclass(torch.Tensor, _EMPTY)
    attributes = {**vars(source), **{name: getattr(source, name) for name in type(source).__slots__}}
    _exchange_tensors(made, source)
    made.__dict__.update(attributes)
    set_class(made, kind)
    return made


def refuse_backward(parameter: torch.Tensor, message: str) -> Any:
    """Let every backward raise RuntimeError that reaches ``parameter``, a leaf, through a graph from before.

    Returns a handle, which ends this, or None if no graph can reach it.
    """
    if not (parameter.requires_grad and parameter.is_leaf) or _references_to(parameter) < 2:
        return None

    def refuse(gradients: Any) -> None:
        raise RuntimeError(message)

    return torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(refuse)


#: Methods of a group or of its backend: all-gather and reduce-scatter of one flat tensor.
all_gather_of: Callable[[Any], Callable[..., Any]] = operator.attrgetter("_allgather_base")
reduce_scatter_of: Callable[[Any], Callable[..., Any]] = operator.attrgetter("_reduce_scatter_base")


def backend_for(group: Any, device: torch.device) -> Any:
    """The backend that serves ``device`` in a group, however the group was made."""
    return group._get_backend(device)


def timeout_of_world() -> timedelta:
    """The timeout of the job's group, on the accelerator if it has a backend for one."""
    world: Any = dist.group.WORLD
    kinds = sorted(world._device_types, key=lambda device: device.type == "cpu")
    return timeout_of(world._get_backend(kinds[0]))


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Let the collectives of a group wait this long, on every device of it whose backend can be told."""
    for kind in group._device_types:
        setter = getattr(group._get_backend(kind), "_set_default_timeout", None)
        if setter is not None:
            setter(timeout)


def has_expandable_segments() -> bool:
    """Return whether the environment asks for expandable segments of the device's memory."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.lower().replace(" ", "")


@contextmanager
def without_bound_device() -> Iterator[None]:
    """Inside, the job's group is bound to no device, so that new groups are made without it."""
    world: Any = dist.group.WORLD
    device = getattr(world, "bound_device_id", None)
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def log_errors_alone() -> None:
    """Let torch log nothing but errors, unless the user has chosen its logs."""
    if "TORCH_LOGS" not in os.environ:
        torch._logging.set_logs(all=logging.ERROR)


def ranks_of_collective(arguments: Iterable[Any]) -> list[int]:
    """The ranks of the group, or of the group's name, among the arguments of a collective. Empty: there is none."""
    resolved: Any = _c10d._resolve_process_group
    for each in arguments:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            each = dist.ProcessGroup.unbox(each).group_name
        if isinstance(each, str):
            with suppress(Exception):
                return dist.get_process_group_ranks(resolved(each))
    return []


def timeout_of(backend: Any) -> timedelta:
    """The timeout after which collectives of a backend stop waiting for other ranks."""
    options = getattr(backend, "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.default_pg_timeout


def use_one_gloo_thread() -> None:
    """Give each gloo group that this process makes from now on one worker thread instead of two.

    After every collective the worker threads of a group write its name into one string that no lock guards. A name of
    16 characters or more is stored on the heap, and two threads that write such names corrupt it. torch's Python
    ignores the option for the number of threads, so its class is replaced by one that sets it. A torch without that
    option is left as it is.
    """
    original: Any = getattr(_c10d, "ProcessGroupGloo", None)
    if not hasattr(original, "_Options") or getattr(original, "one_thread", False):
        return

    # Group objects stay of torch's own class: C++ hands them out as such, and torch checks that with isinstance.
    class OneThread(type(original)):  # type: ignore[misc]
        one_thread = True  # so that a second call changes nothing

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __call__(cls, store: Any, rank: int, size: int, timeout: Any = None, **settings: Any) -> Any:
            options = original._Options()
            options._threads = 1
            names = os.environ.get("GLOO_SOCKET_IFNAME", "")  # as torch reads it
            options._devices = [original.create_device(interface=name) for name in names.split(",") if name]
            options._devices = options._devices or [original.create_default_device()]
            if timeout is not None:
                options._timeout = timeout
            for name, value in settings.items():  # of newer versions: enable_reconfigure
                setattr(options, name, value)
            return original(store, rank, size, options)

    vars(_c10d)["ProcessGroupGloo"] = OneThread("ProcessGroupGloo", (original,), {})


def default_store() -> Any:
    """The key-value store in which the ranks of this job have met; None without process groups."""
    return _default_store() if dist.is_initialized() else None


#: The local tensor itself. ``to_local`` of a parameter makes a new view at every call.
local_of: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")


def made_of(kind: Any, parts: dict[str, torch.Tensor], context: Any, like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of such a class, of ``like``'s shape, from what ``__tensor_flatten__`` gives."""
    stride = torch.empty(like.shape, device="meta").stride()
    return kind.__tensor_unflatten__(parts, context, like.shape, stride)  # type: ignore[no-any-return]


def dtensor_of(
    local: torch.Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """``local`` as a DTensor. It stays on its device, also if the mesh has another device (it was offloaded)."""
    if local.device.type == mesh.device_type or local.is_meta:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    meta = _TensorMeta(shape, tuple(stride), local.dtype)
    spec = _DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=local.requires_grad)  # type: ignore[call-arg]


_AsyncCollectiveTensor = _probe(_functional_collectives, "AsyncCollectiveTensor")


#: The operations by which DTensor communicates. torch looks each one up here when it calls it.
functional_collectives: Any = torch.ops._c10d_functional
_functional_all_reduce = _probe(_functional_collectives, "all_reduce")
_REDUCTIONS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}


def is_traced(local: torch.Tensor) -> bool:
    """Whether torch.compile traces operations on this tensor."""
    return isinstance(local, (FakeTensor, FunctionalTensor))


def all_reduce_traced(local: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    """The all-reduce as a part of a graph; the others are carried out while it is traced, and never again."""
    return waited(_functional_all_reduce(local, _REDUCTIONS[op], group))


def waited(local: torch.Tensor) -> torch.Tensor:
    """A local tensor that DTensor may still be communicating, as a plain one."""
    return local.wait() if isinstance(local, _AsyncCollectiveTensor) else local


def replicates_implicitly() -> bool:
    """Whether DTensor takes plain tensors for replicated ones, inside torch's ``implicit_replication()``."""
    return bool(getattr(DTensor._op_dispatcher, "_allow_implicit_replication", False))


#: ``Shard`` of a dimension that a mesh dimension further right has cut before.
StridedShard = _probe(placement_types, "_StridedShard")
_concatenate = _probe(DeviceMesh, "_concatenate")


def concatenated(*meshes: DeviceMesh) -> DeviceMesh:
    """The mesh of the dimensions of parts of one mesh, in this order. RuntimeError if they are no such parts."""
    return _concatenate(list(meshes))


_flatten = _probe(DeviceMesh, "_flatten")


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of one dimension over the same ranks. All of them must call it."""
    return _flatten(mesh)


_root_mesh = _probe(DeviceMesh, "_get_root_mesh")


def root_mesh_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh from which this one was sliced, or this one."""
    return _root_mesh(mesh)


def rebind(dtensor: DTensor, new: DTensor) -> None:
    """Make ``dtensor``, the same object, what ``new`` is: shape, dtype, local tensor and placement."""
    # An assignment to ``.data`` changes the outside of a wrapper subclass only.
    torch.Tensor.data.__set__(dtensor, new)  # type: ignore[attr-defined]
    dtensor._local_tensor = new._local_tensor
    dtensor._spec = new._spec


#: Hooks of ``Tensor.register_hook``, which autograd cannot call on a parameter it never sees.
gradient_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = operator.attrgetter("_backward_hooks")


#: ``requires_grad`` of a tensor. Takes less time than the attribute where many are read.
requires_grad_of: Callable[[torch.Tensor], bool] = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
#: ``.grad`` of a tensor and its assignment, also where a class has a property of this name.
grad_of: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = torch.Tensor.grad.__set__  # type: ignore[union-attr]


def waits_for_other_gradients(hook: Any) -> bool:
    """Return whether a gradient hook was made by ``register_multi_grad_hook`` with mode "all".

    It counts the nodes of its tensors that autograd will run, and a sharded parameter has none that autograd runs.
    """
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_name == "inner_hook" and code.co_filename == _graph.__file__


def share_gradient_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give ``target`` the hooks that were registered on ``source``. Their handles still work."""
    target._backward_hooks = source._backward_hooks  # type: ignore[assignment]
    target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks  # type: ignore[attr-defined]


#: Hooks of ``register_post_accumulate_grad_hook``, which autograd cannot call on a parameter it never sees.
post_accumulate_grad_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)


def set_post_accumulate_grad_hooks(parameter: torch.Tensor, hooks: dict[int, Any] | None) -> None:
    parameter._post_accumulate_grad_hooks = hooks  # type: ignore[assignment]


_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip


def hook_count(model: torch.nn.Module) -> int:
    """The number of hooks on the modules and parameters of a model."""
    owners = (*model.modules(), *model.parameters())
    return sum(len(getattr(owner, name, None) or ()) for owner in owners for name in _HOOKS)


def muon_functions() -> tuple[Callable[..., torch.Tensor], Callable[..., Any]] | None:
    """Two functions of torch's Muon: one orthogonalizes a direction, one adjusts the learning rate to a shape.

    None if this torch does not have them under these names.
    """
    module = getattr(torch.optim, "_muon", None)
    functions = [getattr(module, name, None) for name in ("_zeropower_via_newtonschulz", "_adjust_lr")]
    return None if None in functions else tuple(functions)  # type: ignore[return-value]


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[[Any], Any]:
    """The original step of an optimizer class. torch wraps it, for hooks, when it makes the first instance."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Hooks that were registered on this optimizer to run before or after its step."""
    return [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ]


def seen_by_schedulers(step: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a step so that learning-rate schedulers do not wrap it. It reports its calls to them itself.

    Otherwise they would put a wrapper into the optimizer, which would still call the step of the old class.
    """
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def tell_schedulers(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step was called, so a scheduler may step, too, and need not warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def only_schedulers_wrap(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step in the optimizer itself is no more than its class's, in what a scheduler puts around it."""
    step = vars(optimizer)["step"]
    return (
        hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    )


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward now running has finished; valid only inside a backward."""
    _engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread is now inside a backward pass."""
    return _graph_task_id() != -1


def keeps_graph() -> bool:
    """Whether the backward that runs now keeps its graph for another one."""
    return _keeps_graph()  # type: ignore[no-any-return]


def number_of_next_node() -> int:
    """The number that the next node of autograd's graph gets in this thread."""
    return _next_number()  # type: ignore[no-any-return]


def number_of_running_node() -> int:
    """The number of the node that backward runs now in this thread; -1 outside of one."""
    node = _running_node()
    return -1 if node is None else node._sequence_nr()  # type: ignore[no-any-return]


def watch_backward(run: Callable[..., Any]) -> None:
    """From now on let ``run`` carry out each ``backward`` and ``torch.autograd.grad`` of this process.

    It is called as ``run(original, outputs, gradients, retain_graph, create_graph, inputs, *rest, **options)``; all but
    the first are arguments of ``original``. torch itself asks nothing of tensors that backward does not reach.
    """

    @functools.wraps(_run_backward)
    def watched(*args: Any, **options: Any) -> Any:
        return run(_run_backward, *args, **options)

    # torch.compile puts a function of its own here for a while, and afterwards what the second name has.
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = watched  # type: ignore[attr-defined]


def watch_zero_grad(after: Callable[[Iterable[torch.Tensor]], None]) -> None:
    """From now on call ``after`` with the parameters after each ``zero_grad`` of an optimizer or a module.

    torch has no hooks for it.
    """

    def watched(kind: Any, parameters_of: Callable[[Any], Iterable[torch.Tensor]]) -> None:
        original = kind.zero_grad

        @functools.wraps(original)
        def zero_grad(self: Any, *args: Any, **options: Any) -> None:
            original(self, *args, **options)
            if not torch.compiler.is_compiling():
                after(parameters_of(self))

        kind.zero_grad = zero_grad

    watched(torch.optim.Optimizer, lambda optimizer: (p for g in optimizer.param_groups for p in g["params"]))
    watched(torch.nn.Module, lambda module: module.parameters())


def watch_optimizer_states(make: Callable[..., None], read: Callable[..., Any]) -> None:
    """From now on let ``make`` make the state of optimizers that have none, and ``read`` read states, for torch's
    functions of ``torch.distributed.checkpoint.state_dict``.

    They are called as ``make(original, optimizer)`` and ``read(original, model, optimizers, info)``. The module is not
    imported here, since it takes long.
    """

    def install(module: Any) -> None:
        for name, run in (("_init_optim_state", make), ("_get_optim_state_dict", read)):
            original = _probe(module, name)
            setattr(module, name, functools.wraps(original)(functools.partial(run, original)))

    _when_imported("torch.distributed.checkpoint.state_dict", install)


def preserve_version_counters(tensors: Sequence[torch.Tensor]) -> Any:
    """A context that leaves the tensors' version counters as they were."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(t for t in tensors if not t.is_inference()))


def leaf_of(node: Any) -> torch.Tensor | None:
    """The tensor whose gradients this node of a graph adds up, if it is such a node."""
    return node.variable if node.name() == "torch::autograd::AccumulateGrad" else None


def is_transformed(tensor: Any) -> bool:
    """Whether torch.func, or a vmap, has wrapped the tensor."""
    return isinstance(tensor, torch.Tensor) and (_is_functorch(tensor) or _is_batched(tensor))


def is_persistent(module: torch.nn.Module, buffer: str) -> bool:
    """Whether state dicts have this buffer of the module."""
    return buffer not in module._non_persistent_buffers_set


def address_of(tensor: torch.Tensor) -> int:
    """The address of the tensor's memory; 0 for tensors without memory (sparse, or wrapped by torch.func)."""
    return tensor.data_ptr() if tensor.layout is torch.strided and not _is_functorch(tensor) else 0


def sequence_number(tensor: torch.Tensor) -> int:
    """Number of the autograd node that made the tensor; later nodes of a thread have larger numbers."""
    return tensor.grad_fn._sequence_nr()  # type: ignore[union-attr]


def next_sequence_number() -> int:
    """Number of the autograd node that this thread makes next."""
    return _peek_sequence_number()


#: Whether a tensor is a view of another.
is_view: Callable[[torch.Tensor], bool] = _probe(torch.Tensor, "_is_view")


def storage_class(storage: torch.TypedStorage) -> Any:
    """The class as which a storage with a dtype is pickled, such as ``torch.FloatStorage``."""
    return getattr(torch, storage._pickle_storage_type())


def storage_key(memory: torch.Tensor | torch.UntypedStorage) -> int:
    """A key that is equal for all tensors over one storage while one of them lives, also without memory."""
    storage = memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory
    return storage._cdata


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Number of tensors and storage handles that refer to this memory."""
    return _use_count(storage_key(storage))


@contextmanager
def absent_ranks(size: int) -> Iterator[None]:
    """Inside the context this process is rank 0 of ``size``, and the others do not exist: collectives move nothing.

    Raises:
        RuntimeError: the process has joined a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("This process is a rank of a process group; a plan needs a process of its own.")
    _forget_meshes()
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Let DTensor forget the results of its operations. They have meshes, and meshes of other ranks can be equal to
    these: their groups are gone, or their names belong to other groups now."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


@contextmanager
def watch_resizes(
    on_resize: Callable[[torch.UntypedStorage], None],
    memory_of: Callable[[int], torch.UntypedStorage],
) -> Iterator[None]:
    """Inside the context ``on_resize`` is called with each storage that Python code has given another size.

    ``memory_of``: returns a storage of so many bytes, whose memory a resized storage gets if this machine refuses to
    allocate as much.
    """
    plain, plain_resizable = torch.UntypedStorage.resize_, torch.UntypedStorage.resizable
    #: By a storage that got such memory, the empty storage that gave it. With the memory they have exchanged whether
    #: they can be resized.
    lenders: dict[int, torch.UntypedStorage] = {}

    def resizable(storage: torch.UntypedStorage) -> bool:
        return plain_resizable(storage) or storage._cdata in lenders

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if not plain_resizable(storage) and (lender := lenders.pop(storage._cdata, None)) is not None:
            swap_memory(storage, lender)
        try:
            plain(storage, nbytes)
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            plain(storage, 0)
            lender = lenders[storage._cdata] = memory_of(nbytes)
            swap_memory(storage, lender)
        on_resize(storage)
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.resizable = resizable  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]
        torch.UntypedStorage.resizable = plain_resizable  # type: ignore[method-assign]


@contextmanager
def watch_reads(on_read: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside the context ``on_read`` is called with each tensor of which ``tolist`` or ``numpy`` is called, or by whose
    values ``tensor_split`` divides another one: torch reads them without an operation."""
    with ExitStack() as stack:
        places: tuple[Any, ...] = (torch, torch.Tensor)
        for place in places:
            plain_split = place.tensor_split

            def split(tensor: Any, *args: Any, plain: Any = plain_split, **kwargs: Any) -> Any:
                for each in (*args, *kwargs.values()):
                    if isinstance(each, torch.Tensor):
                        on_read(each)
                return plain(tensor, *args, **kwargs)

            place.tensor_split = split
            stack.callback(setattr, place, "tensor_split", plain_split)
        for name in ("tolist", "numpy"):
            plain = getattr(torch.Tensor, name)

            def read(tensor: torch.Tensor, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
                on_read(tensor)
                return plain(tensor, *args, **kwargs)

            setattr(torch.Tensor, name, read)
            stack.callback(setattr, torch.Tensor, name, plain)
        yield
