"""Models of this package, of the kinds `llama` and `hybrid`: blocks, tensor-parallel plans, Hugging Face's names."""
