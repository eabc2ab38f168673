"""The table of operations: what the native HTTP API can do.

Operations of Queen MQ's dialect that Penstock itself does not use are in `penstock.wire.queen`.
"""

from penstock.contract import queries
from penstock.contract.dead_letters import DeadLetters, Purged, Requeued
from penstock.contract.groups import Group, GroupDeleted, GroupPositions, Seek
from penstock.contract.operation import Audited, Section
from penstock.protocol.roles import Role

# fmt: off (a table: path, answer, summary; then what else there is to say)

_groups = Section("groups", "/api/v1/consumer-groups")
_GROUP_DELETED = Audited("group.delete", answer=("partitions",))
_SOUGHT = Audited(
    "group.seek", body=("toEnd", "toBeginning", "timestamp"), answer=("dryRun", "partitions")
)
LIST_GROUPS = _groups.get("", list[Group], "List the consumer groups of all queues")
DESCRIBE_GROUP = _groups.get(
    "/{group}",
    dict[str, GroupPositions],
    "Position of a group in each partition, by queue",
    query=queries.GroupPage,
)
DELETE_GROUP = _groups.delete(
    "/{group}",
    GroupDeleted,
    "Delete a consumer group on all queues",
    query=queries.DeleteGroupQuery,
    role=Role.ADMIN,
    audit=_GROUP_DELETED,
)
DELETE_GROUP_ON_QUEUE = _groups.delete(
    "/{group}/queues/{queue}",
    GroupDeleted,
    "Delete a consumer group on one queue",
    query=queries.DeleteGroupQuery,
    role=Role.ADMIN,
    audit=_GROUP_DELETED,
)
SEEK = _groups.post(
    "/{group}/queues/{queue}/seek",
    Seek,
    "Move a group to the end, the beginning or a time; with `dryRun`, only count the messages",
    body=queries.SeekBody | None,
    audit=_SOUGHT,
    again=True,
)
SEEK_PARTITION = _groups.post(
    "/{group}/queues/{queue}/partitions/{partition}/seek",
    Seek,
    "Move a group to the end of one partition",
    audit=_SOUGHT,
)

_dead_letters = Section("dead letters", "/api/v1/dlq")
LIST_DEAD_LETTERS = _dead_letters.get(
    "", DeadLetters, "List dead letters, newest first", query=queries.DeadLetterPageQuery
)
REQUEUE_DEAD_LETTERS = _dead_letters.post(
    "/requeue",
    Requeued,
    "Requeue the dead letters that match, to the groups they failed in",
    query=queries.DeadLetterQuery,
    audit=Audited("deadletters.requeue", answer=("requeued",)),
)
PURGE_DEAD_LETTERS = _dead_letters.delete(
    "",
    Purged,
    "Delete the dead letters that match",
    query=queries.DeadLetterQuery,
    role=Role.ADMIN,
    audit=Audited("deadletters.purge", answer=("deleted",)),
)
