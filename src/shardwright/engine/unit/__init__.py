"""One ``fully_shard`` call: its weights, its gradients, and changes that users make to its modules."""
