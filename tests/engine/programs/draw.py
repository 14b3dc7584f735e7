"""How random programs are drawn: what a program may contain is what must be exact; refusals are tested elsewhere."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.engine.programs.grammar import (
    ALIASES,
    CHOSEN,
    KINDS,
    LAYOUTS,
    MESHES,
    OUTPUTS,
    READINGS,
    TRANSFORMS,
    WRITES,
    BlockSpec,
    Call,
    Copy,
    Edit,
    Evaluate,
    Fail,
    Forward,
    Freeze,
    Load,
    Micro,
    Model,
    Penalty,
    Piece,
    Program,
    Read,
    Setting,
    Sharding,
    Tie,
    Train,
    Transform,
    Uneven,
    Update,
    ZeroGrad,
)
from tests.engine.programs.penalties import SUMS, TERMS, WEIGHTS


def programs(parallel: bool = True) -> st.SearchStrategy[Program]:
    """Without ``parallel`` everything is zero3 on a line, row by row, as it was drawn before there were strategies."""
    boolean = st.booleans()
    reshard = st.sampled_from((None, True, False, *((2,) if parallel else ())))
    piece = st.builds(
        Piece,
        st.sampled_from(KINDS),
        st.integers(0, 5).map(lambda i: i == 5),
        st.integers(0, 7).map(lambda i: i == 7),
    )
    checkpointing = st.sampled_from(("none", "none", "none", "not reentrant", "reentrant"))
    block = st.builds(
        BlockSpec,
        st.lists(piece, min_size=1, max_size=3).map(tuple),
        st.integers(0, 4).map(lambda i: i != 4),
        st.sampled_from(("tensor", *OUTPUTS)),
        checkpointing,
        reshard,
    )
    stages = st.tuples(st.sampled_from((0, 1, 2, 3)), st.sampled_from((3, 0, 1, 2)))
    sharding = st.builds(
        Sharding,
        st.sampled_from(MESHES),
        st.lists(stages, min_size=1, max_size=2).map(tuple),
        st.lists(st.sampled_from(tuple(LAYOUTS)), min_size=1, max_size=2).map(tuple),
    )
    memories = st.sampled_from(("dynamic", "max_pool", "arena"))
    tie = st.builds(Tie, st.integers(0, 8), st.integers(0, 8))
    model = st.builds(
        Model,
        st.lists(block, min_size=1, max_size=3).map(tuple),
        st.lists(tie, max_size=2).map(tuple),
        boolean,
        st.sampled_from(("root", "list", "two")),
        reshard,
        st.sampled_from(("rows", "last", "mixed")),
        st.sampled_from(("fp32", "fp32", "bf16")),
        st.sampled_from(("sgd", "adamw")),
        boolean,
        *(
            [sharding, memories, st.integers(0, 3), st.integers(0, 3).map(lambda i: i == 3)]
            if parallel
            else []
        ),
    )
    call = st.builds(Call, st.integers(0, 2), checkpointing, st.integers(0, 9).map(lambda i: i == 9))
    unused = st.just(0) | st.integers(0, 2**12 - 1)
    common = st.just((Call(0), Call(1), Call(2)))
    forward = st.builds(
        Forward,
        common | st.lists(call, max_size=5).map(tuple),
        unused,
        boolean,
        st.integers(0, 5).map(lambda i: i == 5),
        st.sampled_from(("output", "output", "hidden", "both")),
    )
    number = st.integers(0, 40)
    penalty = st.builds(
        Penalty,
        st.lists(number, min_size=1, max_size=4).map(tuple),
        st.sampled_from(tuple(TERMS)),
        st.sampled_from(tuple(SUMS)),
        st.sampled_from(tuple(WEIGHTS)),
    )
    micro = st.builds(
        Micro,
        forward,
        st.sampled_from(("plain", "plain", "plain", *PATTERNS)),
        st.sampled_from(
            ("nothing", "nothing", "nothing", "evaluate", "freeze", "other forward", "state dict")
        ),
        st.integers(0, 7).map(lambda i: i == 7),
        st.none() | penalty,
    )
    train = st.builds(
        Train,
        st.lists(micro, min_size=1, max_size=3).map(tuple),
        st.sampled_from(("no", "no", "yes", "yes", "open", *(HOLDS if parallel else ()))),
    )
    cleared = st.sampled_from(("optimizer", "model", "none", "no"))
    instruction = st.one_of(
        train,
        train,
        train,
        st.builds(Update, boolean, cleared),
        st.builds(Update, boolean, cleared, st.integers(0, 7).map(lambda i: i == 7)),
        st.builds(Evaluate, forward, boolean, st.integers(1, 2)),
        st.builds(Transform, st.sampled_from(TRANSFORMS), forward),
        st.builds(Uneven, st.integers(0, 3)),
        st.builds(Read, number, st.sampled_from(READINGS), boolean),
        st.builds(Freeze, st.lists(number, min_size=1, max_size=3).map(tuple), boolean, boolean),
        st.builds(Edit, number, st.sampled_from(EDITS)),
        st.builds(Edit, number, st.sampled_from(ALIASES)),
        st.builds(Edit, number, st.sampled_from(WRITES)),
        st.builds(Fail, st.sampled_from(FAILURES), st.integers(0, 2), forward),
        st.builds(ZeroGrad, st.sampled_from(("model", "optimizer", "none")), boolean),
        st.builds(
            Load,
            st.integers(0, 3),
            st.sampled_from(("copy", "assign", "part", "own", "assign own", "assign own")),
        ),
        st.builds(Copy, boolean),
        st.builds(Setting, st.sampled_from((*SETTINGS, *(MORE if parallel else ()))), st.integers(-1, 2)),
    )
    return st.builds(Program, model, st.lists(instruction, min_size=1, max_size=8).map(tuple))


PATTERNS = ("two forwards", "two backwards", "each", "each reversed", "dropped", *CHOSEN, *CHOSEN)
EDITS = (
    "in place",
    "copy",
    ".data in place",
    ".data set",
    ".data whole",
    "parameter",
    "half and back",
    "to_empty",
    *ALIASES,
)
HOLDS = ("late", "late", "late open", "mixed", "no all-reduce", "one waits", "one holds")
LOADS = ("copy", "assign", "part", "own", "assign own", "assign own")
FAILURES = ("forward", "forward", "backward", "recomputation", "evaluation")
SETTINGS = (
    "keep after backward",
    "reshard after backward",
    "keep after forward",
    "reshard after forward",
    "unshard",
)
MORE = ("two buffers", "separate group", "one group")
