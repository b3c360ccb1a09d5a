"""The clock: rollouts start only while they can be fresh, and never wait for what waits for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.loop import Clock
from services.config.schema import Config


def clock_of(*, max_steps=5, batch_size=4, max_off_policy_steps=1, critic_only_steps=0) -> Clock:
    return Clock(
        Config.model_validate(
            {
                "model": {"path": "tiny:add"},
                "algorithm": {"type": "sao"},
                "env": [{"type": "add"}],
                "value": {"warmup": {"critic_only_steps": critic_only_steps}},
                "orchestrator": {
                    "max_steps": max_steps,
                    "batch_size": batch_size,
                    "max_off_policy_steps": max_off_policy_steps,
                },
            }
        )
    )


def test_on_policy_never_starts_what_the_next_batch_would_take() -> None:
    clock = clock_of(max_off_policy_steps=0)
    assert clock.may_start(3, 0) and not clock.may_start(4, 0)
    clock.num_taken = 4
    assert not clock.may_start(0, 0)
    clock.step, clock.num_taken = 1, 0
    assert not clock.may_start(0, 0) and clock.may_start(0, 1)


def test_one_step_off_policy_runs_one_batch_ahead() -> None:
    clock = clock_of(max_off_policy_steps=1)
    assert clock.may_start(7, 0) and not clock.may_start(8, 0)


def test_nothing_starts_that_no_step_would_take() -> None:
    clock = clock_of(max_steps=2, max_off_policy_steps=100)
    assert clock.may_start(7, 0) and not clock.may_start(8, 0)
    clock.step = 2
    assert not clock.may_start(0, 2)


def test_critic_only_steps_train_no_version() -> None:
    clock = clock_of(critic_only_steps=3, max_off_policy_steps=0)
    assert [clock.version_at(step) for step in range(6)] == [0, 0, 0, 0, 1, 2]
    assert clock.may_start(4 * 3 + 3, 0) and not clock.may_start(4 * 4, 0)


@dataclass
class Simulation:
    """The loop and the producer as sets of numbers: groups in flight, groups ready, versions that arrive late."""

    clock: Clock
    group_size: int
    batch_size: int
    max_steps: int
    engine_version: int = 0
    published: int = 0
    in_flight: list[int] = field(default_factory=list)
    """version at the start of each running group"""
    ready: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return self.group_size * (len(self.in_flight) + len(self.ready))

    def start_all(self) -> None:
        while self.clock.may_start(self.num_pending, self.engine_version):
            self.in_flight.append(self.engine_version)

    def take(self) -> None:
        """The loop takes a finished group; a full batch trains and the next version is published."""
        version = self.clock.version_at(self.clock.step)
        self.staleness.append(version - self.ready.pop(0))
        self.clock.num_taken += self.group_size
        if self.clock.num_taken >= self.batch_size:
            self.published = self.clock.version_at(self.clock.step + 1)
            self.clock.step, self.clock.num_taken = self.clock.step + 1, 0

    def end_group(self, which: int, *, valid: bool) -> None:
        version = self.in_flight.pop(which)
        if valid:
            self.ready.append(version)


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    max_steps=st.integers(1, 6),
    group_size=st.integers(1, 3),
    groups_per_batch=st.integers(1, 4),
    limit=st.integers(0, 3),
    critic_only_steps=st.integers(0, 3),
    in_order=st.booleans(),
)
def test_a_run_ends_whatever_arrives_when_and_in_order_nothing_is_stale(
    data, max_steps: int, group_size: int, groups_per_batch: int, limit: int, critic_only_steps: int, in_order: bool
) -> None:
    """Groups end in any order or are invalid, versions arrive late. Result: every step is trained; where groups end in
    order, every trace is within the limit, so nothing is dropped as stale."""
    batch_size = group_size * groups_per_batch
    clock = clock_of(
        max_steps=max_steps,
        batch_size=batch_size,
        max_off_policy_steps=limit,
        critic_only_steps=critic_only_steps,
    )
    run = Simulation(clock, group_size, batch_size, max_steps)
    num_invalid = 0
    for _ in range(10_000):
        run.start_all()
        if clock.step == max_steps:
            break
        moves = [name for name, possible in (("end", run.in_flight), ("take", run.ready)) if possible]
        if run.engine_version < run.published:
            moves.append("update")
        assert moves, f"nothing can happen any more: {run}"
        move = data.draw(st.sampled_from(moves))
        if move == "update":
            run.engine_version += 1
        elif move == "take":
            run.take()
        else:
            which = 0 if in_order else data.draw(st.integers(0, len(run.in_flight) - 1))
            valid = num_invalid >= 10 or data.draw(st.integers(0, 4)) > 0
            num_invalid += not valid
            run.end_group(which, valid=valid)
    assert clock.step == max_steps and run.published == clock.version_at(max_steps)
    assert min(run.staleness) >= 0
    if in_order:
        assert max(run.staleness) <= limit


@given(step=st.integers(0, 20), limit=st.integers(0, 4), critic_only_steps=st.integers(0, 5))
def test_with_everything_consumed_and_published_a_start_is_always_allowed_until_the_last_step(
    step: int, limit: int, critic_only_steps: int
) -> None:
    clock = clock_of(max_steps=10, max_off_policy_steps=limit, critic_only_steps=critic_only_steps)
    clock.step = step
    assert clock.may_start(0, clock.version_at(step)) == (step < 10)
