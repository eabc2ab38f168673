"""The table of operations: all operations of the native HTTP API.

Operations of Queen MQ's API that Penstock itself does not use are in `penstock.wire.queen`.
"""

from types import NoneType

from penstock.contract import (
    broker,
    consumers,
    dead_letters,
    deliveries,
    groups,
    inspection,
    messages,
    pipelines,
    queries,
    queues,
    routes,
    schedules,
    topics,
)
from penstock.contract.operation import Audited, Section
from penstock.protocol.queue_options import QueueOptions
from penstock.protocol.records import RecordMessage
from penstock.protocol.roles import Role

# Path, answer, summary; then the other properties.

CONFIGURE_QUEUE = Section("queues", "/api/v1").post(
    "/configure",
    queues.Configured,
    "Create a queue or replace its options",
    body=queues.Configure,
    decode=False,
    again=True,
    audit=Audited("queue.configure", body=("queue", "namespace", "task", "options")),
)
_queues = Section("queues", "/api/v1/queues")
LIST_QUEUES = _queues.get(
    "", queues.QueuePage, "List queues with their counts and rates", query=queries.QueueListQuery
)
GET_QUEUE = _queues.get(
    "/{queue}",
    queues.QueueDetails,
    "Get a queue with its options and consumer groups",
    query=queries.RecentQuery,
)
LIST_QUEUE_PARTITIONS = _queues.get(
    "/{queue}/partitions",
    queues.QueuePartitions,
    "List a queue's partitions as a group sees them, those with the most waiting messages first",
    query=queries.QueuePartitionsQuery,
)
GET_QUEUE_OPTIONS = _queues.get(
    "/{queue}/options", queues.OptionsOfQueue, "Get the options of a queue and their meanings"
)
CHANGE_QUEUE_OPTIONS = _queues.patch(
    "/{queue}/options",
    queues.OptionsOfQueue,
    "Change some options of a queue and keep the others",
    body=QueueOptions,
    decode=False,
    audit=Audited("queue.configure", body=QueueOptions.__struct_encode_fields__),
)
DELETE_QUEUE = _queues.delete(
    "/{queue}",
    queues.QueueDeleted,
    "Delete a queue with all its messages",
    role=Role.ADMIN,
    audit=Audited("queue.delete", answer=("existed",)),
)
CLEAR_QUEUE = _queues.delete(
    "/{queue}/clear",
    queues.QueueCleared,
    "Delete the messages of a queue or a partition and keep the queue",
    query=queries.ClearQuery,
    role=Role.ADMIN,
    audit=Audited("queue.clear", answer=("deleted",)),
)

_deliveries = Section("queues", "/api/v1")
PUSH = _deliveries.post(
    "/push",
    deliveries.PushAnswer,
    "Push messages to one or more queues",
    body=deliveries.PushBody,
    decode=False,
    status=201,
    again=True,  # its transaction ids make it safe
)
_POP_FROM = "/pop/queue/{queue}"
_POP_ALSO = ("/pop", "/pop/queue/{queue}/partition/{partition}")
POP = _deliveries.get(
    _POP_FROM,
    deliveries.PopAnswer,
    "Pop messages from a queue, from one of its partitions, or from any queue of a namespace or"
    " task",
    also=_POP_ALSO,
    query=deliveries.PopQuery,
    role=Role.READ_WRITE,
    may_be_empty=True,
)
POP_ANY = _deliveries.post(
    "/pop/any",
    deliveries.PopAnyAnswer,
    "Pop messages from the first of several sources that has some; while it waits, from any",
    body=deliveries.PopAnyBody,
    may_be_empty=True,
)
ACK_AND_POP = _deliveries.post(
    _POP_FROM,
    deliveries.ExchangeAnswer,
    "Acknowledge messages, then pop the next ones",
    also=_POP_ALSO,
    query=deliveries.PopQuery,
    body=deliveries.AckBatchBody,
    decode=False,
)
ACK = _deliveries.post(
    "/ack/batch",
    list[deliveries.Acked],
    "Acknowledge messages, each with its own status: completed, failed, retry or dlq",
    body=deliveries.AckBatchBody,
    decode=False,
    again=True,
)
EXTEND_LEASE = _deliveries.post(
    "/lease/{lease}/extend",
    list[deliveries.ExtendAnswer],
    "Extend a lease",
    body=deliveries.ExtendBody | None,
    again=True,
)
COMMIT_TRANSACTION = _deliveries.post(
    "/transaction",
    deliveries.TransactionAnswer,
    "Push and acknowledge messages in one transaction: all of it or nothing",
    body=deliveries.TransactionBody,
    decode=False,
)

_messages = Section("messages", "/api/v1/messages")
_MESSAGE = "/{partition}/{transaction}"
LIST_MESSAGES = _messages.get(
    "", messages.StoredMessages, "List messages, newest first", query=queries.MessagesQuery
)
GET_MESSAGE = _messages.get(
    _MESSAGE,
    messages.MessageWithPayload,
    "Get a message with its payload and its state in each group",
)
DELETE_MESSAGE = _messages.delete(
    _MESSAGE, messages.MessageDeleted, "Delete a message", audit=Audited("message.delete")
)
RETRY_MESSAGE = _messages.post(
    f"{_MESSAGE}/retry",
    messages.MessageRetried,
    "Deliver a message again",
    query=queries.GroupQuery,
    audit=Audited("message.retry"),
)
ADD_TRACE = Section("queen", "/api/v1/traces").post(
    "", messages.TraceAdded, "Attach a trace event to a message", body=messages.TraceBody
)

_groups = Section("groups", "/api/v1/consumer-groups")
LIST_GROUPS = _groups.get(
    "", list[groups.Group], "List consumer groups, by queue", query=queries.GroupListQuery
)
DESCRIBE_GROUP = _groups.get(
    "/{group}",
    dict[str, groups.GroupPositions],
    "Get the position of a group in each partition, by queue",
    query=queries.GroupPage,
)
DELETE_GROUP = _groups.delete(
    "/{group}",
    groups.GroupDeleted,
    "Delete a consumer group on all queues, or on the named one",
    also=("/{group}/queues/{queue}",),
    query=queries.DeleteGroupQuery,
    role=Role.ADMIN,
    audit=Audited("group.delete", answer=("partitions",)),
)
SEEK = _groups.post(
    "/{group}/queues/{queue}/seek",
    groups.Seek,
    "Move a group to the end, the beginning or a time; with `dryRun`, only count the messages",
    body=queries.SeekBody | None,
    audit=Audited(
        "group.seek", body=("toEnd", "toBeginning", "timestamp"), answer=("dryRun", "partitions")
    ),
    again=True,
)
_dead_letters = Section("dead letters", "/api/v1/dlq")
LIST_DEAD_LETTERS = _dead_letters.get(
    "",
    dead_letters.DeadLetters,
    "List dead letters, newest first",
    query=queries.DeadLetterPageQuery,
)
REQUEUE_DEAD_LETTERS = _dead_letters.post(
    "/requeue",
    dead_letters.Requeued,
    "Requeue the dead letters that match, to the groups they failed in",
    query=queries.DeadLetterQuery,
    audit=Audited("deadletters.requeue", answer=("requeued",)),
)
PURGE_DEAD_LETTERS = _dead_letters.delete(
    "",
    dead_letters.Purged,
    "Delete the dead letters that match",
    query=queries.DeadLetterQuery,
    role=Role.ADMIN,
    audit=Audited("deadletters.purge", answer=("deleted",)),
)

_consumers = Section("groups", "/api/v1/consumers")
LIST_CONSUMERS = _consumers.get(
    "",
    consumers.Consumers,
    "List running consumers as they report themselves: messages in flight, last error",
    query=queries.ConsumersQuery,
)
REPORT_CONSUMERS = Section("internal", "/api/v1/consumers").post(
    "",
    consumers.Reported,
    "Report the status of consumers; the Python client does so every few seconds",
    body=consumers.ConsumersReport,
    again=True,
)

_scheduled = Section("delayed messages", "/api/v1/scheduled")
_SCHEDULED_MESSAGE = "/{queue}/{partition}/{transaction}"
LIST_SCHEDULED = _scheduled.get(
    "",
    messages.ScheduledMessages,
    "List delayed messages, next due first",
    query=queries.ScheduledQuery,
)
GET_SCHEDULED = Section("internal", "/api/v1/scheduled").get(
    _SCHEDULED_MESSAGE, messages.ScheduledMessage, "Get a delayed message with its payload"
)
CANCEL_SCHEDULED = _scheduled.delete(
    _SCHEDULED_MESSAGE,
    NoneType,
    "Cancel a message before it is due",
    audit=Audited("message.cancel"),
)

_schedules = Section("schedules", "/api/v1/schedules")
LIST_SCHEDULES = _schedules.get(
    "", schedules.ScheduleList, "List all schedules with their last and next runs"
)
GET_SCHEDULE = _schedules.get(
    "/{name}", schedules.Schedule, "Get a schedule with its last and next runs"
)
PUT_SCHEDULE = _schedules.put(
    "/{name}",
    schedules.Schedule,
    "Create or replace a schedule",
    body=schedules.ScheduleDefinition,
    audit=Audited(
        "schedule.put", body=("cron", "timezone", "queue", "partition", "catchUp", "paused")
    ),
)
DELETE_SCHEDULE = _schedules.delete(
    "/{name}",
    NoneType,
    "Delete a schedule; messages it has pushed are kept",
    role=Role.ADMIN,
    audit=Audited("schedule.delete"),
)
CONTROL_SCHEDULE = _schedules.post(
    "/{name}/{action}",
    schedules.Schedule,
    "Pause or resume a schedule; runs that were due while it was paused are skipped",
    choices=("pause", "resume"),
    audit=Audited("schedule.{action}"),
    again=True,
)
RUN_SCHEDULE = _schedules.post(
    "/{name}/run",
    schedules.ScheduleRun,
    "Push the message of a schedule now; its next runs do not change",
    audit=Audited("schedule.run", answer=("transactionId", "result")),
)

_routes = Section("export", "/api/v1/routes")
LIST_ROUTES = _routes.get("", routes.RouteList, "List all routes with their status")
CREATE_ROUTE = _routes.post(
    "",
    routes.RouteStatus,
    "Create a route",
    body=routes.RouteDefinition,
    status=201,
    role=Role.ADMIN,
    audit=Audited("route.create", body=("name",)),
)
GET_ROUTE = _routes.get("/{name}", routes.RouteStatus, "Get a route's status")
DELETE_ROUTE = _routes.delete(
    "/{name}",
    NoneType,
    "Stop and delete a route",
    query=queries.ForceQuery,
    role=Role.ADMIN,
    audit=Audited("route.delete"),
    again=False,
)
TAKE_OTLP = Section("export", "").post(
    "/v1/{signal}",
    NoneType,
    "Take OTLP/HTTP (traces, metrics or logs) into the route whose source names the signal, or into"
    " the named route",
    also=("/api/v1/routes/{name}/v1/{signal}",),
    body=bytes,
    answer_type="application/x-protobuf",
)
TAKE_SAMPLES = Section("export", "/api/v1").post(
    "/write",
    NoneType,
    "Take Prometheus remote write into the route whose source names it, or into the named route",
    also=("/routes/{name}/write",),
    body=bytes,
)
PUSH_TO_ROUTE = _routes.post(
    "/{name}/push", routes.RoutePushed, "Add records to the route's send queue", status=201
)
CONTROL_ROUTE = _routes.post(
    "/{name}/{action}",
    routes.RouteStatus,
    "Pause a route (it sends nothing), drain it (it accepts no new records and delivers the queued"
    " ones), or resume it",
    choices=("pause", "resume", "drain"),
    role=Role.ADMIN,
    audit=Audited("route.{action}"),
    again=True,
)
PURGE_ROUTE = _routes.post(
    "/{name}/purge",
    routes.RecordCount,
    "Drop all records in the route's send queue",
    role=Role.ADMIN,
    audit=Audited("route.purge", answer=("records",)),
)
REPLAY_ROUTE = _routes.post(
    "/{name}/replay",
    routes.RecordCount,
    "Put the route's dead letters back into its send queue",
    role=Role.ADMIN,
    audit=Audited("route.replay", answer=("records",)),
)
LIST_ROUTE_DEAD_LETTERS = _routes.get(
    "/{name}/deadletters",
    routes.DeadRecordPage,
    "List the route's dead letters",
    query=queries.RouteDeadLettersQuery,
)
_route_files = Section("internal", "/api/v1/routes")
LIST_ROUTE_RECORDS = _route_files.get(
    "/{name}/records",
    routes.WaitingRecords,
    "List records in the route's send queue",
    query=queries.LimitQuery,
)
INSPECT_ROUTE = _route_files.get(
    "/{name}/inspect", routes.RouteInspection, "Read and verify the route's files"
)

_tasks = Section("dead letters", "/api/v1/tasks")
LIST_TASKS = _tasks.get(
    "", dead_letters.TaskList, "List background tasks of all brokers on this database, newest first"
)
GET_TASK = _tasks.get("/{id}", dead_letters.BackgroundTask, "Get the progress of a background task")
START_REQUEUE = _tasks.post(
    "/requeue",
    dead_letters.BackgroundTask,
    "Requeue the dead letters that match, in the background",
    query=queries.DeadLetterQuery,
    status=202,
    audit=Audited("deadletters.requeue", answer=("total",)),
)
START_PURGE = _tasks.post(
    "/purge",
    dead_letters.BackgroundTask,
    "Delete the dead letters that match, in the background",
    query=queries.DeadLetterQuery,
    status=202,
    role=Role.ADMIN,
    audit=Audited("deadletters.purge", answer=("total",)),
)
CANCEL_TASK = _tasks.delete(
    "/{id}",
    dead_letters.BackgroundTask,
    "Cancel a background task; what it has already done is not undone",
    audit=Audited("task.cancel", answer=("kind", "what", "done")),
)
LIST_CHANGES = Section("system", "/api/v1/audit").get(
    "",
    broker.AuditPage,
    "List the audit log: who changed what and when, newest first",
    query=queries.AuditQuery,
    role=Role.ADMIN,
)
GET_ANALYTICS = Section("analytics", "/api/v1/analytics").get(
    "",
    inspection.Minutes,
    "Messages, bytes, latency, retries, dead letters and lag per interval, from the last rollup",
    query=inspection.MinutesQuery,
)
_system = Section("system", "")
GET_HEALTH = _system.get(
    "/health",
    broker.BrokerStatus,
    "Check the broker: 200 while the database answers, otherwise 503",
)
GET_LIVENESS = _system.get(
    "/health/live", broker.Alive, "Liveness probe: 200 while the process serves requests"
)
GET_READINESS = _system.get(
    "/health/ready",
    broker.BrokerReady,
    "Readiness probe: 503 while the process starts, shuts down, or can neither store nor buffer"
    " messages, otherwise 200",
    query=broker.ReadyQuery,
)
GET_METRICS = _system.get(
    "/metrics",
    NoneType,
    "Get metrics in Prometheus text format, or as JSON if the Accept header asks for it",
    answer_type=broker.PROMETHEUS,
)

_pipelines = Section("pipelines", "/api/v1/pipelines")
LIST_PIPELINES = _pipelines.get(
    "", pipelines.PipelineList, "List all pipelines that have reported to this broker"
)
GET_PIPELINE = _pipelines.get(
    "/{name}",
    pipelines.PipelineStatus,
    "Get a pipeline's last report, its last runs and its last minutes",
)
REPORT_PIPELINE = Section("internal", "/api/v1/pipelines").put(
    "/{name}",
    pipelines.PipelineWish,
    "Report the state of a pipeline; the answer says whether it should stop",
    body=pipelines.PipelineReport,
)
STOP_PIPELINE = _pipelines.post(
    "/{name}/stop",
    pipelines.PipelineStatus,
    "Ask a pipeline to stop after its current batch",
    role=Role.ADMIN,
    audit=Audited("pipeline.stop"),
)
FORGET_PIPELINE = _pipelines.delete(
    "/{name}",
    NoneType,
    "Delete a pipeline's reports",
    role=Role.ADMIN,
    audit=Audited("pipeline.forget"),
)
SET_ARCHIVED_OFFSET = Section("internal", "/topics").put(
    "/{topic}/archived",
    topics.ArchivedOffset,
    "Set the archived offset: from now on, retention deletes only records before it",
    body=topics.ArchivedOffset,
)

_topics = Section("topics", "/topics")
LIST_TOPICS = _topics.get(
    "",
    topics.TopicListing,
    "List topic names, or with `details=true` topics with their sizes and rates",
    query=topics.TopicsQuery,
)
CREATE_TOPIC = _topics.post(
    "/{topic}",
    topics.Created,
    "Create a topic. Its format and placement are those of the settings unless given",
    query=topics.CreateQuery,
    status=201,
    audit=Audited("topic.create"),
)
DELETE_TOPIC = _topics.delete(
    "/{topic}",
    topics.Created,
    "Delete a topic and its records",
    role=Role.ADMIN,
    audit=Audited("topic.delete"),
)
GET_TOPIC = _topics.get(
    "/{topic}",
    topics.TopicDetails,
    "Get a topic with its offsets, size, segments and consumer groups",
)
PRODUCE = _topics.post(
    "/{topic}/produce",
    topics.RecordsProduced,
    "Append one record, or several as one batch",
    query=topics.PartitionQuery,
    body=topics.ProduceBody,
    decode=False,
    status=201,
)
CONSUME = _topics.get(
    "/{topic}/consume",
    list[RecordMessage],
    "Read records from an offset",
    query=topics.ConsumeQuery,
)
GET_NEXT_OFFSET = _topics.get(
    "/{topic}/next_offset",
    topics.TopicNextOffset,
    "Get the offset that the next record will have",
    query=topics.PartitionQuery,
)
GET_OFFSET_AT = _topics.get(
    "/{topic}/offset",
    topics.OffsetAt,
    "Get the offset of the first record appended at or after a time",
    query=topics.AtQuery,
)
STREAM_TOPIC = _topics.get(
    "/{topic}/stream",
    NoneType,
    "Follow a topic as server-sent events. Waits for a topic that does not exist yet",
    query=topics.StreamQuery,
    answer_type="text/event-stream",
)
SET_TOPIC_POLICY = _topics.put(
    "/{topic}/policy",
    topics.CleanupPolicy,
    "Set the cleanup policy: `delete` lets retention delete old segments, `compact` compacts them"
    " and never deletes them",
    body=topics.CleanupPolicy,
    role=Role.ADMIN,
    audit=Audited("topic.policy", body=("policy",)),
)
MOVE_TOPIC = _topics.post(
    "/{topic}/move",
    topics.TopicMove,
    "Turn a local topic into a shared one in the background; offsets are kept. `move` of the topic"
    " says how far it is",
    status=202,
    role=Role.ADMIN,
    audit=Audited("topic.move"),
    again=True,
)
ROLL_TOPIC = Section("internal", "/topics").post(
    "/{topic}/roll",
    topics.TopicRolled,
    "Seal the active segment; only sealed segments can be archived, deleted or compacted",
    audit=Audited("topic.roll"),
)

_topic_groups = Section("topics", "/topics/{topic}/groups")
LIST_ALL_TOPIC_GROUPS = Section("internal", "/api/v1/topic-groups").get(
    "",
    list[topics.GroupWithAge],
    "List the consumer groups of all topics, by topic and group",
    query=queries.TopicGroupListQuery,
)
LIST_TOPIC_GROUPS = Section("internal", "/topics/{topic}/groups").get(
    "", list[topics.GroupWithAge], "List the consumer groups of a topic"
)
GET_TOPIC_GROUP = _topic_groups.get(
    "/{group}", topics.GroupDetails, "Committed offset, lag and leases of a group"
)
DELETE_TOPIC_GROUP = _topic_groups.delete(
    "/{group}",
    topics.TopicGroupDeleted,
    "Delete a consumer group of a topic",
    role=Role.ADMIN,
    audit=Audited("topic-group.delete"),
)
COMMIT_TOPIC_GROUP = _topic_groups.post(
    "/{group}/commit", topics.Committed, "Set a group's committed offset", body=topics.CommitBody
)
RESET_TOPIC_GROUP = _topic_groups.post(
    "/{group}/reset",
    topics.ResetTo,
    "Move a group to an offset, a time, or the beginning or end of the topic; with `dryRun`, only"
    " count the records affected",
    body=topics.Reset,
    audit=Audited("topic-group.reset", answer=("dryRun", "before", "committed", "lag")),
)
LEASE_RECORDS = _topic_groups.post(
    "/{group}/lease",
    topics.Leased,
    "Lease a range of records to a member of the group",
    body=topics.LeaseBody,
    may_be_empty=True,
)
COMPLETE_RECORDS = _topic_groups.post(
    "/{group}/complete",
    topics.Committed,
    "Complete a leased range of records",
    body=topics.LeaseId,
)
RENEW_RECORDS = _topic_groups.post(
    "/{group}/renew", topics.Leased, "Renew the lease on a range of records", body=topics.LeaseId
)

_scrub = Section("topics", "/api/v1/scrub")
GET_SCRUB = _scrub.get(
    "", topics.ScrubStatus, "Get the progress of the checksum scan over sealed segments"
)
START_SCRUB = _scrub.post(
    "",
    topics.ScrubStatus,
    "Verify the checksums of all sealed segments now",
    status=202,
    role=Role.ADMIN,
    audit=Audited("topic.scrub"),
)
_tier = Section("topics", "/api/v1/tier")
GET_TIER = _tier.get(
    "", topics.TierStatus, "Which part of the topics is in the object store, and its lag"
)
FLUSH_TIER = _tier.post(
    "/flush",
    topics.TierStatus,
    "Seal the active segments of all topics and copy them to the object store now",
    status=202,
    role=Role.ADMIN,
    audit=Audited("topic.tier-flush"),
)

_buffer = Section("buffer", "/api/v1")
GET_BUFFER = _buffer.get(
    "/status/buffers",
    broker.BufferStatus,
    "Count the events buffered on disk, and show the progress of their replay",
)
REPLAY_BUFFER = _buffer.post(
    "/buffers/{action}",
    broker.BufferStatus,
    "Replay the buffer now, or retry the events in `failed/`",
    choices=("replay", "retry-failed"),
    role=Role.ADMIN,
    audit=Audited("buffer.{action}", answer=("failed",)),
)
SWITCH_MAINTENANCE = _buffer.put(
    "/buffers/maintenance",
    broker.BufferStatus,
    "Turn maintenance modes on or off: with `push`, pushes go to the buffer; with `pop`, pops get"
    " no messages",
    body=broker.MaintenanceModes,
    role=Role.ADMIN,
    audit=Audited("maintenance", body=("push", "pop")),
)

_console = Section("internal", "/api/v1")
SEARCH_MESSAGES = _console.get(
    "/queues/{queue}/messages",
    inspection.Hits,
    "Find messages by transaction id or by a value in the payload; a request searches a limited"
    " number of messages, newest first",
    query=inspection.SearchQuery,
)
GET_LIFELINE = _console.get(
    "/messages/{partition}/{transaction}/lifeline",
    inspection.Lifeline,
    "Get the history of a message, oldest event first",
)
LIST_ERRORS = _console.get(
    "/dlq/errors",
    inspection.ErrorGroups,
    "Group dead letters by error, with counts over time",
    query=inspection.ErrorsQuery,
)
GET_HISTORY = _console.get(
    "/history",
    inspection.Series,
    "Get the messages per second over the last hour, day or week, for all queues or one",
    query=inspection.HistoryQuery,
)
