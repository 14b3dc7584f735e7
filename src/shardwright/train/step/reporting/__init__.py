"""Lines, records and notices of a run: before its first step, at each step, and at its end.

In the order of a run: `notices` about odd settings, `introduction` before the first step, `step_reports` at each
one, `memory_report` after some, `conclusion` at the end. Rule: figures are computed here, and `report` prints them.
"""
