"""The commands of the trainer, one in each file, as functions without a command line."""
