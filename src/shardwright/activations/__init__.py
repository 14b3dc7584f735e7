"""Activations: which results of forward exist until backward, and for how long.

``chunked_loss`` has the cross-entropy whose logits are never whole, ``token_rows`` and ``held_gradients`` its arguments
and its gradients, and ``head_call`` one call of the module that makes logits. ``deferred_logits`` lets a whole model
use it: the model's own code runs, and its logits are a record of them. ``causal_lm`` gives models of transformers this
loss. ``checkpointing`` drops activations of blocks and computes them again. ``offload`` stores them in the host's
memory, in buffers of ``host_pool``. Nothing here knows configurations or the trainer.
"""
