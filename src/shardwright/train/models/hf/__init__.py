"""Models of transformers, of the kind `hf`."""
