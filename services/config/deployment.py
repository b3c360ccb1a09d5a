"""`[deployment]`: which processes run on how many GPUs of how many nodes.

Notable:
- Sizes only: which GPU of which node a role gets is worked out by the planner, which `counterpoint plan` shows.
- Three places for a critic: beside the policy (`num_value_gpus`), on nodes of its own (`num_value_nodes`), or with a
  share of every train node (`num_value_gpus_per_train_node`). One of them is given; none means `num_value_gpus = 1`.
- With `sharing` the critic has the policy's GPUs, whatever their number.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.config.base import Section


class DeploymentConfig(Section):
    """`[deployment]`: how many GPUs each role has, and where; on CPU a "gpu" is a rank."""

    kind: Literal["local", "slurm"] = "local"
    """"local" starts everything on this machine; "slurm" submits a job of as many nodes as the roles need."""
    sharing: Literal["none", "time", "time_train"] = "none"
    """Who takes turns on the same GPUs: nobody; critic, policy and inference ("time"); critic and policy, with
    inference on its own ("time_train")."""
    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs of every node of a job; what a whole node of the critic has. With `kind = "local"` the machine is asked."""
    num_train_nodes: int = Field(default=1, ge=1)
    """Nodes that the policy spans, the same number of its GPUs on each."""
    num_policy_gpus: int = Field(default=1, ge=1)
    """The policy's GPUs on all train nodes together."""
    num_value_gpus: int | None = Field(default=None, ge=1)
    """The critic's GPUs beside the policy's on the first train node. None = 1, or what another key says of it."""
    num_value_nodes: int = Field(default=0, ge=0)
    """Whole nodes of the critic's own, all their GPUs; 0 = it is on the train nodes."""
    num_value_gpus_per_train_node: int = Field(default=0, ge=0)
    """The critic's GPUs on every train node, beside the policy's: one torchrun group each; 0 = not so."""
    num_inference_gpus: int = Field(default=1, ge=1)
    """GPUs of all inference engines together, `inference.tp` each."""
    num_inference_nodes: int = Field(default=0, ge=0)
    """Nodes of inference's own, the same number of its GPUs on each; 0 = it is on the first train node."""
    max_restarts: int = Field(default=0, ge=0)
    """After the loss of a process (exit code 69) the run goes on from its newest commit by itself, so often at most."""
    device: Literal["cpu", "cuda"] = "cpu"
    """"cpu" computes on one core a rank; "cuda" on one GPU a rank, with gradients summed by NCCL."""

    @property
    def num_critic_gpus(self) -> int:
        """GPUs of a critic in all, whichever key says so; that there is a critic is for who asks to know."""
        if self.sharing != "none":
            return self.num_policy_gpus
        if self.num_value_nodes:
            return self.num_value_nodes * self.gpus_per_node
        if self.num_value_gpus_per_train_node:
            return self.num_value_gpus_per_train_node * self.num_train_nodes
        return 1 if self.num_value_gpus is None else self.num_value_gpus

    @property
    def num_critic_nodes(self) -> int:
        """Nodes that a critic spans."""
        if self.num_value_nodes and self.sharing == "none":
            return self.num_value_nodes
        is_spread = self.sharing != "none" or self.num_value_gpus_per_train_node > 0
        return self.num_train_nodes if is_spread else 1
