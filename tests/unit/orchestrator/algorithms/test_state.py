"""What algorithms remember between batches."""

from __future__ import annotations

import json
from itertools import chain

import pytest

from orchestrator.algorithms import build
from services.config.validate import ALGORITHMS
from tests.samples import make_sample

STATEFUL = {"running_mean", "spo"}


def groups():
    return [
        [make_sample([1], reward=r, values=[0.5], trace_id=f"{g}-{i}", group_id=str(g)) for i, r in enumerate(rewards)]
        for g, rewards in enumerate([(1.0, 0.0), (0.0, 0.0), (1.0, 1.0)])
    ]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_restored_algorithm_credits_alike(name):
    """Two batches; the second by the same object and by a new one with the state of the first, through JSON."""
    algorithm, restored = (build(ALGORITHMS[name](type=name)) for _ in range(2))
    algorithm.credit(groups())
    state = json.loads(json.dumps(algorithm.state_dict()))
    assert bool(state) == (name in STATEFUL)
    restored.load_state_dict(state)
    ours, theirs = groups(), groups()
    assert algorithm.credit(ours) == restored.credit(theirs)
    for a, b in zip(chain(*ours), chain(*theirs), strict=True):
        assert a.advantages.tobytes() == b.advantages.tobytes()
    assert algorithm.state_dict() == restored.state_dict()


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - STATEFUL))
def test_an_algorithm_without_memory_refuses_one(name):
    with pytest.raises(ValueError, match="keeps no state, but was given global"):
        build(ALGORITHMS[name](type=name)).load_state_dict({"global": []})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_the_fields_of_credit_change(name):
    batch = groups()
    branches = [sample.branch for group in batch for sample in group]
    before = [(b.token_ids.tobytes(), b.action_mask.tobytes(), b.loss_mask.tobytes()) for b in branches]
    build(ALGORITHMS[name](type=name)).credit(batch)
    assert before == [(b.token_ids.tobytes(), b.action_mask.tobytes(), b.loss_mask.tobytes()) for b in branches]
    assert all(sample.values.tolist() == [0.0, 0.5] for group in batch for sample in group)
