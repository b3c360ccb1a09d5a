"""The router's command line: the installed router takes it, and its own judgement of engines is off."""

from __future__ import annotations

from typing import Any

from vllm_router.launch_router import parse_router_args

from services.config.schema import Config
from services.inference.router_command import NEVER, NEVER_S, router_command
from services.inference.router_limits import max_body_bytes

CONFIG = Config.model_validate(
    {
        "model": {"path": "m"},
        "algorithm": {"type": "grpo"},
        "env": [{"type": "add"}],
        "inference": {"max_model_len": 4096, "probe_deadline_s": 12.5},
        "orchestrator": {"rollout_deadline_s": 100.5, "max_concurrent_rollouts": 300},
    }
)


def parsed() -> Any:
    argv = router_command(CONFIG, host="127.0.0.1", port=11111, metrics_port=11112, python="/venv/bin/python")
    assert argv[:3] == ["/venv/bin/python", "-m", "vllm_router.launch_router"]
    return parse_router_args(argv[3:])


def test_it_listens_on_the_two_ports_it_was_given_and_not_on_29000() -> None:
    args = parsed()
    assert (args.host, args.port, args.prometheus_host, args.prometheus_port) == (
        "127.0.0.1",
        11111,
        "127.0.0.1",
        11112,
    )


def test_it_begins_without_engines_and_judges_none() -> None:
    args = parsed()
    assert args.worker_urls == []
    assert args.disable_retries and args.disable_circuit_breaker
    assert args.health_failure_threshold == NEVER == 2**32 - 1
    assert args.health_check_interval_secs == NEVER_S
    assert args.policy == "round_robin"


def test_its_bounds_follow_from_the_runs_own() -> None:
    args = parsed()
    assert args.request_timeout_secs == 161  # after the caller's own 100.5 s
    assert args.health_check_timeout_secs == 13
    assert args.max_payload_size == max_body_bytes(4096) == 65536 + 12 * 4096
    assert args.queue_size == 300


def test_with_a_token_it_asks_the_guard_whether_a_callers_is_right_and_is_told_no_token() -> None:
    argv = router_command(
        CONFIG, host="127.0.0.1", port=1, metrics_port=2, python="python", guard_url="http://127.0.0.1:3"
    )
    assert argv[1:5] == ["-m", "services.inference.router_process", "--token-check-url", "http://127.0.0.1:3/token"]
    assert argv[5:] == router_command(CONFIG, host="127.0.0.1", port=1, metrics_port=2, python="python")[3:]
