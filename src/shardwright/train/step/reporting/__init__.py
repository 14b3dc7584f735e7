"""Lines, records and notices of a run: before its first step, at each step, and at its end.

In the order of a run: `notices` about odd settings, `opening` before the first step, `recording` at each one,
`memory_report` after some, `conclusion` at the end. Rule: figures are computed here, and `report` prints them.
"""
