"""Documents, tokens, packing, mixing and the stream of batches."""
