"""What a design costs: predicted from the plan alone, and measured on this machine by a counter that shares no formula.

predict(config, tokens)     operations, memory, state, cache and traffic of a model, without allocating it
measure(config, tokens)     the same, by running it
"""

from residua.lab.cost.measure import measure as measure
from residua.lab.cost.predict import Cost as Cost
from residua.lab.cost.predict import predict as predict
