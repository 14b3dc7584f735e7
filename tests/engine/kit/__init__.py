"""Models, places and comparisons that tests of the engine share."""
