"""The form of a checkpoint: what its files contain, without the places where they are.

Read `index` first: `index.json` describes all. `nested` takes a state apart into named tensors and values, `archive` is
the container of a tensor, `values` has plain values as JSON, `digests` the SHA-256 of files, `names` the names of all
files. Rule: nothing here knows folders, URLs or ranks.
"""
