"""Values that the rooms above share: settings, offload, time, and what a unit knows of its model."""
