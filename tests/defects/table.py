"""The table. A defect is a piece of source that stands once in its file, and what takes its place."""

from __future__ import annotations

from typing import NamedTuple


class Defect(NamedTuple):
    """A change of one file below ``src/shardwright`` and tests that fail with it.

    Attributes:
        seam: the part of the engine that it breaks.
        what: what goes wrong.
        path: of the file, below the package.
        source: what stands there, once.
        wrong: what takes its place.
        tests: arguments of pytest, below ``tests``; at least one of these tests fails.
    """

    seam: str
    what: str
    path: str
    source: str
    wrong: str
    tests: tuple[str, ...]


DEFECTS = [
    # -- the stages of a gather
    Defect(
        "cast",
        "the cast shard stays leased after its gather",
        "engine/weights/gather.py",
        "        parcel.casts = self._copies\n\n    def end(self) -> None:\n        if self._slab is not None:\n"
        "            self._slab.release()\n",
        "        parcel.casts = self._copies\n\n    def end(self) -> None:\n        if self._slab is not None:\n"
        "            pass\n",
        ("engine/test_memory_bounds.py",),
    ),
    Defect(
        "upload",
        "offloaded shards that outer axes have gathered are not uploaded again after an edit",
        "engine/weights/gather.py",
        "if self._after is None or not self._after.serves(parcel.epoch):",
        "if self._after is None or self._after.epoch == NEVER:",
        ("engine/test_between_uses.py",),
    ),
    Defect(
        "hop",
        "what outer axes have gathered serves after the weights changed",
        "engine/weights/gather.py",
        "return self.kept and self.epoch == epoch and edits_are_seen",
        "return self.kept and self.epoch != NEVER",
        ("engine/test_between_uses.py",),
    ),
    Defect(
        "codec",
        "an edit of decoded weights is compared with itself",
        "engine/weights/full_edits.py",
        "self._decoded[key] = p.cut.of_full(p.view.detach()).clone()",
        "self._decoded[key] = p.cut.of_full(p.view.detach())",
        ("engine/test_comm_hooks.py",),
    ),
    Defect(
        "codec of blocks",
        "blocks of one expert are counted on into the next",
        "engine/layout/blocks.py",
        "head = min(-first % rows, last - first)",
        "head = 0",
        ("engine/comm/test_coding.py",),
    ),
    Defect(
        "codec of blocks",
        "weights that two axes cut are decoded and encoded again between them",
        "engine/weights/coding.py",
        "coding.encode if i == 0 else None, coding.decode if i == last else None",
        "coding.encode, coding.decode",
        ("engine/test_float8_gathers.py",),
    ),
    Defect(
        "extension",
        "modules show the parameter that a tensor subclass has made in an earlier build",
        "engine/weights/weights.py",
        "p.counters], self.site.owner\n        )\n        self.forms.index()\n",
        "p.counters], self.site.owner\n        )\n",
        ("engine/test_surface_subclasses.py", "engine/test_attached_extensions.py"),
    ),
    Defect(
        "reshard_after_forward=k",
        "every rank keeps the first rank's part for backward",
        "engine/weights/gather.py",
        "int(t.storage_offset()) + comm.rank * size, size)",
        "int(t.storage_offset()), size)",
        ("engine/test_secondary.py",),
    ),
    Defect(
        "full precision in eval",
        "after training, evaluation reads outer gathers whose memory is gone",
        "engine/weights/full_weights.py",
        "            self.current.gather.drop()  # training keeps its own until the weights change\n",
        "            [hop.slab.release() for hop in self.current.gather.hops]\n",
        ("engine/test_precision.py", "-k", "evaluation"),
    ),
    # -- guards
    Defect(
        "values that are not there",
        "parameters on the meta device train from NaN",
        "engine/unit/uses.py",
        "    if missing:\n        assert unit.root is not None",
        "    if missing and unit is None:\n        assert unit.root is not None",
        ("init/test_meta.py", "init/test_unset.py"),
    ),
    Defect(
        "unsharded",
        "a unit computes while full parameters that it does not know are shown",
        "engine/model/calls.py",
        '    if unit.watch.unsharded:\n        unit.refuse_unsharded("Forward of")\n',
        "",
        ("engine/test_unsharded.py",),
    ),
    Defect(
        "reads of released weights",
        "autograd reads saved weights that are not gathered",
        "engine/weights/weights.py",
        "            self.copies.current.counters.hide()\n            slab.release()\n",
        "            slab.release()\n",
        ("engine/test_unready_weights.py",),
    ),
    # -- epochs and edits
    Defect(
        "ledger",
        "autograd does not refuse a backward over weights that changed",
        "engine/weights/weights.py",
        "            self.copies.count_edits(changed)\n",
        "            self.copies.current.counters.forget()\n",
        ("engine/test_sharded_edits.py",),
    ),
    Defect(
        "ledger",
        "kept weights serve after their shards were edited",
        "engine/weights/weights.py",
        "        self.notice_edits()\n        if self.epoch != self.ledger.epoch:\n",
        "        self.notice_edits()\n        if self.epoch == NEVER:\n",
        ("engine/test_sharded_edits.py",),
    ),
    Defect(
        "ledger",
        "an edit of full weights hides one of another parameter's shard",
        "engine/weights/weights.py",
        "self.ledger.epoch if fresh else NEVER",
        "self.ledger.epoch",
        ("engine/test_edits.py",),
    ),
    Defect(
        "ledger",
        "what is computed again in backward has weights of before an edit",
        "engine/model/backward.py",
        "not (weights.gathered and weights.is_current)",
        "not weights.gathered",
        ("engine/test_sharded_edits.py",),
    ),
    Defect(
        "ledger",
        "writes through the .data of a full parameter are lost",
        "engine/weights/full_edits.py",
        "if (edited or id(p.full) in handed_out) and i not in newer and not p.in_place:",
        "if edited and i not in newer and not p.in_place:",
        ("engine/test_edits.py", "engine/test_comm_hooks.py"),
    ),
    # -- residence
    Defect(
        "residence",
        "an interrupted gather writes into memory that was given back",
        "engine/weights/weights.py",
        "            if self.residence is ISSUING:\n                # An interrupt",
        "            if not self.generation:\n                # An interrupt",
        ("engine/test_between_uses.py",),
    ),
    Defect(
        "residence",
        "weights kept on purpose are kept beyond the optimizer's step",
        "engine/model/optimizer_hook.py",
        "        unit.drop_kept()  # some kernels write without increasing a version counter\n",
        "",
        ("engine/test_between_uses.py",),
    ),
    # -- settings
    Defect(
        "settings",
        "a deep copy forgets a setting",
        "engine/front/copies.py",
        "settings=replace(settings, transport",
        "settings=replace(settings, fills_unused=False, transport",
        ("engine/test_unused.py",),
    ),
    Defect(
        "settings",
        "a captured step is replayed though settings were changed",
        "engine/front/graphed.py",
        "                    each.settings,\n",
        "                    each.settings.sync,\n",
        ("engine/test_graphed.py", "engine/test_copied_settings.py"),
    ),
    # -- accumulation
    Defect(
        "due",
        "what was held is not reduced when the optimizer needs it",
        "engine/unit/accumulation.py",
        "            needed=needed,\n",
        "            needed=False,\n",
        ("engine/test_strategies.py",),
    ),
    Defect(
        "due",
        "whole gradients that were held are lost where nothing came since",
        "engine/gradients/due.py",
        "return Due.FINISH if held is Held.WHOLE or not finishes_late else",
        "return Due.FINISH if not finishes_late else",
        ("engine/test_between_uses.py",),
    ),
    Defect(
        "due",
        "after a failed backward the unit forgets that it holds sums",
        "engine/unit/accumulation.py",
        "        self.held = max(self.held, self._held_before)\n",
        "",
        ("engine/test_strategy_reductions.py", "-k", "exception"),
    ),
    # -- a reduction under way
    Defect(
        "flight",
        "sums that a failed reduction had taken up are lost",
        "engine/gradients/reduction.py",
        "            earlier.value, earlier.present = value, present\n",
        "            pass\n",
        ("engine/test_between_uses.py",),
    ),
    Defect(
        "flight",
        "a rank takes its own word for which parameters have gradients",
        "engine/gradients/delivery.py",
        "used = read_flags(output[start : start + len(self._packer.parameters)], result.present)",
        "used = list(result.present)",
        ("engine/test_unused.py", "engine/test_strategy_reductions.py"),
    ),
    Defect(
        "packing",
        "an unused parameter gets a gradient of zero",
        "engine/gradients/packer.py",
        "                    flags[:, columns[0] : columns[-1] + 1] = 0\n",
        "                    flags[:, columns[0] : columns[-1]] = 0\n",
        ("engine/test_unused.py", "engine/test_behaviour.py"),
    ),
    Defect(
        "packing",
        "gradients of parameters that were frozen since forward count",
        "engine/gradients/packer.py",
        "            if gradient is None or not self.shardeds[i].requires_grad:\n",
        "            if gradient is None:\n",
        ("engine/test_cases.py", "-k", "frozen or freez"),
    ),
    # -- delivery
    Defect(
        "delivery",
        "gradients that the user has kept are overwritten by the next step",
        "engine/gradients/delivery.py",
        "            if sys.getrefcount(dtensor) > 3:\n                return False\n",
        "            pass\n",
        ("engine/test_behaviour.py", "engine/test_memory.py"),
    ),
    Defect(
        "delivery",
        "gradients that come to the host take the place of those that are there",
        "engine/gradients/delivery.py",
        "if result.fresh and shard is not None and shard.direct and self._has_no_gradients():",
        "if shard is not None and shard.direct:",
        ("engine/test_offload.py",),
    ),
    # -- transport
    Defect(
        "transport",
        "the gradient hook of a copy is never called",
        "engine/unit/unit.py",
        "            if unnamed and self.settings.transport.hook is not None:\n",
        "            if not unnamed:\n",
        ("engine/test_copied_settings.py",),
    ),
    Defect(
        "transport",
        "a reduction over two axes divides on each",
        "engine/gradients/reduction.py",
        "                whole.before if comm is self._way[0] else 1.0,\n",
        "                whole.before,\n",
        ("engine/test_strategy_reductions.py", "-k", "divided"),
    ),
    # -- steps in backward
    Defect(
        "step in backward",
        "a unit is stepped while other calls of it wait for their backward",
        "engine/unit/uses.py",
        "    if not unit.activity.unfinished:\n        step_if_due(unit)\n\n\ndef step_if_due",
        "    step_if_due(unit)\n\n\ndef step_if_due",
        ("optim/test_in_backward.py", "optim/test_in_backward_twice.py"),
    ),
    # -- tensor parallelism
    Defect(
        "tensor parallel",
        "partial gradients are not summed over the tensor-parallel ranks",
        "engine/gradients/packer.py",
        "gradient = parameter.cut.parallel.gradient(gradient, self.packing.reduce_dtype)",
        "gradient = gradient.to_local()",
        ("engine/test_tensor_parallel.py", "-k", "plain_model"),
    ),
    # -- what units share
    Defect(
        "visits",
        "units whose inputs need no gradient are reduced at the end of backward only",
        "engine/model/visits.py",
        "        if len(self.open) > 1:  # ``visit`` is one of them\n",
        "        if False:\n",
        ("engine/test_between_uses.py",),
    ),
    Defect(
        "order",
        "forward gathers no unit ahead",
        "engine/model/order.py",
        "            self._place = place + 1\n",
        "            self._place = len(expected)\n",
        ("engine/test_schedule.py", "engine/test_behaviour.py"),
    ),
    Defect(
        "order",
        "after a failure on one rank the ranks guess unlike orders",
        "engine/model/root.py",
        "            self._order.forget()\n",
        "            pass\n",
        ("engine/test_leaving.py",),
    ),
    Defect(
        "agreement",
        "weights of different ages meet in one gather",
        "engine/model/agreement.py",
        "            record = Record(event, number, nbytes, detail, self.model.number, self.steps.age)\n",
        "            record = Record(event, number, nbytes, detail, self.model.number, 0)\n",
        ("engine/test_ages.py",),
    ),
    Defect(
        "pools",
        "two slabs have one place at the same time",
        "engine/memory/planned.py",
        "        busy = self._overlaps[i] & self._leased & ~(1 << i)\n",
        "        busy = 0\n",
        ("engine/test_memory.py", "engine/memory"),
    ),
    Defect(
        "settling",
        "a module that was exchanged for another is not noticed",
        "engine/unit/watch.py",
        "            or self._ids_of_children() != self._child_ids\n",
        "",
        ("engine/test_moved_modules.py", "engine/test_edits.py", "engine/test_cases.py"),
    ),
    Defect(
        "activations",
        "gathered weights move",
        "activations/offload.py",
        "        return not is_in_slab(tensor)\n",
        "        return True\n",
        ("activations/test_offload_on_ranks.py",),
    ),
    Defect(
        "activations",
        "memory is released under the copy to the host",
        "activations/offload.py",
        "            self._join(copy)\n            if copy.call is not None:\n",
        "            if copy.call is not None:\n",
        ("activations/test_offload.py",),
    ),
    Defect(
        "activations",
        "storages come back no block ahead",
        "activations/offload.py",
        "        ahead = call.previous()\n",
        "        ahead = None\n",
        ("activations/test_offload.py",),
    ),
    Defect(
        "activations",
        "a storage that two blocks save moves twice",
        "activations/offload.py",
        "            storage = self._offload.in_copy(key)\n",
        "            storage = None\n",
        ("activations/test_offload.py",),
    ),
    Defect(
        "activations",
        "a write to a saved tensor is not noticed",
        "activations/saved_bytes.py",
        "any(t._version != version for t, version in self._aliases)",
        "False",
        ("activations/test_offload.py",),
    ),
    Defect(
        "activations",
        "a storage that never comes keeps its buffer",
        "activations/saved_bytes.py",
        "            self._pool.give_back(self.buffer)\n",
        "            pass\n",
        ("activations/test_offload.py",),
    ),
]
