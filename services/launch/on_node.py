"""What only a node of a job knows about a process: which of its nodes this is, and which devices and interface it has.

Usage: `python -m services.launch.on_node --addresses A,B [--names N,M] [--gpus 0,1] -- argv...`

Notable:
- Started once on every node of a process by one step of the job (`srun`), with the same words everywhere.
- A torchrun agent of several nodes gets `--node-rank`: its place in `--addresses`, so rank 0 is where the plan says.
  An agent that waits for other processes first (`services.runtime.after`) gets it all the same.
- CUDA_VISIBLE_DEVICES is set after SLURM has set its own: `--gpus` counts the devices that SLURM left visible.
- gloo and NCCL are given the interface that has this node's address, unless the environment names one.
- It stays as the guard of what it starts: nothing of that outlives the step. The launcher speaks through standard
  input, a byte a signal; its end is the launcher's. SLURM's own signals reach every process of a step by themselves.
- Standard library only, and nothing heavy.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence

from services.runtime.after import split_wait
from services.runtime.auth import is_loopback
from services.runtime.guard import guard

TORCHRUN = ("-m", "torch.distributed.run")
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40  # struct ifreq on 64-bit Linux: a name of 16 bytes, then a sockaddr_in
_MAX_INTERFACES = 128


def main(words: Sequence[str]) -> int:
    """Start the command of `words` under guard; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--addresses", required=True, help="of the process's nodes, in the plan's order")
    parser.add_argument("--names", default="", help="of the same nodes, as SLURM calls them")
    parser.add_argument("--gpus", default="", help="of the node's visible devices, by place; none hides all")
    parser.add_argument("argv", nargs="+", help="the command, after --")
    args = parser.parse_args(words)
    addresses, names, gpus = (_split(text) for text in (args.addresses, args.names, args.gpus))
    place = place_of(os.environ, names, len(addresses))
    os.environ.update(node_env(os.environ, addresses[place], gpus))
    death_fd = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # SLURM signals every process of a step itself; a second one would end a rank that still commits
    return guard(node_argv(args.argv, addresses, place), death_fd, forwarded=())


def place_of(env: Mapping[str, str], names: Sequence[str], num_nodes: int) -> int:
    """Which of a process's nodes this is.

    Args:
        env: What SLURM says to a task: SLURMD_NODENAME, and SLURM_NODEID, which counts in SLURM's own order.
        names: The nodes as SLURM calls them, in the plan's order; empty = SLURM's order is the plan's.
        num_nodes: How many there are.

    Raises:
        ValueError: It is none of them.
    """
    if names:
        here = env.get("SLURMD_NODENAME", names[0] if num_nodes == 1 else "")
        if here not in names:
            raise ValueError(f"this node is {here or 'not known'}, not one of {', '.join(names)}")
        return names.index(here)
    place = int(env.get("SLURM_NODEID", "0"))
    if place >= num_nodes:
        raise ValueError(f"node {place} of a process that has {num_nodes}")
    return place


def node_env(env: Mapping[str, str], address: str, gpus: Sequence[str]) -> dict[str, str]:
    """What the environment of the process gets on this node.

    Args:
        env: As SLURM made it.
        address: This node's.
        gpus: Places in the list of visible devices.

    Raises:
        ValueError: Fewer devices are visible than the plan needs.
    """
    visible = _split(env.get("CUDA_VISIBLE_DEVICES", ""))
    if gpus and visible and int(max(gpus, key=int)) >= len(visible):
        raise ValueError(f"GPUs {','.join(gpus)} are planned, but {len(visible)} are visible here")
    own = {"CUDA_VISIBLE_DEVICES": ",".join(visible[int(gpu)] if visible else gpu for gpu in gpus)}
    interface = interface_of(address)
    if interface is not None:
        own |= {name: interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if not env.get(name)}
    return own


def node_argv(argv: Sequence[str], addresses: Sequence[str], place: int) -> list[str]:
    """The command as this node runs it."""
    wait, command = split_wait(argv)
    if len(addresses) == 1 or tuple(command[1:3]) != TORCHRUN:
        return list(argv)
    return [*wait, *command[:3], "--node-rank", str(place), "--local-addr", addresses[place], *command[3:]]


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where none has. All of 127.0.0.0/8 is loopback's."""
    if is_loopback(address):
        return "lo"
    import array
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_INTERFACES))
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        num_bytes = struct.unpack("iL", fcntl.ioctl(asked.fileno(), _SIOCGIFCONF, request))[0]
    data = buffer.tobytes()[:num_bytes]
    for start in range(0, num_bytes, _IFREQ_BYTES):
        name = data[start : start + 16].split(b"\0", 1)[0].decode()
        if socket.inet_ntoa(data[start + 20 : start + 24]) == address:
            return name.partition(":")[0]  # an alias such as eth0:1
    return None


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
