"""One backend, with the budgets, the pace and the observer that all of its pools share."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox_server.backends.base import Backend
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet.supervision.creation_budget import CreationBudget
from sandbox_server.pool.fleet.supervision.grant_pace import GrantPace
from sandbox_server.pool.fleet.supervision.observer import BackendObserver
from sandbox_server.pool.fleet.supervision.reset_budget import ResetBudget


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendAccess:
    """One backend, with the objects that its pools share."""

    backend: Backend
    budget: CreationBudget
    resets: ResetBudget
    pace: GrantPace
    observer: BackendObserver


def access_backend(backend: Backend, dependencies: PoolDependencies) -> BackendAccess:
    """Make the objects that the pools of one backend share. The creation budget follows the backend's traits where the service's limits say nothing else."""
    limits, traits, clock, timers = dependencies.limits, backend.traits, dependencies.clock, dependencies.timers
    at_once = traits.creations_at_once if limits.creations_at_once is None else limits.creations_at_once
    per_s = traits.creations_per_s if limits.creations_per_s is None else limits.creations_per_s
    budget = CreationBudget(backend.name, at_once=at_once, per_s=per_s, clock=clock, timers=timers)
    resets = ResetBudget(traits.resets_at_once, clock, timers)
    pace = GrantPace(traits.acquires_at_once, timers)
    return BackendAccess(backend=backend, budget=budget, resets=resets, pace=pace, observer=BackendObserver(backend, clock, timers))
