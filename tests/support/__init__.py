"""Code that tests share: the pool of worker processes and the helpers that run inside it.

Nothing here knows the package under test, so a broken engine cannot break the pool that reports it.
"""

from tests.support.pool import CaseFailed, CaseSkipped, WorkerPools, multirank, seed_all, world_mesh

__all__ = ["CaseFailed", "CaseSkipped", "WorkerPools", "multirank", "seed_all", "world_mesh"]
