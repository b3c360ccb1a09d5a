"""`[inference]`: the engine that samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.config.base import Section


class InferenceConfig(Section):
    """Which engine, and its limits."""

    engine: Literal["local", "vllm"] = "local"
    """"local" = our small server (CPU, no extra install); "vllm" = vLLM's own server with our worker extension."""
    tp: int = Field(default=1, ge=1)
    """GPUs that one engine shares a model over (tensor parallelism of vLLM). Engines are
    `deployment.num_inference_gpus` / tp; with several a router is in front of them."""
    max_model_len: int = Field(default=512, ge=8)
    """Longest sequence, prompt and answer together."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences decoded together."""
    clear_cache_on_update: bool = True
    """Recompute the KV cache of running requests under new weights, so that each span's log-probabilities are those of
    its own snapshot. False continues on the old cache (PipelineRL style)."""
    port: int = Field(default=0, ge=0, le=65535)
    """HTTP port on loopback; 0 = the planner picks one."""
    vllm_python: str = ".venv-vllm/bin/python"
    """Interpreter of the environment that holds vLLM."""
    vllm_args: list[str] = []
    """More arguments for vLLM's server."""
    update_deadline_s: float = Field(default=120.0, gt=0)
    """Deadline of one weight update: pause, load, resume."""
    probe_deadline_s: float = Field(default=30.0, gt=0)
    """With several engines: how long one may take to answer a probe, or sample for requests without a new token, before
    the router leaves it out. A busy engine answers late, so this is far above the time of an answer."""
