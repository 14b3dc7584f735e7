"""The parts of ``benchmarks/gpu.py``: which steps it measures, how a process measures them, and what the figures say.

``rows`` has the list and the arithmetic of memory. ``training`` builds a step of each engine. ``worker`` is what a
process does, and ``crew`` runs the processes of a row (``processes``). ``failures`` says how a process ended, and
``faults`` lets one fail. ``verdicts`` compares figures with targets, and ``tables`` prints them. Only ``training``,
``worker`` and ``faults`` import torch.
"""
