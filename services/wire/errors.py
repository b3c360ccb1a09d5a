"""Every error Counterpoint raises on purpose, with the exit code its process ends with.

    CounterpointError                70  a bug, or a contract broken inside the run
    |-- UsageError                   64  the command line is wrong
    |-- ConfigError                  78  the configuration is wrong; carries every problem at once
    |-- DependencyLost               69  another process or a peer is gone or does not answer
    |   |-- DeadlineExceeded             a named wait ran past its deadline
    |   `-- PeerLost                     a process of the same group vanished
    |-- ContractError                70  bytes or replies that break the wire contract
    |   |-- CodecError                   bytes that do not decode
    |   |-- ScoreContractError           a scoring reply that does not fit its request
    |   |-- GridConflict                 the same grid item twice with different content
    |   `-- PreflightError               ranks of one group disagree about the step
    |-- BadData                      70  too large a share of rollouts was invalid
    |-- AlarmRaised                  70  the run's numbers say that something is wrong with it
    |-- NonFiniteError               70  a non-finite number where none may pass
    |-- CommitError                  70  a commit that is asked for is not there, or cannot be read
    |   `-- DamagedCommit                one of its files is missing or differs
    `-- CannotWrite                  73  a file cannot be written

Notable:
- `except` belongs at three places only: transport retry, process boundary, fault tests. The process boundary
  (`services.runtime.lifecycle`) turns these classes into exit codes.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_USAGE = 64
EXIT_DEPENDENCY_LOST = 69
EXIT_BUG = 70
EXIT_CANNOT_WRITE = 73
EXIT_PREEMPTED = 75
EXIT_CONFIG = 78


class CounterpointError(Exception):
    """Root of the tree above; `exit_code` is what the raising process ends with."""

    exit_code = EXIT_BUG


class UsageError(CounterpointError):
    """The command line cannot be understood."""

    exit_code = EXIT_USAGE


class ConfigError(CounterpointError):
    """The configuration cannot be run; `problems` lists one printable line per problem."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DependencyLost(CounterpointError):
    """A process this one depends on is gone or does not answer."""

    exit_code = EXIT_DEPENDENCY_LOST


class DeadlineExceeded(DependencyLost):
    """A named wait ran past its deadline."""

    def __init__(self, what: str, deadline_s: float) -> None:
        self.what = what
        self.deadline_s = deadline_s
        super().__init__(f"waited {deadline_s:g} s for {what}")


class PeerLost(DependencyLost):
    """A process of the same group vanished."""


class ContractError(CounterpointError):
    """Bytes or replies that break the wire contract."""


class CodecError(ContractError):
    """Bytes that do not decode to a valid message."""


class ScoreContractError(ContractError):
    """A scoring reply that does not fit its request."""


class GridConflict(ContractError):
    """The same (epoch, stream, step, rank) arrived with different content."""


class PreflightError(ContractError):
    """Ranks of one group disagree about the step they are about to take."""


class BadData(CounterpointError):
    """More rollouts were invalid than the configuration allows."""


class AlarmRaised(CounterpointError):
    """The run's numbers say that something is wrong, and the configuration says to end it then."""


class NonFiniteError(CounterpointError):
    """A non-finite number appeared where none may pass."""


class CommitError(CounterpointError):
    """A commit that was asked for is not there, or this version cannot read it."""


class DamagedCommit(CommitError):
    """A commit was made, but one of its files is missing or differs; the message begins with that file."""


class CannotWrite(CounterpointError):
    """A file that the run needs cannot be written."""

    exit_code = EXIT_CANNOT_WRITE
