"""The bytes of recorded rollouts are a contract: a change here makes every older record unreadable."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from services.wire.rollout_files import decode_file, encode_file
from services.wire.rollouts import Group
from services.wire.samples import Branch, StopReason, Trace, TrainingSample, VersionSpan
from tests.groups import as_data

GOLDEN = Path(__file__).parent / "golden" / "rollouts.bin"


def golden_groups() -> list[Group]:
    """A scored trace of two turns with a step reward that was shaped; an unscored one of an older version."""
    mask = np.array([False, False, True, False, True])
    branch = Branch(
        token_ids=np.array([56, 48, 70000, 12, 4], dtype=np.uint32),
        action_mask=mask,
        loss_mask=np.array([False, False, True, False, False]),
        logprobs=np.array([0, 0, -0.5, 0, -1.25], dtype=np.float32),
        version_spans=[VersionSpan(2, 3, 11), VersionSpan(4, 5, 12)],
        step_rewards=np.array([0, 0, 0.5, 0, 0]),
    )
    shaped = Branch(
        branch.token_ids, mask, branch.loss_mask, branch.logprobs, branch.version_spans, np.array([0, 0, 0.25, 0, 0])
    )
    trace = Trace("7/0", "7", "guess", "guess 3", [branch], 1.0, StopReason.TERMINATED, 2, 0.125)
    sample = TrainingSample(
        "7/0",
        "7",
        shaped,
        0.5,
        StopReason.TERMINATED,
        values=np.array([0, 0.5, 0.75, -0.5, 0.125]),
        bootstrap_value=-0.25,
        critic_step=11,
        prompt_id="guess:guess 3",
    )
    plain = Branch(
        token_ids=np.array([3, 4], dtype=np.uint32),
        action_mask=np.array([False, True]),
        loss_mask=np.array([False, True]),
        logprobs=np.array([0, -3.0], dtype=np.float32),
        version_spans=[VersionSpan(1, 2, 10)],
    )
    older = Trace("6/1", "6", "add", "1+2=", [plain], 0.0, StopReason.TRUNCATED_LENGTH, 1, 2.5)
    unscored = TrainingSample("6/1", "6", plain, 0.0, StopReason.TRUNCATED_LENGTH, prompt_id="add:1+2=")
    return [Group([trace], [sample], 5), Group([older], [unscored], 6)]


def test_a_file_of_groups_encodes_to_the_golden_bytes() -> None:
    data = encode_file(golden_groups(), run_id="demo-1", epoch=3, step=12, policy_version=12)
    assert data == GOLDEN.read_bytes()


def test_the_golden_bytes_decode_to_the_groups() -> None:
    header, groups = decode_file(GOLDEN.read_bytes())
    assert (header.run_id, header.epoch, header.step, header.policy_version) == ("demo-1", 3, 12, 12)
    assert as_data(groups) == as_data(golden_groups())
