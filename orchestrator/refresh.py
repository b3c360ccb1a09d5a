"""Advantages from the critic that has just trained on the batch: `value.refresh = "refreshed"`.

Notable:
- One scoring request a group, as for the first scoring. The critic's targets stay those it was sent.
- Refreshed values have seen the batch's own outcomes: baselines that know the reward make advantages smaller, and
  biased. That is why "pre_update" is the default.
"""

from __future__ import annotations

import time

from orchestrator.algorithms import Algorithm
from orchestrator.producer import Group, score_groups
from services.transport.score_client import ScoreClient


async def refresh_advantages(
    groups: list[Group],
    algorithm: Algorithm,
    scorer: ScoreClient,
    *,
    deadline_s: float,
    one_at_a_time: bool = False,
) -> dict[str, float]:
    """Score a credited batch again and replace its advantages and policy masks.

    Args:
        groups: The batch; its values, bootstrap values and critic steps are replaced too.
        algorithm: Credits the batch again.
        scorer: Client of the value service.
        deadline_s: Deadline of one scoring request, retries included.
        one_at_a_time: Send a request when the one before it was answered. Slower, and nothing depends on timing.

    Returns:
        How long it took, and the mean absolute advantage the policy gets.
    """
    started = time.monotonic()
    for batch in [[group] for group in groups] if one_at_a_time else [groups]:
        await score_groups(batch, scorer, deadline_s=deadline_s)
    row = algorithm.credit_policy_again([group.samples for group in groups])
    refreshed = {"time/refresh_s": time.monotonic() - started}
    if "credit/advantage_abs_mean" in row:
        refreshed["credit/advantage_abs_mean_refreshed"] = row["credit/advantage_abs_mean"]
    return refreshed
