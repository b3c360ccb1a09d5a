"""Where a rank stands in its group: the axes data, context (cp) and expert (ep), and the process groups they need.

Legend: rank = data_rank * cp + cp_rank; the same ranks regrouped: rank = replica * ep + ep_rank.

Notable:
- Parameters are sharded over all ranks of the group, data and context axes together; experts of a mixture over the
  ranks that hold the same experts. So every element of every parameter lives on exactly one rank.
- CP ranks of one data rank work on the same packed row, each on its own stretch of it.
- A single process without a process group is the mesh of one rank: no group, nothing sharded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from services.wire.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """One rank's place."""

    rank: int = 0
    size: int = 1
    cp: int = 1
    ep: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shard_mesh: DeviceMesh | None = None
    """[size]: what all parameters but divided experts are sharded over"""
    expert_mesh: DeviceMesh | None = None
    """[size / ep]: ranks with the same experts; None where ep = 1"""
    cp_group: dist.ProcessGroup | None = None
    """the ranks of this data rank; None where cp = 1"""
    ep_group: dist.ProcessGroup | None = None
    """ranks that hold all experts together; None where ep = 1"""

    @staticmethod
    def join(*, cp: int, ep: int, device: torch.device) -> Mesh:
        """Make the groups of this layout; every rank of the default process group calls it.

        Raises:
            ConfigError: when cp or ep does not divide the number of ranks.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        for name, degree in (("cp", cp), ("ep", ep)):
            if size % degree:
                raise ConfigError([f"model.{name}: {degree} does not divide the group's {size} ranks"])
        shard_mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
        cp_group = ep_group = expert_mesh = None
        if cp > 1:
            cp_group = init_device_mesh(device.type, (size // cp, cp), mesh_dim_names=("data", "cp")).get_group("cp")
        if ep > 1:
            expert = init_device_mesh(device.type, (size // ep, ep), mesh_dim_names=("replica", "ep"))
            expert_mesh, ep_group = expert["replica"], expert.get_group("ep")
        return Mesh(rank, size, cp, ep, device, shard_mesh, expert_mesh, cp_group, ep_group)

    @property
    def data_rank(self) -> int:
        """Which grid item is this rank's."""
        return self.rank // self.cp

    @property
    def num_data_ranks(self) -> int:
        """Grid items of a step."""
        return self.size // self.cp

    @property
    def cp_rank(self) -> int:
        """Which stretch of its data rank's rows is this rank's."""
        return self.rank % self.cp

    @property
    def ep_rank(self) -> int:
        """Which experts are this rank's."""
        return self.rank % self.ep

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of this rank besides the default one."""
        expert_group = None if self.expert_mesh is None else self.expert_mesh.get_group()
        return [group for group in (self.cp_group, self.ep_group, expert_group) if group is not None]
