"""One rank of a job: from its process and its meeting with the others to its exit status.

`process` runs a rank that a launcher has started, `hosted` a process of another framework. Before the process group
exists, ranks meet (`rendezvous`), choose a network (`hosts`) and compare their jobs (`start`, `startup_check`).
"""
