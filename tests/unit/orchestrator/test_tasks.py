"""The stream of tasks: a function of the seed and the position alone."""

from __future__ import annotations

from collections import Counter

from orchestrator.tasks import TaskStream, request_seed
from services.config.orchestrator import EnvConfig
from tests.rollouts import ScriptedEnvironment


def stream(*sizes: int, weights: tuple[float, ...] = (), seed: int = 1) -> TaskStream:
    weights = weights or (1.0,) * len(sizes)
    environments = [
        (ScriptedEnvironment(lambda _: None, num_tasks=size), EnvConfig(type=f"env{which}", weight=weight))
        for which, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return TaskStream(environments, seed)


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
