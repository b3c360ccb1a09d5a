"""What the two classification losses share: cross-entropy at the loss tokens, and how the head does as a classifier.

Legend: T tokens, N loss tokens, K points.

Notable:
- Loss tokens are taken out before any arithmetic: NaN elsewhere reaches neither loss nor gradient. NaN at a loss token
  does reach the loss, so that the trainer refuses the step.
- The gradient at a token is softmax - p, bounded whatever the error: nothing is clipped, and there is no value clip.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from value_service.losses.mse import Sums, check_denominator
from value_service.losses.support import Support


def expected_values(logits: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """V = softmax(z) . points.

    Args:
        logits: [..., K].
        points: [K].

    Returns:
        [...] in at least f32.
    """
    return logits.to(points.dtype).softmax(-1) @ points


def categorical_loss(
    logits: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    targets: Callable[[torch.Tensor], torch.Tensor],
    *,
    support: Support,
    denominator: float,
) -> tuple[torch.Tensor, Sums]:
    """L = (1/N) sum_t -sum_i p_ti log softmax(z_t)_i.

    Args:
        logits: [T, K]; carries the gradient.
        returns: [T] targets.
        loss_mask: [T] bool or 0/1.
        targets: From returns [N] to distributions [N, K].
        support: The points.
        denominator: N, loss tokens of the whole optimizer step over all ranks.

    Returns:
        (loss, sums): f32 scalar (f64 for f64 logits); f64 sums `tokens`, `loss_sum`, `error_sum` (of V - y),
        `accurate` (tokens whose largest logit is the target's largest weight), `entropy_sum` and `confidence_sum` (of
        the head's own distribution), `out_of_range` (targets that were clamped).

    Raises:
        ValueError: shapes that do not fit, or a denominator that is not positive and finite.
    """
    check_denominator(denominator)
    if returns.shape != loss_mask.shape or logits.shape != (*loss_mask.shape, support.num_points):
        raise ValueError(
            f"logits {tuple(logits.shape)} and returns {tuple(returns.shape)} do not fit loss_mask "
            f"{tuple(loss_mask.shape)} and {support.num_points} points"
        )
    mask = loss_mask.bool()
    logits = logits[mask]  # [N, K]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    returns = returns.detach()[mask]
    target = targets(returns).to(logits.dtype)
    logprobs = logits.log_softmax(-1)
    loss_sum = -(target * logprobs).sum()
    with torch.no_grad():
        probs = logprobs.double().exp()
        points = torch.from_numpy(support.points).to(probs.device)
        sums = {
            "tokens": mask.sum(dtype=torch.float64),
            "loss_sum": loss_sum.detach().double(),
            "error_sum": (probs @ points - returns.double()).sum(),
            "accurate": (logits.argmax(-1) == target.argmax(-1)).sum(dtype=torch.float64),
            "entropy_sum": -(probs * logprobs.double()).sum(),
            "confidence_sum": probs.max(-1).values.sum() if len(probs) else probs.sum(),
            "out_of_range": support.num_out_of_range(returns),
        }
    return loss_sum / denominator, sums
