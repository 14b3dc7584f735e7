"""Numbers that have gone wrong in a run: how they are found and named, and how the run goes on or ends."""
