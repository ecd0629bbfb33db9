"""Ray Serve request router that ranks replicas with `Affinity` and the queue lengths that Ray knows.

Ray sends this module by value to every process that has a handle, so it must not hold any state of its own.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .affinity import Affinity, Fleet, Prefix


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Router of each process that holds a handle. The first argument of a request is its `Prefix`."""

    def initialize_state(self, spare: int = 4) -> None:
        """Set `spare` of `Affinity`."""
        self._affinity = Affinity(spare)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray with the current replicas."""
        super().update_replicas(replicas)
        self._changed()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray when a replica died, before it lists those that are left."""
        super().on_replica_actor_died(replica_id)
        self._changed()

    def _changed(self) -> None:
        Fleet.running = frozenset(replica_id.unique_id for replica_id in self.curr_replicas)
        self._affinity.keep(Fleet.running)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, best first; Ray takes the next one if one is full."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in by_name.items()}
        return [[by_name[name]] for name in self._affinity.rank(_prefix_of(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note the replica to which a request was sent."""
        self._affinity.note(_prefix_of(pending_request), replica_id.unique_id)


def _prefix_of(request: PendingRequest | None) -> Prefix:
    first = request.args[0] if request is not None and request.args else None
    return first if isinstance(first, Prefix) else Prefix()
