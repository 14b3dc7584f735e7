"""Numbers that have gone wrong in a run: how they are found and named, and how the run goes on or ends.

Read `detect` first: the flag in each step's reduction, the rule for spikes, and the decision whether the step has a
fault. `acting` skips, goes back or stops; `naming` says which parameter and which rank.
`verifying` looks for silent corruption, `replaying` does a step's work again without a trace. `not_finite` names the
ranks of other figures.
Rule: a step without a fault costs one flag.
"""
