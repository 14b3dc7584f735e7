"""`shardwright relay`, and the Kubernetes file whose container it is the first process of."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwright.train.launch.relay import SECONDS_FOR_STATUS, relay
from tests.train.kit.jobs import TINY, config_file, losses, run, wait_for
from tests.train.launch.kit.hosts import in_make_clusters, plain_environment, reason_against, tool

EXAMPLE = Path(__file__).parents[3] / "examples/kubernetes.yaml"


def command(folder: Path, status: object, ends_with: int) -> list[str]:
    """A command that writes exit.json and ends."""
    text = json.dumps({"status": status})
    return ["sh", "-c", f"echo '{text}' > {folder}/new; mv {folder}/new {folder}/exit.json; exit {ends_with}"]


def test_the_status_of_the_run_replaces_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.train.launch.relay.SECONDS_FOR_STATUS", 0.3)
    assert relay(tmp_path, command(tmp_path, 75, 1)) == 75
    assert relay(tmp_path, command(tmp_path, 0, 1)) == 0
    assert relay(tmp_path, ["sh", "-c", "exit 3"]) == 3  # that exit.json is of the command before
    assert relay(tmp_path, ["sh", "-c", "kill -9 $$"]) == 137
    assert relay(tmp_path, command(tmp_path, "x", 4)) == 4
    assert relay(tmp_path / "none", ["true"]) == 0


def test_it_waits_for_a_status_that_another_host_writes(tmp_path: Path) -> None:
    late = subprocess.Popen(["sh", "-c", "sleep 1; " + command(tmp_path, 143, 0)[2]])
    assert relay(tmp_path, ["false"]) == 143
    late.wait()


def test_a_mistake_before_there_is_a_run_is_no_other_failure(tmp_path: Path) -> None:
    """torchrun, here sh, makes 1 of the 2 of a rank. There is no exit.json to wait for."""
    train = f"{sys.executable} -m shardwright train {tmp_path}/none.toml"
    began = time.monotonic()
    assert relay(tmp_path / "run", ["sh", "-c", f"{train}; exit 1"]) == 2
    assert time.monotonic() - began < SECONDS_FOR_STATUS


def test_it_passes_signals_on(tmp_path: Path) -> None:
    script = f"trap 'exit 7' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    program = [sys.executable, "-m", "shardwright", "relay", str(tmp_path), "--", "sh", "-c", script]
    process = subprocess.Popen(program, env=plain_environment())
    wait_for((tmp_path / "ready").exists)
    (tmp_path / "exit.json").write_text('{"status": 143}')
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: relay: expected a command after RUN and --, found none"),
        (("--", "nonesuch"), "error: relay: cannot start nonesuch: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    status, out, err = run("relay", tmp_path, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)


def job_set() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    content: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return content


def test_the_kubernetes_file_has_the_fields_of_a_job_set() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    content = job_set()
    assert (content["apiVersion"], content["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    parsed = models.JobsetV1alpha2JobSet.from_dict(content)
    assert parsed.to_dict() == content  # the models leave out fields that they do not know


@in_make_clusters
@pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "hosts can be made")
def test_the_command_of_the_kubernetes_file_trains(tmp_path: Path) -> None:
    """As in two pods: on two hosts, with the variables of the file. Only sizes and places differ."""
    container = job_set()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][
        0
    ]
    job = config_file(tmp_path, TINY.replace('engine = "none"', 'engine = "shardwright"'))
    file = {each["name"]: each.get("value", "") for each in container["env"]}
    own = {"RANKS_PER_HOST": "1", "JOB": str(job), "RUN": str(tmp_path / "run")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    processes = []
    with tool("hosts").Hosts(2) as hosts:
        for number in range(2):
            place = {"FIRST_HOST": hosts.addresses[0], "JOB_COMPLETION_INDEX": str(number)}
            variables = {**plain_environment(), "PATH": path, **file, **own, **place}
            words = [
                re.sub(r"\$\((\w+)\)", lambda found, known=variables: known[found[1]], word)
                for word in container["command"]
            ]
            processes.append(
                hosts.popen(
                    number, words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len(losses(tmp_path / "run")) == 8
