"""Adapters: settings, layers, sharded training, files."""
