"""Synthetic tasks: seeded data with exact answers, each with a hypothesis of which designs it sets apart.

    task = tasks.build("khop:hops=3")
    ids, targets, extra = task.batch(32, torch.Generator().manual_seed(0))
    tasks.accuracy(model(ids), targets)

`targets[:, t]` is what a model must say on having read `ids[:, :t + 1]`; -100 where nothing is asked. What a task
separates is a hypothesis until it is run, and "no difference" is an answer. The order of the imports is the order of
the tables and the docs.
"""

# ruff: noqa: I001 (sorting would lose the order)
from residua.tasks.task import Batch as Batch
from residua.tasks.task import Task as Task
from residua.tasks.registry import build as build
from residua.tasks.registry import get as get
from residua.tasks.registry import names as names
from residua.tasks.registry import register as register
from residua.tasks.score import accuracy as accuracy
from residua.tasks.mqar import MQAR as MQAR
from residua.tasks.khop import KHop as KHop
from residua.tasks.early_recall import EarlyRecall as EarlyRecall
from residua.tasks.route_switch import RouteSwitch as RouteSwitch
from residua.tasks.delim import Delim as Delim
from residua.tasks.parity import Parity as Parity
from residua.tasks.s3 import S3 as S3
from residua.tasks.overwrite import Overwrite as Overwrite
from residua.tasks.routing import RoutingScore as RoutingScore
from residua.tasks.routing import best_routing as best_routing
from residua.tasks.routing import routing_score as routing_score
