"""The shared parts of a model's units: clock, order, agreement, memory plans, and the hooks of forward and backward."""
