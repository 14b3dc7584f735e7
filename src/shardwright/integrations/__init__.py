"""Adapters: where a program that is written for another tool enters this package. Each tool has one file or folder.

| tool             | a user imports                             | who calls it                       | page            |
|------------------|--------------------------------------------|------------------------------------|-----------------|
| Lightning Fabric | ``lightning.ShardwrightStrategy``          | ``Fabric(strategy=...)``           | docs/fabric.md  |
| Ray Train        | ``ray.trainer``, ``ray.report_checkpoint`` | ``fit``, and each of Ray's workers | docs/clusters.md|

Each adapter does the same three things, under these headings. *Start*: the tool starts the processes, and they become
ranks. *Training*: models and optimizers are sharded, and steps run. *Checkpoints*: the tool's calls save and load, and
it learns of what was saved.

Tools that call torch's ``fully_shard`` themselves, such as Accelerate and the Trainer of transformers, need no adapter:
``shardwright.replace_torch()`` gives them this engine (docs/migration). Only an adapter imports its tool, and no other
room imports an adapter.
"""
