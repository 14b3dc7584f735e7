"""Activations: which results of forward exist until backward, and for how long.

``token_loss`` has the losses of tokens, and
``chunked_loss`` computes one whose logits are never whole; ``token_rows`` and ``held_gradients`` its arguments
and its gradients, and ``head_call`` one call of the module that makes logits. ``deferred_logits`` lets a whole model
use it: the model's own code runs, and its logits are a record of them. ``causal_lm`` gives models of transformers this
loss. ``checkpointing`` drops activations of blocks and computes them again. ``offload`` stores them in the host's
memory, in buffers of ``host_pool``. Nothing here knows configurations or the trainer.
"""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.activations.causal_lm import chunk_causal_lm_loss as chunk_causal_lm_loss
    from shardwright.activations.checkpointing import (
        checkpoint_blocks as checkpoint_blocks,
        compile_blocks as compile_blocks,
    )
    from shardwright.activations.chunked_loss import chunked_cross_entropy as chunked_cross_entropy
    from shardwright.activations.offload import offload_activations as offload_activations
    from shardwright.activations.token_loss import (
        TokenLoss as TokenLoss,
        cross_entropy as cross_entropy,
        losses_of_tokens as losses_of_tokens,
        z_loss as z_loss,
    )

# For other rooms of the package.
if TYPE_CHECKING:
    from shardwright.activations.checkpointing import SELECTIVE
    from shardwright.activations.deferred_logits import DeferredLogits, LossInForward
    from shardwright.activations.head_call import piece_of_call
    from shardwright.activations.host_pool import HostMemoryError, HostPool, rounded
    from shardwright.activations.offload import SMALLEST

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
