"""Documents in files: where they are, and how each form is read."""
