"""Modules of other packages and of users as models.

`python` makes a model by a user's function, `module` has what it shares with models of transformers, `units` finds
blocks and a head by the structure of a module. Rule: the module's code stays as it is.
"""
