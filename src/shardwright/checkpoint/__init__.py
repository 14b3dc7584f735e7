"""Checkpoints of training, pretrained weights, and weights that travel to other processes.

    sw.save_checkpoint("step-100", model, optimizer, extra={"step": 100})                    # docs/checkpoints.md
    extra = sw.load_checkpoint("step-100", model, optimizer)
    sw.load_pretrained(model, "llama-3-8b/", key_map=hugging_face.key_map(model.config))     # docs/pretrained.md

Each rank reads and writes only its part; no rank ever holds the model. Programs that look into checkpoints find here
:func:`open_checkpoint`, :class:`Damaged` and the random generators. The trainer and the Fabric strategy save and load
through these names. In a key map :class:`Transposed`, :class:`Slice`, :class:`Stacked` and :class:`Joined` describe
tensors that are stored in another form.

``training`` has the state of a run, and ``asynchronous`` writes it in the background. Both use ``save`` and ``load``.
These use ``format``, the form of files, and ``storage``, the places of files: folders and URLs. ``dcp`` reads folders
of torch's distributed checkpoint. ``pretrained``, ``stream`` and ``convert`` are the other ways in and out.

Names are imported at first use, so that reading a token cache or a digest does not import the engine.
"""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.checkpoint.asynchronous.async_checkpoint import AsyncCheckpoint as AsyncCheckpoint
    from shardwright.checkpoint.format.index import UnknownVersion as UnknownVersion
    from shardwright.checkpoint.format.nested import nested as nested
    from shardwright.checkpoint.load.checkpoints import StoredForm as StoredForm
    from shardwright.checkpoint.pretrained.files import FileTensor as FileTensor, open_stored as open_stored
    from shardwright.checkpoint.pretrained.key_maps import (
        Joined as Joined,
        KeyMap as KeyMap,
        Slice as Slice,
        Stacked as Stacked,
        TensorSource as TensorSource,
        Transposed as Transposed,
    )
    from shardwright.checkpoint.pretrained.load_pretrained import (
        Loaded as Loaded,
        load_pretrained as load_pretrained,
    )
    from shardwright.checkpoint.pretrained.save_pretrained import save_pretrained as save_pretrained
    from shardwright.checkpoint.storage.local_store import has_description as has_description
    from shardwright.checkpoint.storage.locations import (
        check_writable as check_writable,
        folder_or_url as folder_or_url,
        is_checkpoint as is_checkpoint,
        list_checkpoints as list_checkpoints,
        remove_checkpoint as remove_checkpoint,
        remove_unfinished as remove_unfinished,
        replaces_checkpoints as replaces_checkpoints,
    )
    from shardwright.checkpoint.storage.publishing import write_file as write_file
    from shardwright.checkpoint.stream.receive import receive_weights as receive_weights
    from shardwright.checkpoint.stream.send import stream_weights as stream_weights
    from shardwright.checkpoint.training.generators import (
        generator_states as generator_states,
        seed_generators as seed_generators,
        set_generator_states as set_generator_states,
    )
    from shardwright.checkpoint.training.load_checkpoint import load_checkpoint as load_checkpoint
    from shardwright.checkpoint.training.open_checkpoint import (
        StoredCheckpoint as StoredCheckpoint,
        open_checkpoint as open_checkpoint,
    )
    from shardwright.checkpoint.training.save_checkpoint import (
        save_checkpoint as save_checkpoint,
        save_state as save_state,
    )
    from shardwright.common.errors import Damaged as Damaged

# For other rooms of the package.
if TYPE_CHECKING:
    from shardwright.checkpoint.convert.conversion import convert_checkpoint
    from shardwright.checkpoint.dcp.opcodes import not_plain
    from shardwright.checkpoint.format.boxes import Box
    from shardwright.checkpoint.format.names import INDEX, METADATA
    from shardwright.checkpoint.format.nested import NestedState, StateTensor
    from shardwright.checkpoint.pretrained.conversions import stored_key_map, transformers_key_map
    from shardwright.checkpoint.pretrained.files import (
        SAFETENSORS_INDEX,
        abbreviated,
        write_json,
    )
    from shardwright.checkpoint.pretrained.key_maps import Rule, source_of
    from shardwright.checkpoint.pretrained.model import ModelTensor, ranks_of, tensors_of
    from shardwright.checkpoint.pretrained.save_pretrained import write_model, write_stored_model
    from shardwright.checkpoint.pretrained.stored_model import bytes_of, stored_model_of
    from shardwright.checkpoint.training.save_checkpoint import SHARED, state_to_save

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
