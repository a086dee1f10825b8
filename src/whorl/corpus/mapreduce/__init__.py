"""Map, shuffle by key, reduce, over files; each unit of work is kept under a hash of what it depends on.

    work = UnitStore(folder)
    counted = work.run(Stage("my_package:count", 1, {"field": "text"}), units, LocalPool(workers=4))
    totals = work.run(Stage("my_package:total", 1, {}), shuffled(counted), LocalPool(workers=4))

See `docs/corpus.md` for the model (Dean & Ghemawat 2004, MapReduce: Simplified Data Processing on Large Clusters).
"""

from whorl.corpus.mapreduce.executors import LocalPool, RayTasks
from whorl.corpus.mapreduce.settings import ENGINE_FIELDS, ExecutorConfig
from whorl.corpus.mapreduce.units import (
    Executor,
    Input,
    Output,
    Stage,
    Unit,
    UnitStore,
    link_or_copy,
    partition_name,
    shuffled,
)

__all__ = [
    "ENGINE_FIELDS",
    "Executor",
    "ExecutorConfig",
    "Input",
    "LocalPool",
    "Output",
    "RayTasks",
    "Stage",
    "Unit",
    "UnitStore",
    "link_or_copy",
    "partition_name",
    "shuffled",
]
