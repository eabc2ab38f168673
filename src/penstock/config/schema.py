"""The one typed configuration object: every key, its type, its default and what it is for.

A section is a frozen dataclass; the loader (`load.py`) walks the fields, so a key added here is at
once a YAML key, an environment variable (`PENSTOCK_<SECTION>_<KEY>`), a `--set section.key=value`
flag and a row in `penstock config`. `env` in a field's metadata names further environment
variables that set it (those of aiq and Queen MQ, and `DATABASE_URL`). `milliseconds` names the
former key of a duration, whose plain numbers are milliseconds, as are those of its variables.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

Size = Annotated[int, "size"]  # bytes: 4096, 256Ki, 1Gi
Seconds = Annotated[float, "duration"]  # seconds: 5, 100ms, 1h30m
Share = Annotated[float, "share"]  # a part of a whole: 0.1 or 10%
Secret = Annotated[str, "secret"]  # masked in every output
Hosts = Annotated[str, "hosts"]  # host or host:port, several with commas
PostgresUrl = Annotated[str, "postgres"]  # postgresql://..., masked too: it may hold a password


def key(
    default: Any, help: str, *env: str, milliseconds: str = "", is_advanced: bool = False
) -> Any:
    """Return a field with its help text and the extra environment variables that set it."""
    metadata = {
        "help": help,
        "env": env,
        "milliseconds": milliseconds,
        "advanced": is_advanced,
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


advanced = partial(key, is_advanced=True)  # a key that few people need: last in the reference


def section(kind: type, help: str) -> Any:
    return field(default_factory=kind, metadata={"help": help, "env": ()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    enabled: bool = key(True, "listen")
    host: str = key("127.0.0.1", "address to listen on")
    port: int = key(0, "port to listen on; 0 picks a free one")
    tls: bool = key(True, "use TLS when tls.certificate is set; false = plain text even then")


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedListener(ListenerSettings):
    """A listener of a binary protocol with length-prefixed frames."""

    max_frame: Size = advanced(64 << 20, "largest frame or request")
    max_connections: int = advanced(10_000, "connections beyond this number are closed immediately")
    auth_timeout: Seconds = advanced(
        10.0,
        "with auth.enabled: time to send a token, and to send a new one after it expires; 0 = no "
        "limit",
    )
    frame_timeout: Seconds = advanced(
        30.0,
        "longest pause while a frame arrives; frames that take longer must arrive at 1 KiB/s or "
        "more; 0 = no limit",
    )
    idle_timeout: Seconds = advanced(
        0.0, "close connections that have been idle for this long; 0 = never"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpServerSettings(FramedListener):
    enabled: bool = key(True, "serve the binary topic protocol")
    port: int = key(12345, "port to listen on; 0 picks a free one")


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaServerSettings(FramedListener):
    enabled: bool = key(True, "serve topics to Kafka clients")
    port: int = key(9092, "port to listen on; 0 picks a free one")
    idle_timeout: Seconds = advanced(
        600.0, "close connections that have been idle for this long; 0 = never"
    )
    advertised: str = key(
        "",
        "host:port that clients are asked to connect to; empty = the address that they have "
        "connected to",
    )
    partitions: int = key(
        1, "number of partitions of topics that clients create without a number of partitions"
    )
    create_topics: bool = key(
        True, "create a topic when a client asks for its metadata and allows it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServerSettings(ListenerSettings):
    enabled: bool = key(True, "serve HTTP: queues, topics, status")
    port: int = key(6632, "port to listen on; 0 picks a free one")
    ssl_cert_path: Path | None = key(
        None, "certificate chain (PEM) for HTTP only, instead of tls.certificate"
    )
    ssl_key_path: Path | None = key(None, "private key (PEM) of ssl_cert_path")
    max_header: Size = advanced(64 << 10, "largest request line and headers; larger ones get 431")
    max_body: Size = key(
        64 << 20, "largest request body, before and after decompression; larger ones get 413"
    )
    max_connections: int = advanced(20_000, "connections beyond this number get 503")
    header_timeout: Seconds = advanced(
        10.0, "time for the headers of a request to arrive; slower requests get 408; 0 = no limit"
    )
    body_timeout: Seconds = advanced(
        30.0, "longest pause while a request body arrives; a longer one gets 408; 0 = no limit"
    )
    body_min_rate: Size = advanced(
        1 << 10,
        "lowest upload rate in bytes per second for bodies that take longer than body_timeout; "
        "slower ones get 408; 0 = no limit",
    )
    idle_timeout: Seconds = advanced(
        75.0, "close keep-alive connections after this long without a request; 0 = never"
    )
    send_timeout: Seconds = advanced(
        60.0, "disconnect a client that reads none of its response for this long; 0 = never"
    )
    compress_from: Size = advanced(
        64 << 10,
        "compress JSON and text responses of at least this size with gzip, if the client accepts "
        "it; 0 = never",
    )
    cors_origin: str = key(
        "",
        "other origins whose web pages may send requests (CORS), separated by commas "
        "(https://console.example); * = all",
    )
    hosts: str = key(
        "",
        "additional names to accept in the Host header (such as a proxy's), separated by commas; "
        "*.example = all names below, * = any; see docs/how-to/security.md",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WebsocketServerSettings(ListenerSettings):
    enabled: bool = key(True, "serve topics over WebSocket")
    port: int = key(9090, "port to listen on; 0 picks a free one")
    ssl_cert_path: Path | None = key(None, "certificate chain (PEM); default: the HTTP server's")
    ssl_key_path: Path | None = key(None, "private key (PEM); default: the HTTP server's")
    max_message: Size = advanced(64 << 20, "largest message accepted from a client")
    max_connections: int = advanced(20_000, "connections beyond this number are refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    certificate: Path | None = key(
        None, "certificate chain (PEM); enables TLS for HTTP, WebSocket, TCP and Kafka"
    )
    private_key: Path | None = key(
        None, "private key (PEM, without a password); default: in the certificate file"
    )
    client_ca: Path | None = key(None, "require client certificates issued by this CA (PEM)")
    min_version: Literal["1.2", "1.3"] = key("1.2", "lowest TLS version to accept")
    reload_interval: Seconds = advanced(
        10.0, "how often to check the certificate files for changes; 0 = only on SIGHUP"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    enabled: bool = key(
        False, "require a token (JWT) for every request, except for skip_paths", "JWT_ENABLED"
    )
    algorithm: Literal["auto", "hs256", "rs256", "es256", "eddsa"] = key(
        "auto", "accepted signature algorithm; auto = those of the configured keys", "JWT_ALGORITHM"
    )
    secret: Secret = key("", "shared secret for HS256, at least 32 bytes", "JWT_SECRET")
    public_key: str = key(
        "", "public key (PEM text or file) for RS256, ES256 or EdDSA", "JWT_PUBLIC_KEY"
    )
    jwks_url: str = key(
        "", "URL or file of the identity provider's public keys (JWKS)", "JWT_JWKS_URL"
    )
    jwks_refresh: Seconds = advanced(
        3600.0, "how often to fetch the JWKS again", "JWT_JWKS_REFRESH_INTERVAL"
    )
    issuer: str = key("", "required `iss` claim of a token; empty = any", "JWT_ISSUER")
    audience: str = key("", "required `aud` claim of a token; empty = any", "JWT_AUDIENCE")
    clock_skew: Seconds = key(
        30.0, "tolerated difference from the issuer's clock", "JWT_CLOCK_SKEW"
    )
    require_exp: bool = advanced(True, "reject tokens without an expiry (`exp` claim)")
    skip_paths: str = key(
        "/,/health,/health/live,/health/ready,/metrics,/metrics.json,/metrics/prometheus,/docs,/openapi.json",
        "paths that need no token, separated by commas; a path that ends in / includes everything "
        "below it, except / itself",
        "JWT_SKIP_PATHS",
    )
    roles_claim: str = key(
        "role",
        "claim with the role; dots separate nested names (realm_access.roles)",
        "JWT_ROLES_CLAIM",
    )
    roles_array_claim: str = advanced(
        "roles", "claim with a list of roles; the highest one counts", "JWT_ROLES_ARRAY_CLAIM"
    )
    role_admin: str = key("admin", "name of the role that may do everything", "JWT_ROLE_ADMIN")
    role_read_write: str = key(
        "read-write",
        "name of the role that may push, pop, produce and configure",
        "JWT_ROLE_READ_WRITE",
    )
    role_read_only: str = key(
        "read-only", "name of the role that may only read", "JWT_ROLE_READ_ONLY"
    )
    cache_size: int = advanced(
        10_000, "number of verified tokens to cache per process, each until it expires"
    )
    tcp: Literal["token", "open"] = key(
        "token",
        "TCP authentication: token = the first frame must be AUTH with a token; open = anyone who "
        "can reach the port is admin",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSettings:
    url: PostgresUrl = key(
        "",
        "URL of PostgreSQL 14 or later; may list several hosts; empty = start the embedded one",
        "DATABASE_URL",
    )
    host: Hosts = key("", "instead of url: host, or several hosts separated by commas", "PG_HOST")
    port: int = key(5432, "instead of url: port", "PG_PORT")
    name: str = key("postgres", "instead of url: database name", "PG_DB")
    user: str = key("postgres", "instead of url: user", "PG_USER")
    password: Secret = key("", "instead of url: password", "PG_PASSWORD")
    db_schema: str = key("penstock", "database schema for Penstock's tables and functions")
    pool_size: int = key(8, "connections per broker process", "DB_POOL_SIZE")
    acquire_timeout: Seconds = advanced(
        2.0, "the database counts as down when a connection or a commit takes longer than this"
    )
    statement_timeout: Seconds = advanced(30.0, "time limit for one SQL statement; 0 = no limit")
    read_url: PostgresUrl = key(
        "", "URL of a standby to list stored messages from; empty = the primary"
    )
    browse_pool_size: int = advanced(2, "additional connections for lists, status and analytics")
    browse_timeout: Seconds = advanced(
        10.0, "time limit for one SQL statement of lists, status and analytics; 0 = no limit"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRetention:
    """Which segments leave the local disk once the tier has them, the oldest first."""

    age: Seconds = key(
        0.0, "delete local segments whose newest record is older than this; 0 = never"
    )
    bytes: Size = key(0, "keep at most this much per topic on the local disk; 0 = no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsSettings:
    enabled: bool = key(
        True,
        "serve topics; false = queues only, without TCP, Kafka and WebSocket (serve --no-topics)",
    )
    fsync: Literal["always", "group", "interval", "never"] = key(
        "group",
        "when to acknowledge an append: always = after its own fsync, group = after a shared "
        "fsync, interval and never = after the write",
    )
    fsync_interval: Seconds = advanced(0.1, "with fsync `interval`: longest time between fsyncs")
    format: Literal["aiq", "kafka"] = key(
        "aiq",
        "files of topics that are created without a format: aiq = as aiq's server has them, "
        "kafka = record batches, with keys, headers and one fsync per commit",
    )
    placement: Literal["local", "shared"] = key(
        "local",
        "where new topics live: local = on the disk of this broker, shared = in PostgreSQL and "
        "object storage, served by every broker on the same database",
    )
    shared_tier: str = key(
        "",
        "object storage for the old records of shared topics: s3://, gs://, az:// or file://, the "
        "same for all brokers on a database; empty = they stay in the database",
    )
    shared_cache: Size = key(64 << 20, "memory for the newest records of shared topics")
    segment_bytes: Size = key(1 << 30, "roll the active segment when it is this large; 0 = never")
    segment_age: Seconds = key(0.0, "roll the active segment when it is this old; 0 = never")
    retention_bytes: Size = key(
        0, "delete the oldest segments of a topic that is larger than this; 0 = never"
    )
    retention_age: Seconds = key(
        0.0, "delete segments whose newest record is older than this; 0 = never"
    )
    retention_interval: Seconds = advanced(30.0, "how often to apply retention and segment_age")
    max_record: Size = key(64 << 20, "largest payload of a record")
    producer_expiry: Seconds = advanced(
        604800.0,
        "forget idempotent producers, and exactly-once sinks of pipelines, that have sent nothing "
        "for this long",
    )
    lease_time: Seconds = advanced(
        30.0, "how long a member of a consumer group may hold a leased range of records"
    )
    free_space_reserve: Size = key(
        64 << 20, "reject appends when the disk has less free space than this"
    )
    scrub_interval: Seconds = key(
        604800.0,
        "how often to scrub sealed segments (read them and verify their checksums); 0 = only on "
        "request",
    )
    scrub_rate: Size = advanced(16 << 20, "most bytes per second that a scrub reads; 0 = no limit")
    tier: str = key(
        "",
        "object storage to copy sealed segments to: s3://, gs://, az:// or file://; empty = none",
    )
    tier_delay: Seconds = advanced(
        60.0, "copy a sealed segment to the tier when its newest record is this old"
    )
    tier_interval: Seconds = advanced(
        10.0, "how often to copy segments and the state of consumer groups to the tier"
    )
    tier_cache: Size = advanced(1 << 30, "size of the local disk cache for reads from the tier")
    tier_grace: Seconds = advanced(
        3600.0, "how long to keep an obsolete object in the tier for readers that may still use it"
    )
    local_retention: LocalRetention = section(
        LocalRetention, "which segments to delete from the local disk once they are in the tier"
    )
    adopt: bool = key(
        False, "with an empty data directory: open the topics in the tier and take ownership of it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesSettings:
    encryption_keys: dict[str, str] = key(
        {}, "encryption keys: key id -> 64 hex digits (AES-256); the last one encrypts new messages"
    )
    encryption_key: Secret = key(
        "",
        "a single encryption key, 64 hex digits (AES-256)",
        "PENSTOCK_ENCRYPTION_KEY",
        "QUEEN_ENCRYPTION_KEY",
    )
    default_batch: int = key(
        1, "messages per pop if the client sets no batch size", "DEFAULT_BATCH_SIZE"
    )
    default_timeout: Seconds = key(
        30.0,
        "long-poll timeout if the client sets none",
        "DEFAULT_TIMEOUT",
        milliseconds="default_timeout_ms",
    )
    default_subscription_mode: Literal["", "all", "new", "new-only"] = key(
        "",
        "where a new consumer group starts if the client does not say: all or empty = first "
        "stored message, new or new-only = messages pushed later",
        "DEFAULT_SUBSCRIPTION_MODE",
    )
    max_batch: int = key(10_000, "most messages that one pop returns")
    max_items: int = advanced(
        10_000, "most items in one push, ack or transaction request; more get 413"
    )
    max_batch_bytes: Size = advanced(
        32 << 20,
        "most payload and header bytes that one pop returns; a larger first message is returned "
        "alone",
    )
    merge_max: int = advanced(500, "most items of concurrent requests to combine into one SQL call")
    retention_interval: Seconds = advanced(
        300.0,
        "how often to delete messages that are past their retention",
        "RETENTION_INTERVAL",
        milliseconds="retention_interval_ms",
    )
    eviction_interval: Seconds = advanced(
        60.0,
        "how often to delete messages that are past maxWaitTimeSeconds or ttl",
        "EVICTION_INTERVAL",
        milliseconds="eviction_interval_ms",
    )
    partition_cleanup_days: int = advanced(
        30,
        "delete empty partitions that have been idle for this many days",
        "PARTITION_CLEANUP_DAYS",
    )
    sink_expiry: Seconds = advanced(
        2592000.0,
        "forget what an exactly-once sink of a pipeline has written to queues when it has written "
        "nothing for this long",
    )
    poll_interval: Seconds = advanced(
        1.0, "how often waiting pops check for messages when no notification arrives"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    enabled: bool = key(
        True,
        "buffer pushes on disk; false = acknowledge pushes only once they are in the database, "
        "for disks that do not outlive the broker",
    )
    dir: Path | None = key(
        None, "directory for buffer files; default: in the data directory", "FILE_BUFFER_DIR"
    )
    flush_interval: Seconds = advanced(
        0.1,
        "longest time until a QoS 0 push is fsynced, and first delay before a failed replay is "
        "retried",
        "FILE_BUFFER_FLUSH_MS",
        milliseconds="flush_ms",
    )
    max_batch: int = advanced(
        100,
        "events per batch; one call to the database carries up to ten batches",
        "FILE_BUFFER_MAX_BATCH",
    )
    events_per_file: int = advanced(
        10_000, "most events in one buffer file", "FILE_BUFFER_EVENTS_PER_FILE"
    )
    retry_interval: Seconds = advanced(
        5.0,
        "first delay before events in failed/ are retried; it doubles up to 5 minutes",
        "FILE_BUFFER_RETRY_INTERVAL",
    )
    startup_recovery_timeout: Seconds = advanced(
        3600.0,
        "at startup, longest time to replay the buffer before requests are accepted",
        "FILE_BUFFER_STARTUP_RECOVERY_TIMEOUT",
    )
    max_bytes: Size = key(
        10 << 30,
        "largest total size of the buffer files; beyond it, pushes are rejected",
        "FILE_BUFFER_MAX_BYTES",
    )
    free_space_reserve: Size = key(
        64 << 20,
        "reject pushes instead of buffering them when the disk has less free space than this",
    )
    replay_rate: int = advanced(0, "most events to replay per second; 0 = no limit")
    replay_pause: Seconds = advanced(
        0.01, "pause after every 1000 replayed events while clients push"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffSettings:
    enabled: bool = advanced(True, "increase the retry delay after each consecutive failure")
    multiplier: float = advanced(2.0, "factor by which the delay grows per failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreaker:
    enabled: bool = key(True, "stop sending to a destination that is down")
    threshold: int = key(5, "consecutive failures that open the breaker")
    reset_timeout: Seconds = key(30.0, "time that the breaker stays open before each probe")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    enabled: bool = advanced(False, "prepare batches (CPU) and send them (I/O) in separate tasks")
    preparer_count: int = advanced(0, "number of preparers; 0 = number of cores")
    sender_count: int = advanced(0, "number of senders; 0 = twice the number of cores")
    channel_size: int = advanced(256, "most prepared batches that wait for a sender")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveWorkers:
    enabled: bool = advanced(False, "adjust the number of workers to the backlog and the latency")
    min_workers: int = advanced(1, "lowest number of workers")
    max_workers: int = advanced(0, "highest number of workers; 0 = four times the number of cores")


@dataclass(frozen=True, slots=True, kw_only=True)
class SendQueueSettings:
    """The `exporter.queue` block of metrics-governor: the defaults of every route."""

    type: Literal["memory", "disk"] = key(
        "disk", "where to keep queued batches; memory = never written to disk"
    )
    enabled: bool = key(True, "run export routes")
    path: Path | None = key(None, "directory for the send queues; default: in the data directory")
    max_size: int = key(10_000, "most batches in the send queue")
    max_bytes: Size = key(1 << 30, "most bytes in the send queue")
    full_behavior: Literal["drop_oldest", "drop_newest", "block"] = key(
        "drop_oldest",
        "what to do when the send queue is full; `block` is the default for routes with a source",
    )
    block_timeout: Seconds = advanced(
        30.0, "with `block`: longest time that a push waits for space"
    )
    inmemory_blocks: int = advanced(
        2048, "most blocks to hold in memory; further ones are only on disk"
    )
    chunk_size: Size = advanced(512 << 20, "largest size of one queue file (chunk)")
    meta_sync_interval: Seconds = advanced(1.0, "how often to write fastqueue.meta")
    stale_flush: Seconds = advanced(
        30.0, "with fsync `never`: write blocks to disk after this long in memory"
    )
    write_buffer_size: Size = advanced(256 << 10, "most bytes to combine into one write")
    compression: Literal["none", "snappy", "zstd", "gzip"] = advanced(
        "snappy", "compression of queued blocks"
    )
    always_queue: bool = advanced(
        True, "send every batch through the queue; false is not supported"
    )
    fsync: Literal["always", "interval", "never"] = key(
        "always",
        "when to acknowledge a push: always = after an fsync, interval = after the write (fsync "
        "every meta_sync_interval), never = once it is in memory",
    )
    free_space_reserve: Size = advanced(
        64 << 20, "stop queueing when the disk has less free space than this"
    )
    failover_max_size: int = advanced(
        1000, "with fsync `never`: additional blocks to hold in memory while the disk fails"
    )
    failover_max_bytes: Size = advanced(
        256 << 20, "with fsync `never`: additional bytes to hold in memory while the disk fails"
    )
    drain_order: Literal["fifo", "newest_first", "mixed"] = key(
        "fifo", "order in which to send queued batches"
    )
    fresh_share: Share = advanced(
        0.5,
        "with drain_order `mixed`: share of sends for the newest batches while a backlog drains",
    )
    catchup_rate: float = advanced(
        0.0, "most batches per second to send from a backlog on disk; 0 = no limit"
    )
    max_attempts: int = key(
        0, "number of failed sends after which a batch becomes a dead letter; 0 = never"
    )
    max_age: Seconds = key(0.0, "age at which a batch becomes a dead letter; 0 = never")
    workers: int = key(
        0,
        "number of parallel sends per route, without pipeline_split; 0 = twice the number of cores",
    )
    max_concurrent_sends: int = advanced(4, "with pipeline_split: sends in flight per sender")
    global_send_limit: int = advanced(
        0, "sends in flight over all routes; 0 = eight times the number of cores"
    )
    retry_interval: Seconds = key(5.0, "delay before the first retry")
    max_retry_delay: Seconds = key(300.0, "longest delay between retries")
    memory_percent: Share = advanced(
        0.0, "size of the send queue as a share of memory; 0 = use max_bytes"
    )
    memory_limit_ratio: Share = advanced(
        0.85, "share of the (cgroup) memory limit that the broker may plan with"
    )
    adaptive_enabled: bool = advanced(True, "hold fewer blocks in memory when memory is short")
    target_utilization: Share = advanced(
        0.85, "with adaptive_enabled: share of the memory limit above which memory is short"
    )
    backoff: BackoffSettings = section(BackoffSettings, "exponential backoff between retries")
    circuit_breaker: CircuitBreaker = section(CircuitBreaker, "circuit breaker of a route")
    pipeline_split: PipelineSplit = section(
        PipelineSplit, "separate tasks to prepare and to send batches"
    )
    adaptive_workers: AdaptiveWorkers = section(AdaptiveWorkers, "automatic number of workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    queue: SendQueueSettings = section(
        SendQueueSettings, "defaults for the send queue of every route"
    )
    certificates: Path | None = key(
        None,
        "directory of the CA files that routes created over the API may name; default: in the "
        "data directory",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    max_series: int = advanced(
        1000,
        "most series per metric with a queue, group or topic label; further ones are combined as "
        "(other)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server_name: str = key("penstock", "name shown in status and logs")
    log_level: Literal["debug", "info", "warning", "error"] = key(
        "info", "lowest level to log", "LOG_LEVEL"
    )
    log_format: Literal["auto", "text", "json"] = key(
        "auto", "log format; auto = text on a terminal, JSON lines otherwise"
    )
    data_directory: Path = key(
        Path("penstock-data"),
        "directory for topics, buffers, send queues and the embedded database",
    )
    thread_pool_size: int = advanced(
        0, "threads for blocking work (fsync, compression); 0 = number of cores"
    )
    workers: int = key(1, "number of broker processes that share the HTTP port")
    max_bodies: Size = advanced(
        256 << 20,
        "memory limit for all requests in progress, per process; beyond it, large requests are "
        "rejected (HTTP 503)",
    )
    shutdown_delay: Seconds = key(
        0.0,
        "on shutdown, /health/ready returns 503 for this long while requests are still served, so "
        "that load balancers notice",
    )
    shutdown_timeout: Seconds = key(
        10.0, "on shutdown, time for open requests to finish, after shutdown_delay"
    )
    database: DatabaseSettings = section(DatabaseSettings, "the PostgreSQL that stores queues")
    tcp_server: TcpServerSettings = section(
        TcpServerSettings, "TCP server for topics (binary protocol)"
    )
    kafka_server: KafkaServerSettings = section(
        KafkaServerSettings, "server for Kafka clients of topics"
    )
    http_server: HttpServerSettings = section(
        HttpServerSettings, "HTTP server for queues, topics, status and the Console"
    )
    websocket_server: WebsocketServerSettings = section(
        WebsocketServerSettings, "WebSocket server for topics"
    )
    tls: Tls = section(Tls, "TLS certificates of the listeners")
    auth: Auth = section(Auth, "access tokens (JWT) and roles")
    topics: TopicsSettings = section(TopicsSettings, "storage, retention and tiering of topics")
    queues: QueuesSettings = section(QueuesSettings, "defaults, limits and cleanup of queues")
    buffer: BufferSettings = section(
        BufferSettings, "disk buffer for QoS 0 pushes and for pushes while PostgreSQL is down"
    )
    exporter: Exporter = section(Exporter, "export routes")
    routes: dict[str, Any] = key({}, "export routes, by name")
    metrics: MetricsSettings = section(MetricsSettings, "the /metrics endpoint")

    @property
    def private_directory(self) -> Path:
        """Return the broker's own directory beside the topics (`.penstock` is not a topic name)."""
        return self.data_directory / ".penstock"

    @property
    def buffers_directory(self) -> Path:
        return self.buffer.dir or self.private_directory / "buffers"

    @property
    def routes_directory(self) -> Path:
        """Return the directory that has one directory per route."""
        return self.exporter.queue.path or self.private_directory / "routes"
