"""Measurements of time, memory and bytes; README.md lists them."""
