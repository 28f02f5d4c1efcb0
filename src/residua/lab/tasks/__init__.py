"""Synthetic tasks: seeded data with exact answers, each with a hypothesis of which designs it sets apart.

    task = tasks.build("khop:hops=3")
    ids, targets, extra = task.batch(32, torch.Generator().manual_seed(0))
    tasks.accuracy(model(ids), targets)

`targets[:, t]` is what a model must say on having read `ids[:, :t + 1]`; -100 where nothing is asked. What a task
separates is a hypothesis until it is run, and "no difference" is an answer. The order of the imports is the order of
the tables and the docs.
"""

# ruff: noqa: I001 (sorting would lose the order)
from residua.lab.tasks.task import Batch as Batch
from residua.lab.tasks.task import Task as Task
from residua.lab.tasks.registry import build as build
from residua.lab.tasks.registry import get as get
from residua.lab.tasks.registry import names as names
from residua.lab.tasks.registry import register as register
from residua.lab.tasks.task import accuracy as accuracy
from residua.lab.tasks.mqar import MQAR as MQAR
from residua.lab.tasks.khop import KHop as KHop
from residua.lab.tasks.early_recall import EarlyRecall as EarlyRecall
from residua.lab.tasks.route_switch import RouteSwitch as RouteSwitch
from residua.lab.tasks.delim import Delim as Delim
from residua.lab.tasks.parity import Parity as Parity
from residua.lab.tasks.s3 import S3 as S3
from residua.lab.tasks.overwrite import Overwrite as Overwrite
from residua.lab.tasks.routing import RoutingScore as RoutingScore
from residua.lab.tasks.routing import best_routing as best_routing
from residua.lab.tasks.routing import routing_score as routing_score
