"""A model on several ranks: who they are, what each precision means, and the calls in which engines differ.

`Trainer` uses it in one order: `float8`, `activations` (blocks), `recipe.parallelize` (engine), optimizer. `engines`
has a class for each engine. `rank_facts`, `world` and `checks` are about the ranks, `host_memory` about their host,
`model_conflicts` about settings that a model cannot be trained with. No loop is here.
"""
