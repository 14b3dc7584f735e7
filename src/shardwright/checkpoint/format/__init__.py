"""The form of a checkpoint: index.json, digests, archives of tensors, values, nested states."""
