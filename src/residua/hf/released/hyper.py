"""Hyper-connections as DeepSeek-V4, GLM-5.3-Flash and HY-V4 have them: `attn_hc`, `ffn_hc` and `hc_head`, on `mhc`.

    fn [rows, n d], base [rows], scale      rows: n of pre, n of post and, in the first two, n n of comb [from, to]

Our res is [to, from]: the two stream axes of comb are transposed. The head of GLM is a mean and has no parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from residua.hf.anatomy import Argument, Model
from residua.hf.released.loans import Loan, lend
from residua.hf.released.walking import OnReleased
from residua.ops.norm import accumulator
from residua.plan import Plan
from residua.stream import Stream

HOLDERS = {"attn": "attn_hc", "mlp": "ffn_hc"}
"""The module of a layer that holds the parameters of a site, by the site's kind."""


class Streams:
    """[b t n d], as the state of `mhc` is."""

    def embedding(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, :, 0]

    def enter(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def leave(self, state: Tensor) -> Tensor:
        return state.contiguous()


class DeepSeekV4Layer(OnReleased):
    """Of DeepSeek-V4: the first experts are chosen by the token ids."""

    self_attn: Model
    mlp: Model
    input_layernorm: Model
    post_attention_layernorm: Model

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Argument) -> Tensor:
        walk = self.walk(hidden_states)
        walk.through(self.input_layernorm, lambda x: self.self_attn(x, **kwargs)[0])
        walk.through(self.post_attention_layernorm, lambda x: self.mlp(x, input_ids=input_ids))
        return walk.hidden_states


class IndexedLayer(OnReleased):
    """Of GLM-5.3-Flash and HY-V4: what the indexer of a layer chose is handed on beside the streams."""

    self_attn: Model
    mlp: Model
    input_layernorm: Model
    post_attention_layernorm: Model
    block_type: str

    def forward(self, hidden_states: Tensor, **kwargs: Argument) -> tuple[Tensor, Tensor | None]:
        walk, chosen = self.walk(hidden_states), None

        def attend(x: Tensor) -> Tensor:
            nonlocal chosen
            if getattr(self, "block_type", None) == "linear_attention":
                rest = {key: value for key, value in kwargs.items() if key not in NOT_OF_LINEAR}
                return self.self_attn(hidden_states=x, cache_params=kwargs.get("past_key_values"), **rest)
            y, _, chosen = self.self_attn(hidden_states=x, **kwargs)
            return y

        walk.through(self.input_layernorm, attend)
        walk.through(self.post_attention_layernorm, self.mlp)
        return walk.hidden_states, chosen


NOT_OF_LINEAR = ("past_key_values", "position_ids", "position_embeddings", "use_cache", "prev_topk_indices")
"""What a layer of GLM is handed and its linear attention is not."""


def lend_all(stream: Stream, plan: Plan, backbone: Model) -> None:
    """Every parameter of the stream from the modules of a backbone."""
    for site in plan.sites:
        part, holder = stream.part(site), getattr(backbone.layers[site.layer], HOLDERS[site.kind])
        views = _views(holder.hc_mult, res=len(holder.scale) == 3)
        lend(part, {name: Loan(holder, view) for name, view in views.items()})
    if (head := stream.part(plan.head)) is not None:
        lend(head, {name: Loan(backbone.hc_head, view) for name, view in _HEAD.items()})


def _views(n: int, *, res: bool) -> Mapping[str, Callable[[Model], Tensor]]:
    """By the names of our parameters; partial functions, because a model may be pickled."""
    found: dict[str, Callable[[Model], Tensor]] = {}
    for place, name in enumerate(("pre", "post")):
        start, stop = n * place, n * (place + 1)
        found[f"{name}.phi"] = partial(_columns, start=start, stop=stop)
        found[f"{name}.bias"] = partial(_bias, start=start, stop=stop)
        found[f"{name}.alpha"] = partial(_alpha, place=place)
    if res:
        found["res.phi"], found["res.bias"] = partial(_transposed, n=n), partial(_transposed_bias, n=n)
        found["res.alpha"] = partial(_alpha, place=2)
    return found


def _wide(parameter: Tensor) -> Tensor:
    """In float32 at least: the classes compute the mappings so, whatever their parameters are loaded in."""
    return parameter.to(accumulator(parameter.dtype))


def _columns(hc: Model, start: int, stop: int) -> Tensor:
    return _wide(hc.fn[start:stop]).T


def _bias(hc: Model, start: int, stop: int) -> Tensor:
    return _wide(hc.base[start:stop])


def _alpha(hc: Model, place: int) -> Tensor:
    return _wide(hc.scale[place : place + 1])


def _transposed(hc: Model, n: int) -> Tensor:
    """The rows of comb, [from, to], as our columns, [to, from]."""
    return _wide(hc.fn[2 * n :]).unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1).T


def _transposed_bias(hc: Model, n: int) -> Tensor:
    return _wide(hc.base[2 * n :]).unflatten(0, (n, n)).T


def _head_phi(head: Model) -> Tensor:
    return _wide(head.hc_fn).T


def _head_bias(head: Model) -> Tensor:
    return _wide(head.hc_base)


def _head_alpha(head: Model) -> Tensor:
    return _wide(head.hc_scale)


_HEAD: Mapping[str, Callable[[Model], Tensor]] = {
    "pre.phi": _head_phi,
    "pre.bias": _head_bias,
    "pre.alpha": _head_alpha,
}
