"""The account that a run gives of itself: lines, records and notices before its first step, at each step, at its end.

In the order of a run: `report_places` opens run.json and the sinks, and has the lines before the first step, with the
`notices` about odd settings; `step_reports` at each one, `memory_report` after some, `conclusion` at the end. Rule:
figures are computed here; the room `report` has the places to which they go.
"""
