"""Seeing a residual stream at work: what every site reads, how sharply, and what each source is worth."""

from residua.lab.diagnose.ablate import Ablation as Ablation
from residua.lab.diagnose.ablate import ablate_sources as ablate_sources
from residua.lab.diagnose.record import RoutingRecord as RoutingRecord
from residua.lab.diagnose.record import record_routing as record_routing
from residua.lab.diagnose.site import SiteRecord as SiteRecord
