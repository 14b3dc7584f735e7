"""The process in which lm-evaluation-harness computes: `python -P harness.py REQUEST RESULT`, two files of JSON.

It runs as a script of its own, so it imports the standard library and lm_eval alone, never the package or a module
beside it. `evaluate.py` starts it, and reads the result.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def evaluated(request: dict[str, Any]) -> dict[str, Any]:
    """The results of lm_eval, or {"mistake": ...} for a task that it does not know.

    Args:
        request: the keys folder, tasks, limit, device, batch_size, apply_chat_template, and model_args, further
            arguments of lm_eval's class hf. A task is a name of lm_eval, or the absolute path of a YAML file. Without a
            folder the tasks are only looked up, and the results are empty.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    for task in request["tasks"]:
        if not os.path.isabs(task) and not manager.match_tasks([task]):
            return {"mistake": f"expected tasks of lm-eval, found {task!r}; `lm-eval ls tasks` lists them"}
    if request["folder"] is None:
        return {}
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": request["folder"], "dtype": "auto", **request["model_args"]},
        tasks=request["tasks"],
        device=request["device"],
        batch_size=request["batch_size"],
        limit=request["limit"],
        task_manager=manager,
        log_samples=False,
        **({"apply_chat_template": True} if request["apply_chat_template"] else {}),
    )
    keys = ("results", "higher_is_better", "n-samples", "n-shot", "versions")
    return {"lm_eval": lm_eval.__version__, **{key: results.get(key, {}) for key in keys}}


def main(request: str, result: str) -> None:
    """Read a request and write its result; {"error": ...} for an exception, whose traceback goes to stderr."""
    with open(request, encoding="utf-8") as stream:
        content = json.load(stream)
    try:
        found = evaluated(content)
    except Exception as error:
        import traceback

        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    with open(result, "w", encoding="utf-8") as stream:
        json.dump(found, stream, default=str)


if __name__ == "__main__":
    main(*sys.argv[1:])
