"""One ``fully_shard`` call: its weights, its gradients, and what users do to its modules."""
