"""Every architecture of transformers that a small configuration can build, one training step for each way to save
memory: the table of `benchmarks/results/architectures.txt`, and the tests that read a part of it."""
