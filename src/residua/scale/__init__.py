"""One model on many devices, by torch's own engines: a mesh, FSDP2, tensor parallelism, and a start that does not
depend on either.

    parallel = Parallel.parse("fsdp=8")
    mesh = parallel.mesh("cuda")
    with torch.device("meta"):
        model = Transformer(config)
    shard(model, mesh["fsdp"])
    materialise(model, seed=0, device="cuda")
"""

from residua.scale.layout import Parallel as Parallel
from residua.scale.layout import choose as choose
from residua.scale.shard import shard as shard
from residua.scale.split import settle as settle
from residua.scale.split import split as split
from residua.scale.start import materialise as materialise
