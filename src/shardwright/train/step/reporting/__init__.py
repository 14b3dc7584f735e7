"""Lines, records and notices of a run: before its first step, at each step, and at its end."""
