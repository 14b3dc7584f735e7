"""The folder of a run: its files and their record, its lock, its checkpoints and its position.

Each rank, the launcher and the commands read it. Nothing here starts processes or trains.
"""
