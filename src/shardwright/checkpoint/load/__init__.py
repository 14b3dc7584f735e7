"""Reading of a checkpoint by all ranks: examined, compared with digests, then read."""
