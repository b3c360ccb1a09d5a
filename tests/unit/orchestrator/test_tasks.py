"""The stream of tasks: a function of the seed and the position alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from orchestrator.algorithms import build
from orchestrator.algorithms.spo import Spo, Tracker
from orchestrator.tasks import TaskStream, prompt_id_of, request_seed
from services.config.algorithm import SpoConfig
from services.config.orchestrator import EnvConfig
from services.config.validate import ALGORITHMS
from tests.rollouts import ScriptedEnvironment


def stream(
    *sizes: int,
    weights: tuple[float, ...] = (),
    seed: int = 1,
    prompt_weight: Callable[[str], float] | None = None,
) -> TaskStream:
    weights = weights or (1.0,) * len(sizes)
    environments = [
        (ScriptedEnvironment(lambda _: None, num_tasks=size), EnvConfig(type=f"env{which}", weight=weight))
        for which, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return TaskStream(environments, seed, prompt_weight)


def drawn(tasks: TaskStream, num: int) -> list[tuple[str, int]]:
    return [(task.config.type, task.index) for task in (tasks.next() for _ in range(num))]


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    assert drawn(stream(7, 5), 50) == drawn(stream(7, 5), 50)
    assert drawn(stream(7, 5), 50) != drawn(stream(7, 5, seed=2), 50)


def test_an_epoch_holds_every_task_once_and_the_next_is_in_another_order() -> None:
    tasks = [index for _, index in drawn(stream(20), 60)]
    epochs = [tasks[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_data_never_runs_out() -> None:
    """T09: five tasks and a batch that does not divide them."""
    assert len(drawn(stream(5), 1003)) == 1003
    assert drawn(stream(1), 3) == [("env0", 0)] * 3


def test_environments_come_by_weight_each_in_epochs_of_its_own() -> None:
    tasks = drawn(stream(10, 10, weights=(3.0, 1.0)), 4000)
    counts = Counter(env for env, _ in tasks)
    assert 0.7 < counts["env0"] / 4000 < 0.8
    for env in ("env0", "env1"):
        own = [index for name, index in tasks if name == env]
        assert all(sorted(own[start : start + 10]) == list(range(10)) for start in range(0, len(own) - 10, 10))


def test_positions_count_up_and_tasks_have_names() -> None:
    tasks = stream(3)
    taken = [tasks.next() for _ in range(5)]
    assert [task.group for task in taken] == [0, 1, 2, 3, 4]
    assert taken[0].task_id == f"scripted/{taken[0].index}"


def test_request_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    seeds = {request_seed(run, group, sample) for run in range(3) for group in range(20) for sample in range(8)}
    assert len(seeds) == 3 * 20 * 8
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(1, 23) != request_seed(12, 3)
    assert request_seed(0, 5, 2, 1) == request_seed(0, 5, 2, 1)


# ---- where a run was


@pytest.mark.parametrize("num", [0, 1, 7, 20, 21, 173])
def test_a_restored_stream_goes_on_with_the_same_tasks(num: int) -> None:
    tasks = stream(7, 5, 1, weights=(3.0, 1.0, 0.5))
    drawn(tasks, num)
    state = tasks.state_dict()
    assert state == {"position": num}
    rest = drawn(tasks, 100)
    restored = stream(7, 5, 1, weights=(3.0, 1.0, 0.5))
    drawn(restored, 13)
    restored.load_state_dict(state)
    assert restored.next().group == num
    assert drawn(restored, 99) == rest[1:]


def test_the_order_without_weights_of_prompts_is_the_one_that_runs_have_always_had() -> None:
    """Taken from the code before prompts could have weights."""
    tasks = drawn(stream(4, 3, weights=(2.0, 1.0), seed=11), 12)
    assert [env for env, _ in tasks] == ["env0"] * 5 + ["env1", "env0", "env0", "env1", "env0", "env0", "env0"]
    assert [index for _, index in tasks] == [0, 3, 1, 2, 0, 2, 2, 1, 1, 3, 0, 1]


# ---- prompts by weight (SPO)


def trained_spo(values: list[float]) -> Spo:
    """SPO whose trackers hold these values; a prompt without one is new."""
    algorithm = build(SpoConfig(type="spo"))
    assert isinstance(algorithm, Spo)
    trackers = {prompt_id_of("env0", f"scripted/{i}"): [8 * v, 8 * (1 - v), 0] for i, v in enumerate(values)}
    algorithm.load_state_dict({"trackers": trackers})
    return algorithm


def test_prompts_come_as_often_as_they_have_something_left_to_teach() -> None:
    """20,000 draws of five prompts, the last one new; each count within four standard deviations of its share."""
    values = [0.02, 0.5, 0.9, 0.999]
    algorithm = trained_spo(values)
    weights = np.array([math.sqrt(v * (1 - v)) + 0.05 for v in [*values, 0.5]])
    assert weights.round(4).tolist() == [0.19, 0.55, 0.35, 0.0816, 0.55]
    shares, num = weights / weights.sum(), 20_000
    counts = Counter(index for _, index in drawn(stream(5, prompt_weight=algorithm.prompt_weight()), num))
    for index, share in enumerate(shares):
        assert abs(counts[index] - num * share) < 4 * math.sqrt(num * share * (1 - share)), index
    assert len(algorithm.state_dict()["trackers"]) == 4, "asking makes no tracker"


def test_a_weighted_draw_is_a_function_of_seed_position_and_trackers() -> None:
    values = [0.02, 0.5, 0.9]
    tasks = stream(6, 4, prompt_weight=trained_spo(values).prompt_weight())
    first, state = drawn(tasks, 40), tasks.state_dict()
    rest = drawn(tasks, 40)
    restored = stream(6, 4, prompt_weight=trained_spo(values).prompt_weight())
    restored.load_state_dict(state)
    assert drawn(restored, 40) == rest
    assert first + rest == drawn(stream(6, 4, prompt_weight=trained_spo(values).prompt_weight()), 80)
    assert first + rest != drawn(stream(6, 4, prompt_weight=trained_spo(values[::-1]).prompt_weight()), 80)
    assert first + rest != drawn(stream(6, 4, seed=2, prompt_weight=trained_spo(values).prompt_weight()), 80)


def test_what_a_tracker_learns_moves_the_very_next_draw() -> None:
    """A prompt that is no longer in doubt becomes rare; its weight falls from 0.55 to little more than 0.05."""
    algorithm = trained_spo([0.5, 0.5])
    tasks = stream(2, prompt_weight=algorithm.prompt_weight())
    before = Counter(index for _, index in drawn(tasks, 2000))
    sure = Tracker(8e6, 1.0, 0)
    algorithm.load_state_dict({"trackers": {"env0:scripted/0": [sure.hits, sure.misses, 0]}})
    after = Counter(index for _, index in drawn(tasks, 2000))
    assert 900 < before[0] < 1100 and 100 < after[0] < 240  # 1000 and 2000 * 0.0504 / 0.6004 = 168


def test_environments_keep_their_shares_when_prompts_have_weights() -> None:
    plain = stream(10, 10, weights=(3.0, 1.0))
    weighted = stream(10, 10, weights=(3.0, 1.0), prompt_weight=trained_spo([0.999] * 10).prompt_weight())
    assert [env for env, _ in drawn(plain, 500)] == [env for env, _ in drawn(weighted, 500)]


def test_other_algorithms_weigh_no_prompts() -> None:
    weighing = [name for name, config in ALGORITHMS.items() if build(config(type=name)).prompt_weight()]
    assert weighing == ["spo"]


def test_a_task_that_was_described_comes_again_whatever_prompts_weigh_by_then() -> None:
    """Drawing anew at the same position would take another prompt once weights have moved."""
    weights = {"now": 0.2}
    tasks = stream(50, 7, prompt_weight=lambda _: weights["now"])
    first = [tasks.next() for _ in range(20)]
    described = [tasks.describe(task) for task in first]
    weights["now"] = 0.9
    other = stream(50, 7, prompt_weight=lambda prompt: 0.9 if prompt.endswith("1") else 0.1)
    again = [other.again(numbers) for numbers in described]
    assert [(t.group, t.config.type, t.index) for t in again] == [(t.group, t.config.type, t.index) for t in first]
    assert [(t.config.type, t.index) for t in again] != drawn(other, 20)


@pytest.mark.parametrize("described", [[3, 2, 0], [3, -1, 0], [3, 0, 7], [3, 1, -1]])
def test_a_task_of_other_environments_is_refused(described: list[int]) -> None:
    with pytest.raises(ValueError, match="which is not there"):
        stream(7, 5).again(described)
