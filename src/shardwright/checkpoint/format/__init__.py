"""The form of a checkpoint: what its files contain, without the places where they are.

Read `index` first: `index.json` describes all. `nested` takes a state apart into named tensors and values, `boxes` has
ranges of their elements, `archive` is the container of a tensor, `values` has plain values as JSON and checks of
single ones, `names` the names of files that describe a checkpoint. Rule: nothing here opens a file, or knows folders,
URLs or ranks.

A tensor is a ``TensorForm`` without values (keys, dtype, shape), a ``StateTensor`` in the memory of a run, and a
``StoredTensor`` in files. A ``Box`` is a range of it in memory, a ``Chunk`` one in a file. Other rooms add
``BoxToWrite`` (a box with the tensor's name), ``StoredForm`` (for users), ``ContainedTensor`` (in a container of
torch's writer), ``ModelTensor`` (a parameter or buffer under all its names), ``FileTensor`` (in a file of weights) and
``SourceTensor`` (that a conversion reads).
"""
