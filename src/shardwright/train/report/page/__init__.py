"""One HTML file about a plan or about runs: it needs no network, no font and no script of others.

The data are plain values. Nothing here imports torch, reads a run's folder or makes a plan.
"""
