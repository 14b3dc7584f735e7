"""Finds the parameters of modules and makes a unit's memory. Nothing here knows units."""
