"""Pretrained weights: safetensors and files of ``torch.save``, straight into shards and out of them.

Read `load_pretrained` and `save_pretrained` first. `files` has the files, `folder` the place where they become whole,
`model` the named tensors of a model with this rank's part, `key_maps` the places of these in files, `conversions` the
key maps of transformers, `stored_model` the plan of stored tensors. Rule: a rank reads and writes its part alone, one
tensor after another.
"""
