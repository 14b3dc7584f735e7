"""Checkpoints that a process of each rank writes while training goes on."""
