"""EarlyRows: the check of files before they are enqueued, and the first rows of a large one while it goes on.

Owns the promise that a file with a bad line leaves nothing enqueued. A file that takes long to check need not keep
idle workers waiting: once the check has gone on for a moment without finding fault, its first rows are enqueued; should
a bad line turn up later, the batch is withdrawn with all that was computed for it. Knows neither SQL nor lines.
Invariant: more than the first rows is never enqueued before every line was judged.
Source: docs/decisions/0007-first-rows-before-the-check-ends.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvq.worker.files import FileReport, InputFile
from kvq.worker.submission import Submission, jobs_of, open_batch, require_good

if TYPE_CHECKING:
    from kvq.worker.backlog import Backlog
    from kvq.worker.store import Store

# A check that ends in this time is waited for; longer ones are those of files of some 50,000 lines and more.
PATIENCE_S = 1.5


class EarlyRows:
    """The rows of one submission that were enqueued before the check of its files ended."""

    def __init__(
        self,
        store: Store,
        *,
        backlog: Backlog | None,
        on_open: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._backlog = backlog
        self._on_open = on_open
        self._clock = clock
        self.num_inserted = 0

    def check(
        self, sources: Sequence[InputFile], submissions: Sequence[Submission], *, skip_invalid: bool
    ) -> list[FileReport]:
        """Judge every line of every file; the first file's first rows may be enqueued meanwhile.

        Raises:
            FileUnreadable: a file cannot be read.
            FileInvalid: lines are bad and ``skip_invalid`` is not set. Nothing of what was enqueued here is left then.
        """
        checks = [source.begin_check() for source in sources]
        until_s = self._clock() + PATIENCE_S
        opened = None
        try:
            finished = all(check.run(until_s) for check in checks)  # up to the first that is not
            if not finished and all(check.flawless for check in checks):
                opened = self._open(sources[0].head(checks[0]), submissions[0])
            for check in checks:
                check.run()
            reports = [source.end_check(check) for source, check in zip(sources, checks, strict=True)]
            if not skip_invalid:
                require_good(*reports)
        except BaseException:
            if opened is not None:
                self._store.withdraw_batch(opened)
            raise
        return reports

    def _open(self, head: InputFile, submission: Submission) -> str | None:
        """Enqueue the rows of ``head``; the batch id, None where they have to wait."""
        jobs = list(jobs_of(head, submission))
        if self._backlog is not None and self._backlog.room() < len(jobs):
            return None
        if not open_batch(self._store, submission):
            return None  # submitted before, under the same key: withdrawing it would take more than came in here
        try:
            self.num_inserted = self._store.insert_jobs(
                jobs, batch_id=submission.batch_id, dedup_period_s=submission.dedup_period_s
            ).inserted
        except BaseException:
            self._store.withdraw_batch(submission.batch_id)
            raise
        if self._backlog is not None:
            self._backlog.took(self.num_inserted)
        self._on_open()
        return submission.batch_id
