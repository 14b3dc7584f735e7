"""Jobs that are planned and not started: one plan, two that are compared, a search for settings, and the file of a new
job. The planner itself knows no configuration; here its programs come from one.
"""
