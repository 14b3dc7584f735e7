"""Plans of a step's memory, without torch: programs, the caching allocator, devices, verdicts."""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.planner.accuracy import Residual, append, in_words, read
    from shardwright.planner.allocator import Rules, with_setting
    from shardwright.planner.cache import load as load_program, store as store_program
    from shardwright.planner.composition import Crossing, compose
    from shardwright.planner.cycles import one_collection, search_all
    from shardwright.planner.devices import (
        GIB,
        MEASURED,
        Device,
        DeviceError,
        Figures,
        Kind,
        known_devices,
        parse_devices,
    )
    from shardwright.planner.measured import (
        HOST,
        SPREADS,
        Measured,
        Point,
        as_toml,
        errors_between,
        kind_of_table,
        measurement_values,
        merged,
        rate_of,
        table_of,
    )
    from shardwright.planner.program import (
        OPTIMIZER,
        SAVE,
        STEP,
        VALIDATION,
        Alloc,
        Free,
        Kernel,
        Owner,
        Peak,
        Phase,
        Program,
    )
    from shardwright.planner.rates import Rates
    from shardwright.planner.samples import (
        difference,
        error,
        errors_of_least_squares,
        least_squares,
        steady,
        typical,
        width,
    )
    from shardwright.planner.search import (
        MOST_AT_A_TIME,
        Axis,
        Found,
        Keys,
        Later,
        Plan,
        corners,
        fastest,
        first_keys,
        frontier,
        search_widely,
        with_keys,
    )
    from shardwright.planner.speed import Speed, in_time, speed_of
    from shardwright.planner.text import as_values
    from shardwright.planner.timeline import COMPUTE, Interval, Recording, Step, record, replay
    from shardwright.planner.verdict import Verdict, in_gib, judge
    from shardwright.planner.work import Work, work_of

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
