"""Private names of torch, and differences between its versions.

Nothing else imports a private name of torch. Each file has the names of one part of torch and looks them up when it is
imported, so that a torch that lacks one is refused at once. Each other room of the engine imports from the file; other
rooms import from this door.
"""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.engine.compat.autograd import (
        hook_of_checkpoint,
        in_backward,
        increment_version,
        keeps_graph,
        kept_results,
        let_go_result,
        number_of_next_node,
        number_of_running_node,
        saves_for_checkpoint,
        share_gradient_hooks,
        takes_hooks_of_saved_tensors,
        was_let_go,
    )
    from shardwright.engine.compat.checkpoints import (
        boxes_to_load,
        boxes_to_save,
        flatten_state_dict,
        storage_info,
    )
    from shardwright.engine.compat.collectives import (
        absent_ranks,
        all_gather_single,
        another_client,
        default_store,
        flight_entries,
        ranks_by_group_name,
        ranks_of_collective,
        use_one_gloo_thread,
    )
    from shardwright.engine.compat.compiler import (
        allow_graphs,
        call_before_compiling,
        compile_by,
        compiled_graphs,
        donated_inputs,
        hide_from_dynamo,
        log_errors_alone,
        set_activation_memory_budget,
        uncompiled,
    )
    from shardwright.engine.compat.dtensor import dtensor_of, local_of
    from shardwright.engine.compat.fully_shard import DataParallelMeshDims
    from shardwright.engine.compat.modes import (
        TorchDispatchMode,
        alone,
        disabled_torch_function,
        dispatches,
        infers_shapes,
        outside_dispatch_modes,
        quick_attributes,
    )
    from shardwright.engine.compat.optimizers import (
        muon_functions,
        only_schedulers_wrap,
        seen_by_schedulers,
        step_hooks,
        step_without_hooks,
        tell_schedulers,
    )
    from shardwright.engine.compat.profiling import (
        dump_memory_history,
        is_profiling,
        record_memory_history,
        synchronisation_events,
    )
    from shardwright.engine.compat.storages import (
        MissingCompilerError,
        has_expandable_segments,
        prepare_to_swap_memory,
        storage_class,
        storage_key,
        storage_use_count,
        watch_resizes,
    )
    from shardwright.engine.compat.tensors import (
        OpOverload,
        exchange,
        fill_truncated_normal,
        foreach_clamp_,
        foreach_copy_,
        foreach_mul_,
        foreach_norm,
        generator_key,
        hook_count,
        is_persistent,
        set_data,
        tensor_without_memory,
        tree_flatten,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_unflatten,
        watch_reads,
    )

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
