"""Modules of other packages and of users as models: their blocks and heads are found, not declared."""
