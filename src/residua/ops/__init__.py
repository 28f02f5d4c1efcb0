"""The arithmetic of the designs. One op is one folder; `reference.py` in it is the definition and the oracle.

Sources come as a tuple of separate tensors and are stacked nowhere but in a reference, so that a kernel can
read them where they are.
"""

from residua.native.guard import Unsupported as Unsupported
from residua.ops import _backend, _triton_registry
from residua.ops._backend import backend as backend
from residua.ops._backend import kernel as kernel
from residua.ops._backend import kernels as kernels
from residua.ops.attend import attend as attend
from residua.ops.attend import attend_norm as attend_norm
from residua.ops.attend import attend_weights as attend_weights
from residua.ops.attend_qkv import attend_qkv as attend_qkv
from residua.ops.attend_qkv import attend_qkv_weights as attend_qkv_weights
from residua.ops.attention_step import attention_step as attention_step
from residua.ops.cached_attend import cached_attend as cached_attend
from residua.ops.compress import compress as compress
from residua.ops.delta_write import delta_write as delta_write
from residua.ops.gated_mlp import gated_mlp as gated_mlp
from residua.ops.mix import mix as mix
from residua.ops.norm import l2_norm as l2_norm
from residua.ops.norm import layer_norm as layer_norm
from residua.ops.normed_project import normed_project as normed_project
from residua.ops.project import project as project
from residua.ops.remix import read_remix as read_remix
from residua.ops.remix import remix as remix
from residua.ops.rms_norm import rms_norm as rms_norm
from residua.ops.shortconv import conv_tail as conv_tail
from residua.ops.shortconv import shortconv as shortconv
from residua.ops.sinkhorn import sinkhorn as sinkhorn
from residua.ops.swiglu import swiglu as swiglu
from residua.ops.token_attend import token_attend as token_attend
from residua.ops.unembed_loss import unembed_loss as unembed_loss
from residua.ops.window_attend import window_attend as window_attend

_triton_registry.register()
_backend.check_environment()
