"""Files that are on disk when a call returns, and JSON as the package writes it."""
