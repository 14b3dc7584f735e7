"""A unit's weights: fill, show and release their memory. The room ``model`` decides when."""
