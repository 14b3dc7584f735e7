"""Every operation of torch's own table, with sharded parameters in the place of its tensors.

``python -m tests.engine.operations`` runs the table and prints counts. Each sample equals the plain tensor's result, or
raises an error that names the operation, the parameter and the way out.
"""
