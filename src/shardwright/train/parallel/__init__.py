"""A model on several ranks: who they are, what each precision means, and the calls in which engines differ.

`recipe` makes a plain model parallel, in one order: float8, blocks, engine, optimizer. No loop is here.
"""
