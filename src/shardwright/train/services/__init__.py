"""Services that show metrics: one file for each. Their packages are optional and imported when a run opens the sink."""
