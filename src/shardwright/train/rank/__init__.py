"""One rank of a job: from its process and its meeting with the others to its exit status.

`process` is the way of a rank that a launcher has started, `hosted` that of a process of another framework.
"""
