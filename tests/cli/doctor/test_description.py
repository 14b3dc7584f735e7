"""``shardwright doctor``: what it prints for people and for programs, also where torch is missing or finds no GPU.

The report itself is made once, in a process of its own, as a user makes it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwright
from shardwright.cli.doctor import description

ROOT = Path(__file__).resolve().parents[3]
BROKEN = "import sys; sys.modules['torch'] = None; from shardwright.cli import main; sys.exit(main())"


def run(*command: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")} | variables
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    host = platform.node() or "none"
    printed = run(
        *("-m", "shardwright", "doctor", "--json"),
        NCCL_DEBUG="INFO",
        SHARDWRIGHT_POISON="1",
        TORCH_HOME=os.path.expanduser("~/torch"),
        TORCH_NAME=f"on {host}",
        TORCH_API_TOKEN="abc",
        UNRELATED="1",
    )
    report: dict[str, Any] = json.loads(printed)
    return report


@pytest.mark.extensive("a tool, in a process of its own")
def test_versions_are_those_that_run(report: dict[str, Any]) -> None:
    import torch

    assert report["shardwright"]["version"] == shardwright.__version__
    assert report["python"]["version"] == platform.python_version()
    assert report["torch"]["version"] == torch.__version__
    assert report["torch"]["error"] is report["torch"]["engine_error"] is None
    assert report["torch"]["backends"]["gloo"] is True
    assert len(report["torch"]["devices"]) == torch.cuda.device_count()


def test_extras_are_listed_with_what_is_installed(report: dict[str, Any]) -> None:
    if report["shardwright"]["installed"] is None:
        pytest.skip("run from the source tree: nothing knows the extras")
    from importlib.metadata import PackageNotFoundError, version

    assert {"train", "lightning", "float8", "dev"} <= set(report["extras"])
    assert {"pydantic", "rich", "psutil"} <= set(report["extras"]["train"])
    for packages in report["extras"].values():
        for name, found in packages.items():
            try:
                assert found == version(name)
            except PackageNotFoundError:
                assert found is None


def test_only_variables_that_change_behaviour_are_shown(report: dict[str, Any]) -> None:
    shown = report["environment"]
    assert shown["NCCL_DEBUG"] == "INFO" and shown["SHARDWRIGHT_POISON"] == "1"
    assert shown["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"]
    assert "UNRELATED" not in shown and "PATH" not in shown


def test_neither_the_host_nor_folders_nor_secrets_are_shown(report: dict[str, Any]) -> None:
    assert report["environment"]["TORCH_HOME"] == "~/torch"
    assert report["environment"]["TORCH_API_TOKEN"] == "(hidden)"
    assert report["environment"]["TORCH_NAME"] == "on (host)" or not platform.node()


def test_sizes_are_of_this_machine(report: dict[str, Any]) -> None:
    assert report["cpu"]["usable_cores"] <= report["cpu"]["cores"] == os.cpu_count()
    assert 2**28 < report["memory"]["available"] <= report["memory"]["total"]
    assert report["shared_memory"]["free"] <= report["shared_memory"]["total"]
    assert report["processes"]["share_memory"] is None
    assert "spawn" in report["processes"]["start_methods"]


def test_text_has_a_line_for_each_fact(report: dict[str, Any]) -> None:
    text = description.text_of(report)
    assert re.search(rf"^shardwright +{re.escape(shardwright.__version__)}$", text, re.M)
    assert re.search(r"^torch +2\.\d+", text, re.M)
    assert re.search(r"^engine +loads$", text, re.M)
    assert re.search(r"^backends +gloo", text, re.M)
    assert re.search(r"^memory +[\d.]+ GiB available of [\d.]+ GiB", text, re.M)
    assert "NCCL_DEBUG=INFO" in text and "problems" in text


def test_without_torch_the_rest_is_reported() -> None:
    text = run("-c", BROKEN, "doctor")
    assert re.search(r"^torch +missing: ModuleNotFoundError", text, re.M)
    assert re.search(r"^cpu +\S", text, re.M)
    assert "torch cannot be imported" in text and "python -m pip install 'torch" in text
    report = json.loads(run("-c", BROKEN, "doctor", "--json"))
    assert report["torch"]["version"] is None and report["memory"]["total"] > 0


def changed(report: dict[str, Any], room: str, **facts: Any) -> str:
    """The problems of a machine that differs in this."""
    return "\n".join(description._problems({**report, room: {**report[room], **facts}}))


GPU = {"name": "A", "memory": 2**36, "capability": "9.0", "cores": 132}


@pytest.mark.parametrize(
    ("room", "facts", "expected"),
    [
        ("torch", {"driver": "570.1", "cuda": None, "devices": []}, "driver 570.1.*built without CUDA"),
        ("torch", {"engine_error": "ImportError: no"}, "engine does not load: ImportError: no"),
        ("torch", {"memory_error": "no compiler"}, "planned memory does not work: no compiler"),
        ("torch", {"device_error": "RuntimeError: no"}, "cannot use them: RuntimeError: no"),
        ("shared_memory", {"free": 2**25, "error": None}, "32 MiB free.*--shm-size"),
        ("shared_memory", {"error": "Permission denied"}, "cannot be written: Permission denied"),
        ("processes", {"share_memory": "OSError: no"}, "share no memory"),
        ("shardwright", {"installed": "0.0.1"}, "0.0.1 is installed"),
        ("shardwright", {"installed": None}, "not installed"),
    ],
)
def test_problems_name_what_is_wrong(
    report: dict[str, Any], room: str, facts: dict[str, Any], expected: str
) -> None:
    assert re.search(expected, changed(report, room, **facts))


def test_several_gpus_need_more_shared_memory(report: dict[str, Any]) -> None:
    several = {**report, "torch": {**report["torch"], "devices": [GPU, GPU]}}
    assert "--shm-size" in changed(several, "shared_memory", free=2**28, error=None)
    assert "--shm-size" not in changed(report, "shared_memory", free=2**28, error=None)
    assert "2 x A (64.0 GiB, capability 9.0)" in description.text_of(several)


def test_a_bug_report_asks_for_it() -> None:
    template = ROOT / ".github/ISSUE_TEMPLATE/bug.md"
    if not template.exists():
        pytest.skip("not a checkout: an sdist has no template")
    assert "shardwright doctor" in template.read_text()
