"""One training step, many engines, one run: time, memory and host time beside FSDP2's.

A contender is a function that turns the plain model into a training step. ``shapes`` has the models, ``contenders`` the
list of engines, ``by_torch``, ``by_shardwright``, ``by_deepspeed`` and ``by_megatron`` build the steps. ``crew`` runs a
contender in processes of its own, ``worker`` is what a process does. ``agreement`` decides whether a contender computes
the right numbers, ``memory`` counts bytes, ``tables`` and ``picture`` show the results.
"""
