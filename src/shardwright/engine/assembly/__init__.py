"""Modules in, a unit's memory out. Nothing here knows units."""
