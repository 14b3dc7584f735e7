"""The folder of a run: its files and their record, its lock, its checkpoints and its position.

`folder` names the files; `finding` makes or finds the folder of a job, and `lock` claims it. `record` writes run.json,
`exits` exit.json. `position` counts samples, `stored_checkpoint` reads a checkpoint, `same_job` compares.
Each rank, the launcher and the commands read it. Nothing here starts processes or trains.
"""
