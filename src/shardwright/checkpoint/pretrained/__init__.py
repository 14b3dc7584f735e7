"""Pretrained weights: safetensors and files of ``torch.save``, straight into shards and out of them.

Read `load_pretrained` and `save_pretrained` first. `files` has the files, `folder` the place where they become whole,
`model` the named tensors of a model with this rank's part, `names` the key maps between the two, `conversions` and
`renaming` make key maps, `stored_model` the plan of stored tensors. Rule: a rank reads and writes its part alone, one
tensor after another.
"""
