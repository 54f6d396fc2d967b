"""SIGTERM, SIGUSR1 and Ctrl-C as one exception, and the exit codes that schedulers expect.

=========  ======================================================  =========
signal     who sends it                                            exit code
=========  ======================================================  =========
SIGINT     Ctrl-C                                                  130
SIGTERM    ``scancel``, ``kill``, a container's stop               143
SIGUSR1    SLURM's warning (``--signal=B:USR1@120``)               0
=========  ======================================================  =========
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 0}


class Interrupted(BaseException):
    """A signal arrived. Not an ``Exception``: nothing on the way up may take it for a failure."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signal.Signals(signum)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.signum]


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise ``Interrupted`` at the first of the signals; a second one ends the process at once."""

    def interrupt(signum, frame):
        for number in EXIT_CODES:
            signal.signal(number, signal.SIG_DFL)
        raise Interrupted(signum)

    before = {signum: signal.signal(signum, interrupt) for signum in EXIT_CODES}
    try:
        yield
    finally:
        for signum, handler in before.items():
            if signal.getsignal(signum) is interrupt:
                signal.signal(signum, handler)
