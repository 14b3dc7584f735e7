"""A package in the place of lm_eval, and the file of a task for the real one. Nothing here runs a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

LM_EVAL = """
import json, os
__version__ = "9.9"


def simple_evaluate(*, model, model_args, tasks, device, batch_size, limit, task_manager, log_samples, **other):
    assert (model, device, log_samples) == ("hf", "cpu", False)
    assert json.load(open(os.path.join(model_args["pretrained"], "config.json")))["model_type"] == "llama"
    assert model_args["prefix_token_id"] == 10  # the end of a line: bytes have no token between texts
    if "crash" in tasks:
        raise RuntimeError("no such data\\nfor crash")
    if "end" in tasks:
        os._exit(3)
    if "slow" in tasks:
        import time

        open(os.path.join(os.path.dirname(__file__), "pid"), "w").write(str(os.getpid()))
        time.sleep(600)
    names = [os.path.basename(task).removesuffix(".yaml") for task in tasks]
    results = {
        name: {"alias": name, "acc,none": 0.25 * (n + 1), "acc_stderr,none": 0.125} for n, name in enumerate(names)
    }
    results[names[0]] |= {"exact_match,strict": float("nan"), "exact_match_stderr,strict": "N/A"}
    return {
        "results": results,
        "higher_is_better": {name: {"acc": True} for name in names},
        "n-samples": {name: {"original": 100, "effective": limit or 100} for name in names},
        "n-shot": {name: 6 if other == {"apply_chat_template": True} else 5 for name in names},
        "versions": {name: 1.0 for name in names},
    }
"""
TASKS = """
class TaskManager:
    def match_tasks(self, names):
        return [name for name in names if name in ("colours", "numbers", "crash", "end", "slow")]
"""
MODELS = """
class HFLM:
    def loglikelihood_rolling(self, requests):
        return []
"""


def install_lm_eval(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the package first in this process and in those that it starts. Its task "slow" writes its process into the
    file pid of the package, and does not end."""
    package = packages / "lm_eval"
    (package / "models").mkdir(parents=True)
    (package / "models" / "huggingface.py").write_text(MODELS)
    (package / "__init__.py").write_text(LM_EVAL)
    (package / "tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


TASK = """
task: letters
dataset_path: json
dataset_kwargs:
  data_files: {test: FILE}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata: {version: 1.0}
"""
