"""Adapters to other frameworks, one module for each. Only that module imports the framework."""
