"""Operations of traced steps, run again on real tensors to measure their times, and times of collectives.

A traced step names every operation with the shapes, strides and dtypes of its tensors. Here such an operation gets
tensors of its own and runs again and again. Nothing here knows models or configurations.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.engine.comm import Communicator, plan_division
from shardwright.engine.compat import TorchDispatchMode, dispatches, infers_shapes
from shardwright.planner.program import AFTER_OPTIMIZER, HOST, OPTIMIZER, Kernel
from shardwright.planner.tracing.recorder import ProgramRecorder
from shardwright.planner.work import work_of

#: Bytes of the tensors among which repetitions change, so that they do not find all of them in a cache.
ROTATED = {"cpu": 16 << 20, "cuda": 256 << 20}
MOST_SETS = 16
IN_STEPS = ("forward", "backward", OPTIMIZER, AFTER_OPTIMIZER)  #: phases
SAMPLES = 5  #: of each measurement, of which the median counts
SECONDS = 2e-3  #: of a sample at least


class _Form(NamedTuple):
    """A tensor without its content."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Operation:
    """An operation of a traced step.

    Attributes:
        kernel: its record.
        function: the operation.
        arguments: its arguments, with forms in the place of tensors.
        keywords: the same.
    """

    kernel: Kernel
    function: Any
    arguments: Any = field(repr=False)
    keywords: Any = field(repr=False)

    def tensors(self, device: torch.device) -> tuple[Any, Any]:
        """Arguments with tensors of their own. Numbers are near 1, indices are valid."""
        make = _Maker(self, device)
        return _mapped(make, self.arguments), _mapped(make, self.keywords)


@contextmanager
def noting(recorder: ProgramRecorder, operations: dict[Kernel, Operation]) -> Iterator[None]:
    """Note the operation of each different kernel of the recorder inside this context, except for collectives."""
    noted: list[Kernel] = []
    plain = recorder.kernel

    def kernel(*arguments: Any) -> None:
        plain(*arguments)
        name, nbytes, shapes, dtype = arguments[:4]
        if recorder.stream != HOST and recorder.current_phase in IN_STEPS:
            noted.append(Kernel(name, recorder.stream, nbytes, shapes, dtype))

    recorder.kernel = kernel  # type: ignore[method-assign, assignment]
    try:
        with _Noting(noted, operations):
            yield
    finally:
        recorder.kernel = plain  # type: ignore[method-assign]


class _Noting(TorchDispatchMode):
    """Sees operations before the trace does."""

    def __init__(self, noted: list[Kernel], operations: dict[Kernel, Operation]) -> None:
        super().__init__()
        self._noted, self._operations = noted, operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if infers_shapes(types):
            return func(*args, **kwargs)
        for kind in types:
            if kind is not Tensor and kind is not torch.nn.Parameter and dispatches(kind):
                return NotImplemented
        del self._noted[:]
        out = func(*args, **kwargs)
        if len(self._noted) == 1:
            kernel = self._noted[0]
            if kernel not in self._operations and work_of(kernel).kind not in ("communication", "nothing"):
                forms = _mapped(_form_of, args), _mapped(_form_of, kwargs)
                self._operations[kernel] = Operation(kernel, func, *forms)
        return out


def _form_of(tensor: Tensor | torch.device) -> _Form | torch.device:
    if isinstance(tensor, torch.device):
        return tensor
    return _Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class _Maker:
    """Makes tensors of forms."""

    def __init__(self, operation: Operation, device: torch.device) -> None:
        self._name, self._device = operation.kernel.name, device
        self._rows = self._bound(operation)

    def __call__(self, form: _Form | torch.device) -> Tensor | torch.device:
        if isinstance(form, torch.device):
            return self._device
        last = sum((size - 1) * stride for size, stride in zip(form.size, form.stride, strict=True))
        memory = torch.empty(last + 1 if 0 not in form.size else 0, dtype=form.dtype, device=self._device)
        return self._filled(memory).as_strided(form.size, form.stride)

    def _filled(self, memory: Tensor) -> Tensor:
        if "grouped_mm" in self._name and memory.dtype == torch.int32:  # ends of groups
            groups = len(memory)
            return memory.copy_(
                torch.arange(1, groups + 1, device=self._device) * self._rows // max(groups, 1)
            )
        if memory.dtype == torch.bool:
            return memory.fill_(True)
        if not memory.is_floating_point():
            wide = memory.dtype in (torch.uint64, torch.uint32, torch.uint16)  # no kernel draws these
            return memory.zero_() if wide or not len(memory) else memory.random_(0, self._rows)
        # No number that repetitions make tiny, with which CPUs are slow. Of a GPU the clock follows the numbers.
        if self._device.type == "cpu" or memory.dtype.itemsize < 2:
            return memory.copy_(torch.ones(1, device=self._device))
        return memory.uniform_(0.5, 1.5)

    def _bound(self, operation: Operation) -> int:
        """Integers are indices below this."""
        found: list[Any] = []
        _mapped(found.append, operation.arguments)
        forms = [each for each in found if isinstance(each, _Form)]
        if not forms or not forms[0].size:
            return 1
        if operation.kernel.name == "embedding_dense_backward":
            return int(operation.arguments[2])
        if operation.kernel.name == "embedding":
            return forms[0].size[0]
        if "grouped_mm" in operation.kernel.name:  # groups of rows, of columns, or of what is summed over
            one, other = (form.size for form in forms[:2])
            return other[-1] if len(one) == 3 else one[1] if len(other) == 2 else one[0]
        if operation.kernel.name.startswith("nll_loss"):
            logits = next((each for each in forms if len(each.size) == 2), forms[0])
            return logits.size[-1]
        return min(size for form in forms for size in (*form.size, 1 << 30) if size > 0)


def _mapped(make: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with tensors, or with forms, replaced, and with devices."""
    if isinstance(tree, (Tensor, _Form, torch.device)):
        return make(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(make, each) for each in tree)
    if isinstance(tree, dict):
        return {key: _mapped(make, each) for key, each in tree.items()}
    return tree


class Timer:
    """Measures on a device.

    On the CPU the time is that of this thread on its core, so that other programs count only as far as they slow down
    the core's caches and memory. On a GPU it is the time between two events.
    """

    def __init__(self, device: torch.device, samples: int = SAMPLES, seconds: float = SECONDS) -> None:
        self.device = device
        self._samples, self._seconds = samples, seconds
        self._product: Tensor | None = None

    def operation(self, operation: Operation) -> float | None:
        """Return the seconds of an operation, or None if it does not run alone on such tensors."""
        nbytes = max(operation.kernel.nbytes, 1)
        count = min(MOST_SETS, -(-ROTATED[self.device.type] // nbytes))
        try:
            with torch.no_grad():
                sets = [operation.tensors(self.device) for _ in range(count)]
                results: list[Any] = [None] * max(
                    count, 2
                )  # a step does not write into the same memory again at once
                turn = 0

                def run() -> None:
                    nonlocal turn
                    turn += 1
                    arguments, keywords = sets[turn % count]
                    results[turn % len(results)] = operation.function(*arguments, **keywords)

                return self.repeated(run, len(results))
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return None

    def repeated(self, run: Callable[[], object], least: int = 1) -> float:
        """Return the median of the seconds of a call, over several samples of many calls."""
        for _ in range(least + 1):
            run()
        once = max(self._sample(run, 1), 1e-7)
        calls = max(1, min(1000, round(self._seconds / once)))
        return statistics.median(self._sample(run, calls) for _ in range(self._samples))

    def once(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call, which other ranks make, too."""
        if self.device.type == "cpu":
            return self._sample(run, 1)
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin

    def _sample(self, run: Callable[[], object], calls: int) -> float:
        if self.device.type == "cpu":
            begin = time.thread_time()
            for _ in range(calls):
                run()
            return (time.thread_time() - begin) / calls
        begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        self._occupy(calls)
        begin_event.record()
        for _ in range(calls):
            run()
        end_event.record()
        torch.cuda.synchronize(self.device)
        return begin_event.elapsed_time(end_event) / 1e3 / calls

    def _occupy(self, calls: int) -> None:
        """Give the GPU work, so that the host has queued the calls before the first one begins."""
        if self._product is None:
            self._product = torch.ones(8192, 8192, dtype=torch.bfloat16, device=self.device)
        for _ in range(max(1, min(calls, 400) // 50)):  # at least 1 ms each
            torch.mm(self._product, self._product)


def anchor(timer: Timer) -> tuple[float, float]:
    """Seconds of a product and of a sum of the same sizes everywhere: how fast the machine is just now."""
    size = 384 if timer.device.type == "cpu" else 4096
    product = torch.ones(size, size, device=timer.device)
    row = torch.ones((8 << 20) if timer.device.type == "cpu" else (256 << 20), device=timer.device)
    result = torch.empty_like(row)
    return timer.repeated(lambda: torch.mm(product, product)), timer.repeated(
        lambda: torch.add(row, row, out=result)
    )


# -- collectives -------------------------------------------------------------------------------------------------------


#: bytes of all tensors that repeated collectives take in turn, as a step takes its parameters, so that none is in a
#: cache when it is its turn again
MOVED = 128 << 20


def time_collectives(
    sizes: Sequence[int], device: torch.device, timer: Timer, into: dict[str, dict[int, list[float]]]
) -> None:
    """Measure gathers, reductions and sums, and add their seconds to lists by kind and bytes. Every rank must call it.

    Args:
        sizes: bytes of the whole tensors.
        device: of the tensors.
        timer: measures one call.
        into: the lists.
    """
    communicator = Communicator(dist.group.WORLD, device)
    ranks = communicator.world_size
    division = plan_division(torch.float32, ranks, None)

    def gather(whole: torch.Tensor, part: torch.Tensor) -> None:
        communicator.all_gather([whole.view(torch.uint8)], [part.view(torch.uint8)]).wait()

    def scatter(whole: torch.Tensor, part: torch.Tensor) -> None:
        communicator.reduce_scatter([part], [whole], division).wait()

    def reduce(whole: torch.Tensor, part: torch.Tensor) -> None:
        communicator.all_reduce(whole, division).wait()

    for nbytes in sizes:
        count = max(2, min(MOST_SETS, MOVED // nbytes))
        sets = [(torch.ones(nbytes // 4, device=device), torch.ones(nbytes // 4 // ranks, device=device))
                for _ in range(count)]  # fmt: skip
        for name, call in (("gather", gather), ("scatter", scatter), ("reduce", reduce)):
            samples = []
            for i in range(count + (4 if nbytes > 1 << 25 else 9 if nbytes > 1 << 20 else 25)):
                dist.barrier()
                samples.append(timer.once(functools.partial(call, *sets[i % count])))
            into[name].setdefault(nbytes, []).append(statistics.median(samples[count:]))
