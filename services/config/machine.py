"""What this machine has: GPUs, and ports that can be listened on. Looked at, never changed."""

from __future__ import annotations

import glob
import os
import re
import socket


def num_gpus() -> int:
    """GPUs of this machine, or those that CUDA_VISIBLE_DEVICES leaves; counted without a CUDA library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)])


def can_bind(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now; tried, and let go."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
