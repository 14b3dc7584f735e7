"""A unit's weights: fill, show and empty their memory. It is not decided here when."""
