"""A machine as it describes itself when it joins, and what is thought of its health."""

from enum import StrEnum

import msgspec

from perdure.vocab.ids import Incarnation, NodeId


class NodeCondition(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    IN_REPAIR = "in repair"
    QUALIFYING = "qualifying"
    PROBATION = "probation"
    RETIRED = "retired"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine, as its agent describes it. Its health is a `NodeCondition`, kept elsewhere."""

    id: NodeId
    incarnation: Incarnation
    """Of the agent: a node that comes back with another incarnation has lost its workers."""
    host: str
    """Host name."""
    address: str
    """IP address or name at which other nodes reach this one."""
    peer_port: int = 0
    """Port of the agent's own endpoint at `address`, on which peers ask whether it lives; 0: none."""
    slots: int
    """Workers that it runs."""
    version: str
    """Of Perdure."""
    world: str
    """Shape and command that the node was started for; all nodes of a job must agree (`JobSpec.world`)."""
    order: int = 0
    """Preferred position among the nodes (torchrun's node rank, or the index on this machine)."""
    standby: bool = False
    """Started as a spare: it becomes a member only when there is no other node to take."""
