"""Which design for which model: ranked, each with its reason, its cost and where the evidence comes from.

advise(situation)       an answer: ranked designs, what was ruled out, the paper's recommendation beside our
                        measurements, and what nobody has measured
"""

from residua.lab.advise.rank import Advice as Advice
from residua.lab.advise.rank import Answer as Answer
from residua.lab.advise.rank import advise as advise
from residua.lab.advise.situation import Situation as Situation
