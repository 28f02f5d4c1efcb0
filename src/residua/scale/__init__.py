"""One model on many devices, by torch's own engines: a mesh, FSDP2, tensor parallelism, and a start that depends on
neither.

    from residua.scale import Parallel
    from residua.scale.shard import shard
    from residua.scale.start import materialise

    mesh = Parallel.parse("fsdp=8").mesh("cuda")
    with torch.device("meta"):
        model = Transformer(config)
    shard(model, mesh["fsdp"])
    materialise(model, seed=0, device="cuda")

Only the layout is imported with the package: the engines take seconds to load, and one process needs none of them.
"""

from residua.scale.layout import Parallel as Parallel
from residua.scale.layout import Pipes as Pipes
from residua.scale.layout import choose as choose
