"""The process of one measurement: ``python -m shardwright.cli.doctor.child '["folder", ..., SECONDS]'`` prints JSON.

It ends by SIGALRM after that time even if the process that started it is gone, so nothing stays. An error is one line.
Nothing here judges what was measured.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable
from typing import Any

from shardwright.cli.doctor.devices import measure_gpus
from shardwright.cli.doctor.folders import measure_folder
from shardwright.cli.doctor.links import measure_link, measure_pair
from shardwright.cli.doctor.words import error_text
from shardwright.common.json_text import strict_json

CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    "folder": measure_folder,
    "gpus": measure_gpus,
    "link": measure_link,
    "pair": measure_pair,
}


def main() -> int:
    name, *arguments, seconds = json.loads(sys.argv[1])
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(seconds) + 1)
    try:
        print(strict_json(CALLS[name](*arguments)))
    except OSError as error:
        print(error.strerror or error_text(error), file=sys.stderr)  # without the name of a file
        return 1
    except Exception as error:
        print(error_text(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
