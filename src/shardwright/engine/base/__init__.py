"""Values that the rooms above use: settings, offload, the clock, and a unit's view of its model."""
