"""The parts of a step add up to its time: on the CPU, and on a device that is a stream of our own."""

from __future__ import annotations

import pytest

from shardwright.train.step.account.clock import PARTS, DeviceClock, StepClock


class Machine:
    """A host and one stream of a device, which runs queued work in order. Times are in seconds."""

    def __init__(self) -> None:
        self.host = self.device = 100.0

    def now(self) -> float:
        return self.host

    def works(self, seconds: float) -> None:
        """The host is busy."""
        self.host += seconds

    def queue(self, seconds: float) -> None:
        """The host queues work, which needs 1 ms of its own."""
        self.works(0.001)
        self.device = max(self.device, self.host) + seconds

    def waits_for(self, other: float) -> None:
        """The stream waits for an event of another stream."""
        self.device = max(self.device, other)

    def synchronise(self) -> None:
        self.host = max(self.host, self.device)


class StreamEvent:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.time = float("nan")

    def record(self) -> None:
        self.time = max(self._machine.device, self._machine.host)
        self._machine.device = self.time

    def elapsed_time(self, later: StreamEvent) -> float:
        return (later.time - self.time) * 1e3


def step(machine: Machine, clock: StepClock, data: float, gather: float) -> tuple[float, dict[str, float]]:
    """A step of 0.2 s forward, 0.4 s backward, 0.1 s optimizer and 0.02 s clipping."""
    clock.begin()
    clock.to("data")
    machine.works(data)
    clock.to("host")
    machine.works(0.002)
    for _ in range(2):
        clock.to("forward")
        clock.enter("all-gather", "0-1", 8, "a")
        clock.leave()
        arrives = max(machine.device, machine.host) + gather
        clock.await_result("all-gather", "0-1", 8, "a")
        machine.waits_for(arrives)
        clock.leave()
        clock.leave()
        machine.queue(0.1)
        clock.to("backward")
        machine.queue(0.2)
    clock.to("optimizer")
    machine.queue(0.02)
    clock.to("host")
    clock.to("communication")
    machine.queue(0.03)
    clock.wait_begins()
    machine.synchronise()
    clock.wait_ends()
    clock.to("host")
    machine.works(0.001)
    clock.to("optimizer")
    machine.queue(0.1)
    clock.to("host")
    seconds, parts = clock.end()
    return seconds, {**parts}


@pytest.mark.parametrize("data", [0.0, 0.05, 0.5])
def test_parts_of_a_step_on_a_device_add_up(data: float) -> None:
    machine = Machine()
    clock = DeviceClock(lambda: StreamEvent(machine), now=machine.now)
    steps = [step(machine, clock, data, gather=0.04) for _ in range(3)]
    for seconds, parts in steps:
        assert sum(parts.values()) == pytest.approx(seconds, rel=1e-9)
        assert all(value >= 0 for value in parts.values())
    seconds, parts = steps[-1]
    assert parts["forward"] == pytest.approx(0.2, abs=0.005)
    assert parts["backward"] == pytest.approx(0.4, abs=0.005)
    # Two gathers of 40 ms, and the all-reduce of the loss.
    assert parts["communication"] == pytest.approx(0.11, abs=0.005)
    assert parts["optimizer"] == pytest.approx(0.12, abs=0.005)  # that of the step before ends in this one
    assert parts["data"] == pytest.approx(max(data - 0.1, 0), abs=0.005)  # the device still steps meanwhile
    assert seconds == pytest.approx(0.83 + max(data - 0.1, 0), abs=0.01)


def test_work_between_steps_is_no_part_of_the_next_one() -> None:
    machine = Machine()
    clock = DeviceClock(lambda: StreamEvent(machine), now=machine.now)
    step(machine, clock, 0.0, 0.0)
    machine.queue(3.0)  # a validation
    machine.synchronise()
    seconds, parts = step(machine, clock, 0.01, 0.0)
    assert sum(parts.values()) == pytest.approx(seconds, rel=1e-9)
    assert parts["optimizer"] < 0.03 and parts["data"] == pytest.approx(0.01, abs=0.002)


def test_a_step_that_is_left_out_changes_no_later_one() -> None:
    machine = Machine()
    clock = DeviceClock(lambda: StreamEvent(machine), now=machine.now)
    step(machine, clock, 0.0, 0.0)
    expected = step(machine, clock, 0.0, 0.0)
    clock.begin()
    clock.to("forward")
    machine.queue(0.1)
    clock.await_result("all-gather", "0-1", 8, "a")  # and an error
    machine.synchronise()
    step(machine, clock, 0.0, 0.0)
    assert step(machine, clock, 0.0, 0.0)[1] == pytest.approx(expected[1])


def test_waits_inside_a_graph_are_not_recorded() -> None:
    machine = Machine()
    clock = DeviceClock(lambda: StreamEvent(machine), waits=False, now=machine.now)
    step(machine, clock, 0.0, gather=0.04)
    _, parts = step(machine, clock, 0.0, gather=0.04)
    assert parts["communication"] == pytest.approx(0.03, abs=0.005)


def test_on_the_cpu_time_in_collectives_is_communication() -> None:
    machine = Machine()
    clock = StepClock(machine.now)
    begun: list[str] = []
    clock.follow = begun.append
    clock.begin()
    machine.works(1)
    clock.leave()  # of an issue that began nothing
    clock.to("forward")
    machine.works(2)
    clock.enter("all-gather", "0-1", 8, "a")
    machine.works(4)
    clock.enter("all-gather", "0-3", 8, "a")  # of another axis, before the first one has ended
    machine.works(8)
    clock.leave()
    machine.works(16)
    clock.to("backward")
    clock.await_result("reduce-scatter", "0-1", 8, "a")
    machine.works(32)
    clock.to("optimizer")  # after an error in the collective
    machine.works(64)
    clock.leave()
    clock.to("data")
    machine.works(128)
    seconds, parts = clock.end()
    assert seconds == sum(parts.values()) == 255
    assert parts == {
        "forward": 18, "backward": 0, "optimizer": 64, "communication": 44, "data": 128, "host": 1
    }  # fmt: skip
    clock.enter("barrier", "0-1", 0, "")  # after the step
    machine.works(256)
    clock.leave()
    assert sum(parts.values()) == 255
    assert begun == ["forward", "backward", "optimizer", "data", "host"] and set(parts) == set(PARTS)
