"""Commits to a Delta table by runs that may be killed, repeated, or side by side.

A commit carries an application transaction, by which Delta refuses it beside another one of the
same id, and the name of its run. The answer to a commit can be lost although it is there: a store
repeats the request by itself, finds the first one, and calls it a conflict. So a run that was
refused looks for itself in the newer commits before it takes itself for a loser, whose files are
deleted.

On a disk, deltalake goes through all entries of the log for a commit, and opening a table reads all
that its checkpoint says of removed files. Both are kept for a limited time (`settings`), so neither
grows with the number of commits before.
"""

import uuid
from typing import Any

from deltalake import CommitProperties, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError

from penstock.pipeline.lake.storage import Storage

MAX_ATTEMPTS = 20  # of a commit that others' commits refused
CHECKPOINT_INTERVAL = 10  # commits between checkpoints of the Delta log
KEPT_HOURS = 48  # for which old versions can be read, unless a run says otherwise
CLEANUP_INTERVAL = 100  # commits between deletions of log entries that are too old: it lists all
HISTORY = 100  # commits that are looked at beyond those since the snapshot
RUN = "penstockRun"


def settings(hours: int) -> dict[str, str]:
    """Of a table whose old versions can be read for so many hours."""
    kept = f"interval {hours} hours"
    return {
        "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
        "delta.logRetentionDuration": kept,
        "delta.deletedFileRetentionDuration": kept,
    }


def new_run() -> str:
    """A name for a run's files and commits."""
    return uuid.uuid4().hex


def commit(
    delta: Any,
    run: str,
    actions: list[Any],
    transactions: list[Any],
    *,
    retries: int | None = None,
    notes: dict[str, Any] | None = None,
) -> bool:
    """Commit on top of the version that `delta` has; whether it was accepted."""
    properties = CommitProperties(
        custom_metadata={RUN: run, **(notes or {})},
        max_commit_retries=retries,
        app_transactions=transactions,
    )
    try:
        delta.create_write_transaction(
            actions,
            "append",
            delta.schema(),
            partition_by=delta.metadata().partition_columns or None,
            commit_properties=properties,
            # deltalake would write the checkpoint from what this writer has seen, which lacks the
            # commits of others that it was put behind: `sync_commits` does it from the log
            post_commithook_properties=PostCommitHookProperties(
                create_checkpoint=False, cleanup_expired_logs=False
            ),
        )
    except CommitFailedError:
        return False
    return True


def is_committed(delta: Any, run: str, base: int) -> bool:
    """Whether one of the commits after version `base` is the run's."""
    commits = delta.history(delta.version() - base + HISTORY)
    return any(one.get(RUN) == run for one in commits if one["version"] > base)


def sync_commits(storage: Storage, base: int, delta: Any) -> None:
    """Make the commits after version `base` durable, up to that of `delta`, which was just opened;
    and write a checkpoint of it, and delete old entries of the log, when that is due.
    """
    version = delta.version()
    for number in range(base + 1, version + 1):
        storage.sync(f"_delta_log/{number:020}.json")
    if version // CHECKPOINT_INTERVAL > base // CHECKPOINT_INTERVAL:
        delta.create_checkpoint()
    if version // CLEANUP_INTERVAL > base // CLEANUP_INTERVAL:
        delta.cleanup_metadata()
