"""Ray's router for our replicas: asks `Affinity`, with what Ray knows of each replica's requests.

Ray sends this module to every process that has a handle by its value, so that it must hold no state of its own.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .affinity import Affinity, Fleet, Prefix


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """One in each process that holds a handle. A request's first argument is its `Prefix`."""

    def initialize_state(self, spare: int = 4) -> None:
        """`spare` of `Affinity`."""
        self._affinity = Affinity(spare)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray tells which replicas there are."""
        super().update_replicas(replicas)
        self._changed()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Ray found one dead, before it tells which are left."""
        super().on_replica_actor_died(replica_id)
        self._changed()

    def _changed(self) -> None:
        Fleet.running = frozenset(replica_id.unique_id for replica_id in self.curr_replicas)
        self._affinity.keep(Fleet.running)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best first; Ray takes the next where one is full."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in by_name.items()}
        return [[by_name[name]] for name in self._affinity.rank(_prefix_of(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """It was sent there."""
        self._affinity.note(_prefix_of(pending_request), replica_id.unique_id)


def _prefix_of(request: PendingRequest | None) -> Prefix:
    first = request.args[0] if request is not None and request.args else None
    return first if isinstance(first, Prefix) else Prefix()
