"""Checkpoints that a process of each rank writes while training goes on.

Read `async_checkpoint` first: `AsyncCheckpoint`, which copies the state and lets the processes write. `staging` has the
memory that trainer and process share, `writer_process` the trainer's side of the process, `writer_program` and
`background` the process itself, `messages` what they say to each other, through pipes and notes. A process dies with
its trainer, and commits only what all ranks have written.
"""
