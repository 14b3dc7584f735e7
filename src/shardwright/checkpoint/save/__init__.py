"""Writing of a checkpoint by all ranks: planned, written by each, committed by the first."""
