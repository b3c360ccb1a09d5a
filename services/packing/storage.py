"""How many bytes a model takes on disk: a role's part of a commit, a snapshot of the policy's weights.

Notable:
- A commit holds every parameter and, of what trains, AdamW's two moments, all in f32, whatever computes.
- A snapshot holds the whole policy in f32, adapters added in; with `lora.publish = "adapter"` the adapters alone.
- Measured: a commit of the 0.43 M model takes 5.13 MB a role (12 bytes a parameter), a snapshot 1.71 MB.
"""

from __future__ import annotations

from services.config.train import PolicyConfig, ValueConfig
from services.packing.memory import F32, held_parameters
from services.packing.shapes import ModelShapes

NUM_MOMENTS = 2


def commit_bytes(model: ModelShapes, role: PolicyConfig | ValueConfig) -> int:
    """What one commit of a role takes, all ranks together.

    Args:
        model: What `model_shapes` knows of it.
        role: `[policy]` or `[value]`.
    """
    held = held_parameters(model, role)
    return F32 * sum(parameter.size * (1 + (NUM_MOMENTS if trains else 0)) for parameter, trains in held)


def snapshot_bytes(model: ModelShapes, policy: PolicyConfig) -> int:
    """What one version of the policy's weights takes, as the engine reads it."""
    if policy.lora is not None and policy.lora.publish == "adapter":
        return F32 * sum(parameter.size for parameter, trains in held_parameters(model, policy) if trains)
    return F32 * sum(parameter.size for parameter in model.parameters)
