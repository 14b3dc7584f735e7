"""Samples of tokens: packed, mixed, in the order of the run, and loaded in batches.

Read `stream` first: a sample is a function of the settings and its index. It asks `mixing` for the source and
the place in it, and `packing` for its documents. `batch` makes tensors of samples, `loader` prepares them in threads,
`validation` has the part that no step trains on. Rule: the position of a run is one integer.
"""
