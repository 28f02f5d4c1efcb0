"""Released models whose residual stream is a design here: transformers' own classes, opened on our stream."""

from residua.hf.released.opening import open_released as open_released
