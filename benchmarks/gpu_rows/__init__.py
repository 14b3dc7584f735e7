"""The parts of ``benchmarks/gpu.py``: which steps it measures, how a process measures them, and what the figures say.

``rows`` has the list and the arithmetic of memory. ``training`` builds a step of each engine. ``worker`` is what a
process does, and ``crew`` starts the processes of a row. ``verdicts`` compares figures with targets, and ``tables``
prints them. Only ``training`` and ``worker`` import torch.
"""
