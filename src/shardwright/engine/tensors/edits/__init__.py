"""Edits in place of sharded tensors: of elements by their position, and of parameters that have no values yet."""
