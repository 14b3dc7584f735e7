"""Numbers of sharded tensors, on which all ranks must agree, and the gradients of what a rank reads."""
