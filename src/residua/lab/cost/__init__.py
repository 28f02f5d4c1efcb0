"""What a design costs: predicted from the plan alone, and counted on this machine by a counter that shares no formula.

predict(config, tokens)         operations, memory, state, cache and traffic of a model, without allocating it
run_and_count(config, tokens)   the same, by running it; `measure` is its earlier name
ranks.predict_ranks(config, parallel, ...)   memory, traffic and time of every rank of a step on many
"""

from residua.lab.cost.predict import Cost as Cost
from residua.lab.cost.predict import predict as predict
from residua.lab.cost.running import run_and_count as run_and_count

measure = run_and_count
