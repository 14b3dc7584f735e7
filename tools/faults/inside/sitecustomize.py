"""Python runs this file in each writer process of a campaign: it kills the process at one of its system calls.

FAULT_IN_WRITER has the address: the rank, the number of the call, and the fault and its history as JSON.
"""

import json
import os
import sys

_FAULT = os.environ.get("FAULT_IN_WRITER")

if _FAULT and any(os.path.basename(each) == "writer_program.py" for each in sys.orig_argv):
    _facts = json.loads(_FAULT)
    sys.path.append(_facts["source"])

    from pathlib import Path

    from tools.faults.history import History, Place
    from tools.faults.points import Fault, count_calls, fail

    _fault = Fault(**_facts["fault"])
    _history = History(Path(_facts["history"]), Place(_facts["run"], _facts["attempt"]), _fault.rank)

    def _before(number: int) -> None:
        if number == _fault.number:
            _history.add("fault", **_fault.facts())
            fail(_fault)

    count_calls(_before, lambda: True)
