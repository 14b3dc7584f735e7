"""A unit: the parameters that one ``fully_shard`` call owns, gathered together and released together.

Here is what can be done with a unit (gather, show, release, reduce) and what its hooks do. In which order units are
prefetched and what happens at the ends of forward and backward is the root's (``root.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwright._torch import in_backward
from shardwright.comm import Communicator, Pending, plan_division
from shardwright.engine import epoch
from shardwright.engine.gradients import Reduction
from shardwright.engine.hooks import map_tensors, mark_inputs, mark_outputs, refuse_opaque
from shardwright.engine.parameter import ManagedParameter
from shardwright.layout import UnitLayout, plan_packing
from shardwright.memory import Slab

if TYPE_CHECKING:
    from shardwright.engine.root import Root

HEADER = 2  #: int64 words that travel with every gather: the unit's number, and one spare that keeps 16 bytes


class Visit:
    """A unit's part in one root call: how many of its calls the graph holds, and its place in the order of that call.

    Autograd nodes hold it, so it holds the unit but never a module, another visit or the graph.
    """

    __slots__ = ("calls", "endless", "open", "order", "place", "unit")

    def __init__(self, unit: Unit, order: list[int]) -> None:
        self.unit = unit
        self.order = order
        self.place = -1
        self.calls = 0
        self.open = 0
        self.endless = False

    def before_backward(self) -> None:
        self.unit.before_backward(self)

    def after_backward(self) -> None:
        self.unit.after_backward(self)


class Unit:
    """See the module docstring. ``parameters`` may be empty: then nothing is ever issued for this unit."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        mesh: DeviceMesh,
        comm: Communicator,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        attach: Callable[[nn.Module], Root],
    ) -> None:
        self._attach = attach
        self.modules = [weakref.ref(m) for m in modules]
        self.mesh = mesh
        self.comm = comm
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.requires_sync = True
        self.divide_factor: float | None = None
        self.root: Root | None = None
        self.number = -1
        self.name = type(modules[0]).__name__
        self.forward_prefetch: list[weakref.ref[Unit]] = []
        self.backward_prefetch: list[weakref.ref[Unit]] = []
        self.parameters: list[ManagedParameter] = []
        self.visits: set[Visit] = set()
        self._calls: list[Visit | None] = []
        self._to_run: set[int] = set()
        self._full_shown = False

    def own(
        self, layout: UnitLayout, shard: torch.Tensor, slab: Slab, parameters: list[ManagedParameter]
    ) -> None:
        """Take the parameters and the memory they view; ``shard`` is the bytes of this rank's part."""
        self.layout = layout
        self.shard = shard
        self.slab = slab
        self.parameters = parameters
        self._pending: Pending | None = None
        self._issuing = False
        self.generation = -1  #: of the root call (or backward) for which the slab was filled
        self.epoch = -1  #: of the weights that the slab was filled with
        self.kept = False  #: whether the slab is kept beyond its root call, on purpose
        self.entered = False  #: whether the backward now running has reached this unit
        device, n = self.comm.device, self.comm.world_size
        self._header = torch.zeros(HEADER, dtype=torch.int64, device=device)
        self._prepare_gather(n, device)
        self._trainable: tuple[bool, ...] = ()
        self.reductions: list[Reduction] = []
        self.follow_requires_grad()

    def _prepare_gather(self, n: int, device: torch.device) -> None:
        """Make, once, every view that a gather needs: inputs over the shard (or its cast), outputs over the slab."""
        layout = self.layout
        self._cast = Slab(
            sum(r.shard_numel * r.compute_dtype.itemsize for r in layout.runs if r.is_cast), device
        )
        self._cast.lease()
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._inputs, self._outputs = [], []
        cast_bytes = 0
        for run in layout.runs:
            size = run.compute_dtype.itemsize
            nbytes = run.shard_numel * size
            if run.is_cast:
                source = self.shard[run.shard_bytes :][: run.shard_numel * run.storage_dtype.itemsize]
                target = self._cast.view(run.compute_dtype, cast_bytes // size, (run.shard_numel,))
                self._casts.append((target, source.view(run.storage_dtype)))
                payload = self._cast.byte_view(cast_bytes, nbytes)
                cast_bytes += nbytes
            else:
                payload = self.shard[run.shard_bytes :][:nbytes]
            for s in run.segments:
                if s.chunk:
                    self._inputs.append(payload[s.shard_offset * size :][: s.chunk * size])
                    self._outputs.append(
                        self.slab.byte_view(run.slab_bytes + s.slab_offset * size, n * s.chunk * size)
                    )
        self._cast.release()
        self._inputs.append(self._header.view(torch.uint8))

    def join_root(self, root: Root, number: int, name: str, headers: torch.Tensor) -> None:
        """Become unit ``number`` of ``root``; ``headers`` receives every rank's number with each gather."""
        if self.root is not None and self.parameters:
            self.release()
        self.root = root
        self.number = number
        self.name = name
        if self.parameters:
            self._header[0] = number
            self._headers = headers
            self._expected_headers = [number, 0] * self.comm.world_size
            self._outputs[len(self._inputs) - 1 :] = [headers.view(torch.uint8)]
            for reduction in self.reductions:
                reduction.belongs_to(number, name)

    # -- gather, show, release -----------------------------------------------------------------------------------

    @property
    def gathered(self) -> bool:
        """Whether the slab is leased: filled, or being filled."""
        return self.slab.leased

    def issue(self, generation: int) -> None:
        """Lease the slab if it is not, and start filling it from the shards, for the given root call or backward."""
        assert self.root is not None
        if self._pending is not None:
            self.wait()
        self.root.gathered.add(self.number)  # first, so that a lease that fails is released with the rest
        self.slab.lease()
        if self._casts:
            self._cast.lease()
        self.generation, self.epoch = generation, epoch.current()
        self.kept = False
        self.root.notify("issue", self)
        self._issuing = True
        self._pending = self.comm.all_gather(self._outputs, self._inputs, self._casts, self._cast.release)
        self._issuing = False

    def wait(self) -> None:
        """Order the computation after the gather under way, if there is one."""
        if self._pending is None:
            return
        assert self.root is not None
        self.root.notify("wait", self)
        self._pending.wait()
        self._pending = None
        if self.comm.streams.asynchronous:
            self.check_headers()

    def check_headers(self) -> None:
        """Raise if another rank gathered another unit. Reads the headers: on an accelerator the host waits."""
        found = self._headers.tolist()
        if found == self._expected_headers:
            return
        assert self.root is not None
        others = {
            rank: self.root.name_of(number)
            for rank, number in enumerate(found[::HEADER])
            if number != self.number
        }
        raise RuntimeError(
            f"The ranks run different units: rank {self.comm.rank} gathered unit {self.number} "
            f"({self.name!r}) while {', '.join(f'rank {r} gathered {n}' for r, n in others.items())}. "
            "Every rank must run the same units in the same order in each step."
        )

    def show_full(self) -> None:
        if not self._full_shown:
            for p in self.parameters:
                p.check_unreplaced()
            self._full_shown = True  # before the first: a loop that is interrupted is undone as a whole
            for p in self.parameters:
                p.show(p.full)

    def show_sharded(self) -> None:
        if self._full_shown:
            for p in self.parameters:
                p.show(p.sharded)
            self._full_shown = False

    def release(self) -> None:
        """Show the sharded parameters and give the slab's memory back."""
        self.show_sharded()
        if self.slab.leased:
            self.wait()
            self.generation, self.kept = -1, False
            if (
                self._issuing
            ):  # an interrupt left a gather that may still write: the memory stays until the next
                return
            self.slab.release()
            if self.root is not None:
                self.root.gathered.discard(self.number)

    def valid_for(self, generation: int) -> bool:
        """Whether the slab may be read by the given root call without filling it again."""
        fresh = self.generation == generation or self.kept
        return self.slab.leased and fresh and self.epoch == epoch.current()

    # -- requires_grad and gradients -----------------------------------------------------------------------------

    def follow_requires_grad(self) -> None:
        """Take over ``requires_grad`` from the sharded parameters, which users may have changed since."""
        trainable = tuple([p.sharded.requires_grad for p in self.parameters])
        if trainable == self._trainable:
            return
        for reduction in self.reductions:
            reduction.finish()
            if reduction.holds:
                raise RuntimeError(
                    f"requires_grad of parameters of unit {self.name!r} changed while gradients of earlier "
                    "micro-batches are held. Change it between optimizer steps, or reduce them first: "
                    "set_requires_gradient_sync(True) before the last backward."
                )
        self._trainable = trainable
        for p, flag in zip(self.parameters, trainable, strict=True):
            p.full.requires_grad_(flag)
        self.reductions = self._plan_reductions(trainable)
        for reduction in self.reductions:
            reduction.belongs_to(self.number, self.name)

    @torch.inference_mode(False)
    def _plan_reductions(self, trainable: tuple[bool, ...]) -> list[Reduction]:
        dtypes = [spec.compute_dtype for spec in self.layout.specs]
        reduce = [(self.policy.reduce_dtype or t) if t.is_floating_point else t for t in dtypes]
        return [
            Reduction(packing, self.layout, self.parameters, self.comm, self.mesh)
            for packing in plan_packing(self.layout, trainable, reduce)
        ]

    def on_gradient(self) -> None:
        """A parameter's full gradient is complete for this backward. Refuses one that read weights unseen."""
        assert self.root is not None
        self.root.enter_backward()
        if not self.entered and (not self.slab.leased or self._pending is not None):
            raise RuntimeError(
                f"Backward reached parameters of unit {self.name!r} not through the unit's outputs, when its weights "
                "were not gathered. Return every tensor that backward starts from as an output of the unit, in "
                "tuples, lists, dicts or dataclasses, instead of keeping it in an attribute or another object."
            )

    def finish_backward(self) -> None:
        """At the end of backward: leave it if that is still to do; reduce what came late or was held before."""
        if self.visits:
            self.leave_backward()
        elif any(r.has_gradients(held=self.requires_sync) for r in self.reductions):
            self.reduce()
        self.entered = False

    def reduce(self) -> None:
        """Reduce the gradients, zeros where there are none, or hold them while communication is switched off.

        Whether to reduce depends only on which units ran, never on which gradients this rank has: the ranks must
        issue the same reductions in the same order.
        """
        assert self.root is not None
        if not self.requires_sync:
            for reduction in self.reductions:
                if reduction.has_gradients(held=False):
                    reduction.hold()
            return
        if not self.reductions:
            return
        self.root.finish_reductions()
        for reduction in self.reductions:
            dtype = reduction.packing.reduce_dtype
            reduction.start(plan_division(dtype, self.comm.world_size, self.divide_factor))
        self.root.reducing = self.number

    def finish_reduction(self) -> None:
        for reduction in self.reductions:
            reduction.finish()

    def forget_gradients(self, among: set[int] | None = None) -> None:
        """After ``zero_grad``: drop held sums (of parameters ``among`` the ids given) and the gradients' memory."""
        for reduction in self.reductions:
            reduction.drop_held(among)
        self.release_unused_gradients()

    def release_unused_gradients(self) -> None:
        for reduction in self.reductions:
            reduction.release_unused()

    # -- hooks ---------------------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        root = self.root if self.root is not None else self._attach(module)
        recomputing = in_backward()
        if recomputing:
            root.enter_backward()
        elif root.caller is None:
            args, kwargs = root.begin(self, args, kwargs)
        self._calls.append(None)  # taken off by after_forward or forward_failed
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
        if not self.parameters:
            return args, kwargs
        if len(self._calls) == 1 and not self._to_run and not recomputing:
            self.follow_requires_grad()
            if len(self.modules) > 1:
                self._to_run = {id(m()) for m in self.modules}
        if not recomputing:
            root.forward_reaches(self)
        elif not self.slab.leased:
            self.issue(root.generation)
        self.wait()
        self.show_full()
        # Recomputation for a visit whose backward is under way fills saved tensors of the first graph, which is
        # marked already; reentrant checkpointing runs backward through the recomputed graph itself.
        if torch.is_grad_enabled() and not (recomputing and self.visits):
            visit = self._calls[-1] = root.visit(self, recomputing)
            args, kwargs, marked = mark_inputs(visit, args, kwargs)
            visit.calls += 1
            visit.endless |= not marked
        return args, kwargs

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        root = self.root
        assert root is not None
        visit = self._calls.pop()
        self._to_run.discard(id(module))
        if self.parameters:
            self._check_output(output, module)
        if visit is not None and not mark_outputs(visit, output):
            refuse_opaque(output, f"unit {self.name!r} ({type(module).__name__})")
        if not in_backward() and not self._calls:
            if self.parameters and not self._to_run:
                root.forward_leaves(self, visit)
                self.leave_forward()
            if root.caller is self:
                root.end()
        dtype = self.policy.output_dtype
        if dtype is not None:
            output = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)
        return output

    @property
    def calls(self) -> int:
        """How many calls of this unit are under way; more than one when it calls itself."""
        return len(self._calls)

    def forward_failed(self, calls: int) -> None:
        """An exception passes through a call that began when ``calls`` others were under way: leave all in order."""
        del self._calls[calls:]
        if calls or self.root is None or in_backward():
            return
        self._to_run.clear()
        if self.parameters:
            self.release()
        if self.root.caller is self:
            self.root.abandon()

    @property
    def forward_unfinished(self) -> bool:
        """Whether forward ran only some modules of a list unit."""
        return bool(self._to_run)

    def leave_forward(self) -> None:
        self._to_run.clear()
        assert self.root is not None
        if self._keeps_after_forward(self.root):
            self.show_sharded()
        else:
            self.release()

    def _keeps_after_forward(self, root: Root) -> bool:
        reshard = self.reshard_after_forward
        if torch.is_grad_enabled():
            return not (root.top is not self if reshard is None else reshard)
        self.kept = (
            reshard is False
        )  # asked for, so kept for the next evaluation step too, until weights change
        return self.kept

    def _check_output(self, output: Any, module: nn.Module) -> None:
        """Refuse outputs that are views of the unit's weights: their memory is about to go."""
        start = self.slab.address
        end = start + self.slab.nbytes

        def check(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) in (torch.Tensor, nn.Parameter) and start <= tensor.data_ptr() < end:
                raise RuntimeError(
                    f"An output of unit {self.name!r} ({type(module).__name__}), of shape {tuple(tensor.shape)}, is "
                    "one of its parameters or a view of one, whose memory is released after forward. Return a clone."
                )
            return tensor

        map_tensors(check, output)

    def before_backward(self, visit: Visit) -> None:
        if visit in self.visits:
            return
        root = self.root
        assert root is not None
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"Backward with create_graph=True reached unit {self.name!r}: sharded parameters do not support double "
                "backward, because their memory is released after each use. Use first-order gradients only."
            )
        root.enter_backward()
        visit.open = visit.calls
        self.visits.add(visit)
        self.entered = True
        if not self.slab.leased and self.unshard_in_backward:
            self.issue(root.generation)
        root.prefetch_backward(visit)
        self.wait()
        self.show_full()

    def after_backward(self, visit: Visit) -> None:
        visit.open -= 1
        if visit.open == 0 and not visit.endless:
            self.visits.discard(visit)
            if not self.visits:
                self.leave_backward()

    def leave_backward(self) -> None:
        """The unit's backward is done: give its weights back, reduce its gradients."""
        self.visits.clear()
        self.kept = not self.reshard_after_backward
        if self.kept:
            self.show_sharded()
        else:
            self.release()
        self.reduce()

    def recover(self) -> None:
        """Drop what an interrupted forward or backward left behind."""
        self._calls.clear()
        self._to_run.clear()
        self.visits.clear()
        if self.parameters:
            self.entered = False
            for reduction in self.reductions:
                reduction.discard()
            self.release()
