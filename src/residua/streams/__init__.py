"""The depth axis: one paper is one file. The order of the imports is the order of the tables and the docs."""

# ruff: noqa: I001 (sorting would lose the order)
from residua.streams.standard import Standard as Standard
from residua.streams.elc import ELC as ELC
from residua.streams.denseformer import DenseFormer as DenseFormer
from residua.streams.vertical import Vertical as Vertical
from residua.streams.dca import DCA as DCA
from residua.streams.mudd import MUDD as MUDD
from residua.streams.attnres import AttnRes as AttnRes
from residua.streams.lr_attnres import LowRankAttnRes as LowRankAttnRes
from residua.streams.multigate import MultiGate as MultiGate
from residua.streams.delta import Delta as Delta
from residua.streams.delta_released import DeltaReleased as DeltaReleased
from residua.streams.ddl import DDL as DDL
from residua.streams.depthswa import DepthSWA as DepthSWA
from residua.streams.hyper import Hyper as Hyper
from residua.streams.mhc import MHC as MHC
from residua.streams.gated import Gated as Gated
from residua.streams.frac import Frac as Frac
from residua.streams.lambdas import Lambdas as Lambdas
from residua.streams.laurel import Laurel as Laurel
from residua.streams.altup import AltUp as AltUp
from residua.streams.highway import Highway as Highway
from residua.streams.postnorm import PostNorm as PostNorm
from residua.streams.value import Valued as Valued
