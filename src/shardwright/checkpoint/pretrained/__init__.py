"""Pretrained weights: safetensors and files of ``torch.save``, straight into shards and out of them."""
