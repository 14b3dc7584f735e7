"""The sharding engine: ``fully_shard`` and what happens in the hooks it installs."""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

# For programs of users; `shardwright` has these names, too.
if TYPE_CHECKING:
    from shardwright.engine.assembly.find import ShardPlacementResult as ShardPlacementResult
    from shardwright.engine.base.offload import Offload as Offload
    from shardwright.engine.base.precision import PrecisionPolicy as PrecisionPolicy
    from shardwright.engine.front import wrap as wrap
    from shardwright.engine.front.api import fully_shard as fully_shard
    from shardwright.engine.front.corruption import (
        Difference as Difference,
        GradientHashes as GradientHashes,
        compare_copies as compare_copies,
        compare_gradients as compare_gradients,
        hash_gradients as hash_gradients,
    )
    from shardwright.engine.front.describe import Description as Description, describe as describe
    from shardwright.engine.front.graphed import GraphedStep as GraphedStep
    from shardwright.engine.front.methods import register_fsdp_forward_method as register_fsdp_forward_method
    from shardwright.engine.front.module import (
        FSDPModule as FSDPModule,
        UnshardHandle as UnshardHandle,
        share_comm_ctx as share_comm_ctx,
    )
    from shardwright.engine.front.replace import replace_torch as replace_torch
    from shardwright.engine.front.report import MemoryReport as MemoryReport, memory_report as memory_report
    from shardwright.engine.front.whole import unsharded as unsharded

# For the library's other rooms, the planner and the trainer.
if TYPE_CHECKING:
    from shardwright.engine import heartbeat
    from shardwright.engine.assembly.find import UNIT, ShardPlacementFn, inner_first
    from shardwright.engine.assembly.states import TakenTensor, check_states, digest, hash_of, plain_tensors
    from shardwright.engine.base.companion import COMPANION, Companion, companion_of
    from shardwright.engine.base.names import plain_name, without_wrappers
    from shardwright.engine.base.offload import Host, whole_of
    from shardwright.engine.base.precision import refuse_gradient_dtypes
    from shardwright.engine.collective import (
        OtherRankFailed,
        RankGroup,
        described,
        is_lost_contact,
        raise_for,
    )
    from shardwright.engine.front.composable import ModuleState
    from shardwright.engine.front.corruption import OWN, HashKey, names_in, state_hashes, unit_name
    from shardwright.engine.front.methods import call_as_forward
    from shardwright.engine.front.module import original_class
    from shardwright.engine.front.report import in_units
    from shardwright.engine.front.whole import agree_to_gather
    from shardwright.engine.front.wrap import as_policy
    from shardwright.engine.gradients import delivery
    from shardwright.engine.gradients.packer import forget_zeros
    from shardwright.engine.gradients.stepping import SteppedGradient, Stepping, forget_stepped
    from shardwright.engine.heartbeat import (
        ENTRY,
        HEADER,
        MAGIC,
        RING_AT,
        SLOTS,
        VERSION,
        WORD,
        Heartbeat,
        ranks_in_words,
    )
    from shardwright.engine.model.calls import Calls, spare_weights
    from shardwright.engine.model.divergence import CLIP
    from shardwright.engine.model.optimizer_hook import (
        COUNTS_STEPS,
        before_optimizer_step,
        count_step,
        fit_gradients,
        hook_optimizers,
        reduce_held,
        refuse_dead,
    )
    from shardwright.engine.model.optimizer_states import parameters_of, zero_gradient
    from shardwright.engine.model.root import root_of
    from shardwright.engine.tensors.edits.unset import FILLING, unmark
    from shardwright.engine.tensors.meshes import ascends
    from shardwright.engine.tensors.parameter import (
        DEFERRED,
        STANDS_FOR,
        UNIT_OF,
        Managed,
        ManagedParameter,
        Slot,
        has_no_values,
        plain_of,
        refuse_while_deferring,
        unit_of,
    )
    from shardwright.engine.tensors.ragged.spec import RaggedSpec
    from shardwright.engine.tensors.ragged.tensor import RaggedDTensor, RaggedTensor, part_of
    from shardwright.engine.tensors.rows.tensor import as_sharded
    from shardwright.engine.tensors.same_object import TAKEN, count_of_objects, is_refused
    from shardwright.engine.tensors.tensor_parallel import cut_dim
    from shardwright.engine.unit.owning import settle, units_of
    from shardwright.engine.unit.unit import Unit
    from shardwright.engine.unit.uses import complete

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
