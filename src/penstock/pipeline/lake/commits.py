"""Commit to a Delta table from runs that may be killed, repeated, or concurrent.

A commit carries the name of its run and an application transaction. Delta refuses concurrent
commits with the same transaction id. The answer to a successful commit can be lost: a store client
repeats the request, finds the first one, and reports a conflict. So a refused run looks for its own
name in the newer commits before it deletes its files.

On a disk, deltalake reads all entries of the log for a commit. To open a table, it reads all the
records of removed files in the checkpoint. Both expire (`settings`), so neither grows forever.
"""

import uuid
from typing import Any

from deltalake import CommitProperties, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError

from penstock.pipeline.lake.storage import Storage

MAX_ATTEMPTS = 20  # at a commit that conflicts with others
CHECKPOINT_INTERVAL = 10  # commits between checkpoints of the Delta log
KEPT_HOURS = 48  # how long old versions stay readable by default
CLEANUP_INTERVAL = 100  # commits between deletions of expired log entries, which list all
HISTORY = 100  # commits searched besides those since the snapshot
RUN = "penstockRun"


def settings(hours: int) -> dict[str, str]:
    """Return the settings of a table whose old versions stay readable for so many hours."""
    kept = f"interval {hours} hours"
    return {
        "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
        "delta.logRetentionDuration": kept,
        "delta.deletedFileRetentionDuration": kept,
    }


def new_run() -> str:
    """Return a unique name for a run's files and commits."""
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
    """Commit on top of the version of `delta`. Return whether the commit was accepted."""
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
            # deltalake would write a checkpoint without the concurrent commits that preceded this
            # one; `sync_commits` writes it from the log
            post_commithook_properties=PostCommitHookProperties(
                create_checkpoint=False, cleanup_expired_logs=False
            ),
        )
    except CommitFailedError:
        return False
    return True


def is_committed(delta: Any, run: str, base: int) -> bool:
    """Check whether one of the commits after version `base` is the run's."""
    commits = delta.history(delta.version() - base + HISTORY)
    return any(one.get(RUN) == run for one in commits if one["version"] > base)


def sync_commits(storage: Storage, base: int, delta: Any) -> None:
    """Make the commits after version `base` durable, up to the version of `delta`. When due, write
    a checkpoint and delete expired log entries. `delta` must have been opened after the commit.
    """
    version = delta.version()
    for number in range(base + 1, version + 1):
        storage.sync(f"_delta_log/{number:020}.json")
    if version // CHECKPOINT_INTERVAL > base // CHECKPOINT_INTERVAL:
        delta.create_checkpoint()
    if version // CLEANUP_INTERVAL > base // CLEANUP_INTERVAL:
        delta.cleanup_metadata()
