"""Pages of commands: their files, and runs as the plain values that a page shows."""
