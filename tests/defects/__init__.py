"""Deliberate defects of the engine, and the tests that find them: what the suite would notice.

``python -m tests.defects`` puts each into a copy of the package and runs its tests, which have to fail. The table is in
``table.py``. Each defect breaks one seam of the engine, most of them by one word.
"""
