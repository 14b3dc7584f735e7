"""Conversion of checkpoints between forms, by one process."""
