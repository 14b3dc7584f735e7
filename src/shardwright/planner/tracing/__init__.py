"""Traces of real training steps on tensors without memory, as programs for plans."""
