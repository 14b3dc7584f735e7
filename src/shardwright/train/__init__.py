"""The trainer: configuration, models, data and the loop that runs a training job.

This file stays empty of imports so that the command line can read a configuration without loading torch.
The engine must never import from here.
"""
