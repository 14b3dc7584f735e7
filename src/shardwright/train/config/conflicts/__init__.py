"""Settings that do not go together: tables, in which each row has the settings, a predicate and the message.

`configurations` has the tables that are checked when a configuration is read, `jobs` those of a job that starts, begins
with adapters or is planned. `parallel/model_conflicts.py` has the rows that need the model. Elsewhere are checks of one
thing: a section checks a key, the class of a shape the numbers of a model, and `parallel/checks.py` what ranks divide.
"""
