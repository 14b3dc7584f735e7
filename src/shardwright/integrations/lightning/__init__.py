"""Lightning Fabric: ``ShardwrightStrategy`` shards the models that Fabric sets up.

    from lightning.fabric import Fabric
    from shardwright.integrations.lightning import ShardwrightStrategy

    fabric = Fabric(devices=2, strategy=ShardwrightStrategy(auto_wrap_policy={Block}))

``strategy`` has the methods that Fabric calls, each a few lines. They hand the work on: ``models`` chooses the mesh and
the units, ``gradients`` clips and scales, ``checkpoints`` saves and loads a state, and ``named_values`` knows what is
stored of each of its values. Users read docs/fabric.md.
"""

from shardwright.integrations.lightning.strategy import ShardwrightStrategy as ShardwrightStrategy
