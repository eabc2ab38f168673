"""The one typed configuration object: every key, its type, its default and what it is for.

A section is a frozen dataclass; the loader (`load.py`) walks the fields, so a key added here is at
once a YAML key, an environment variable (`PENSTOCK_<SECTION>_<KEY>`), a `--set section.key=value`
flag and a row in `penstock config show`. `env` in a field's metadata names further environment
variables that set it (those of the seeds, and `DATABASE_URL`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

Size = Annotated[int, "size"]  # bytes: 4096, 256Ki, 1Gi
Seconds = Annotated[float, "duration"]  # seconds: 5, 100ms, 1h30m
Share = Annotated[float, "share"]  # a part of a whole: 0.1 or 10%
Milliseconds = Annotated[
    int, "milliseconds"
]  # the seeds' names that end in _ms: plain milliseconds
Secret = Annotated[str, "secret"]  # masked wherever configuration is shown
Hosts = Annotated[str, "hosts"]  # host or host:port, several with commas
PostgresUrl = Annotated[str, "postgres"]  # postgresql://..., masked too: it may hold a password


def key(default: Any, help: str, *env: str) -> Any:
    """A field with its help text and the extra environment variables that set it."""
    metadata = {"help": help, "env": env}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, help: str) -> Any:
    return field(default_factory=kind, metadata={"help": help, "env": ()})


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpServer:
    enabled: bool = key(True, "serve the binary topic protocol")
    host: str = key("127.0.0.1", "address to listen on")
    port: int = key(12345, "port to listen on; 0 picks a free one")
    max_frame: Size = key(64 << 20, "largest payload of one frame")
    max_connections: int = key(10_000, "connections beyond this are closed at once")
    auth_timeout: Seconds = key(
        10.0, "with tokens: time to send one, or another when it has expired; 0 = no limit"
    )
    frame_timeout: Seconds = key(
        30.0, "longest silence within a frame; after it also the least rate, 1 KiB/s; 0 = no limit"
    )
    idle_timeout: Seconds = key(0.0, "close connections that are silent this long; 0 = never")
    tls: bool = key(True, "speak TLS when tls.certificate is set; false = in clear also then")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    enabled: bool = key(True, "serve HTTP: queues, topics, status")
    host: str = key("127.0.0.1", "address to listen on")
    port: int = key(6632, "port to listen on; 0 picks a free one")
    tls: bool = key(True, "speak TLS when tls.certificate is set; false = in clear also then")
    ssl_cert_path: Path | None = key(
        None, "certificate chain (PEM) for HTTP alone, instead of tls.certificate"
    )
    ssl_key_path: Path | None = key(None, "its private key (PEM)")
    max_header: Size = key(64 << 10, "largest request line and headers; above it 431")
    max_body: Size = key(64 << 20, "largest request body, also after decompression; above it 413")
    max_connections: int = key(20_000, "connections beyond this get 503")
    header_timeout: Seconds = key(
        10.0, "time for a request's headers to arrive; above it 408; 0 = no limit"
    )
    body_timeout: Seconds = key(
        30.0, "longest silence while a body arrives; above it 408; 0 = no limit"
    )
    body_min_rate: Size = key(
        1 << 10, "least bytes per second of a body, after body_timeout; below it 408; 0 = any"
    )
    idle_timeout: Seconds = key(
        75.0, "keep-alive connections without a request are closed after this; 0 = never"
    )
    send_timeout: Seconds = key(
        60.0, "disconnect a client that reads nothing of its answer for this long; 0 = never"
    )
    compress_from: Size = key(
        64 << 10, "gzip JSON and text answers of at least this size on request; 0 = never"
    )
    cors_origin: str = key(
        "",
        "origins of other web pages that may send requests, with commas "
        "(https://console.example); * = all",
    )
    hosts: str = key(
        "",
        "further host names of ours (a proxy's), with commas; *.example = all below, * = any; "
        "see docs/how-to/security.md",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WebsocketServer:
    enabled: bool = key(True, "serve the WebSocket protocol of topics")
    host: str = key("127.0.0.1", "address to listen on")
    port: int = key(9090, "port to listen on; 0 picks a free one")
    tls: bool = key(
        True, "speak TLS when HTTP does or tls.certificate is set; false = in clear also then"
    )
    ssl_cert_path: Path | None = key(None, "certificate chain (PEM); default: the HTTP server's")
    ssl_key_path: Path | None = key(None, "private key (PEM); default: the HTTP server's")
    max_message: Size = key(64 << 20, "largest message accepted from a client")
    max_connections: int = key(20_000, "connections beyond this are refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    certificate: Path | None = key(
        None, "certificate chain (PEM): HTTP, WebSocket and TCP speak TLS"
    )
    private_key: Path | None = key(
        None, "its private key (PEM, without a password); default: in the certificate's file"
    )
    client_ca: Path | None = key(None, "clients must show a certificate from this CA (PEM)")
    min_version: Literal["1.2", "1.3"] = key("1.2", "oldest TLS version to accept")
    reload_interval: Seconds = key(
        10.0, "how often to check the files for changes; 0 = only on SIGHUP"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    enabled: bool = key(
        False, "every request needs a token (JWT), except for skip_paths", "JWT_ENABLED"
    )
    algorithm: Literal["auto", "hs256", "rs256", "es256", "eddsa"] = key(
        "auto", "the one algorithm accepted; auto = those of the keys below", "JWT_ALGORITHM"
    )
    secret: Secret = key("", "shared secret for HS256, at least 32 bytes", "JWT_SECRET")
    public_key: str = key(
        "", "public key (PEM text or file) for RS256, ES256 or EdDSA", "JWT_PUBLIC_KEY"
    )
    jwks_url: str = key(
        "", "address or file of the identity provider's public keys (JWKS)", "JWT_JWKS_URL"
    )
    jwks_refresh: Seconds = key(
        3600.0, "how often they are fetched again", "JWT_JWKS_REFRESH_INTERVAL"
    )
    issuer: str = key("", "the `iss` a token must have; empty = any", "JWT_ISSUER")
    audience: str = key("", "the `aud` a token must have; empty = any", "JWT_AUDIENCE")
    clock_skew: Seconds = key(30.0, "how far the issuer's clock may be off", "JWT_CLOCK_SKEW")
    require_exp: bool = key(True, "reject tokens that never expire")
    skip_paths: str = key(
        "/,/health,/health/live,/health/ready,/metrics,/metrics.json,/metrics/prometheus,/docs,/openapi.json",
        "paths that need no token, with commas; one that ends in / stands for all below it",
        "JWT_SKIP_PATHS",
    )
    roles_claim: str = key(
        "role", "claim with a role; dots lead inside (realm_access.roles)", "JWT_ROLES_CLAIM"
    )
    roles_array_claim: str = key(
        "roles", "claim with an array of roles; the highest counts", "JWT_ROLES_ARRAY_CLAIM"
    )
    role_admin: str = key("admin", "role that may do everything", "JWT_ROLE_ADMIN")
    role_read_write: str = key(
        "read-write", "role that may push, pop, produce and configure", "JWT_ROLE_READ_WRITE"
    )
    role_read_only: str = key("read-only", "role that may only read", "JWT_ROLE_READ_ONLY")
    cache_size: int = key(10_000, "verified tokens remembered per process, each until it expires")
    tcp: Literal["token", "open"] = key(
        "token",
        "TCP: the first frame must be AUTH with a token; "
        "open = anyone who reaches the port is admin",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    url: PostgresUrl = key(
        "",
        "PostgreSQL 14 or later, several hosts allowed; empty = run the embedded one",
        "DATABASE_URL",
    )
    host: Hosts = key("", "instead of url: host, or several with commas", "PG_HOST")
    port: int = key(5432, "instead of url: port", "PG_PORT")
    name: str = key("postgres", "instead of url: database", "PG_DB")
    user: str = key("postgres", "instead of url: user", "PG_USER")
    password: Secret = key("", "instead of url: password", "PG_PASSWORD")
    db_schema: str = key("penstock", "schema of Penstock's tables and functions")
    pool_size: int = key(8, "connections per broker process", "DB_POOL_SIZE")
    acquire_timeout: Seconds = key(
        2.0, "if a connection or commit takes longer, the database counts as down"
    )
    statement_timeout: Seconds = key(30.0, "limit for one statement; 0 = none")
    read_url: PostgresUrl = key("", "a standby to list stored messages from; empty = the primary")
    browse_pool_size: int = key(2, "extra connections for lists, status and analytics")
    browse_timeout: Seconds = key(10.0, "limit for one statement of those; 0 = none")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRetention:
    """Which segments leave the local disk once the tier has them, the oldest first."""

    age: Seconds = key(0.0, "those whose newest record is older than this; 0 = none by age")
    bytes: Size = key(0, "keep at most this much per topic on the local disk; 0 = no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    enabled: bool = key(
        True,
        "keep and serve topics; false = queues only, no TCP and WebSocket (serve --no-topics)",
    )
    fsync: Literal["always", "group", "interval", "never"] = key(
        "group",
        "when to answer an append: after its own fsync, after a shared one, or after the write",
    )
    fsync_interval: Seconds = key(0.1, "the most time between fsyncs under `interval`")
    segment_bytes: Size = key(1 << 30, "roll the active segment when it is this large; 0 = never")
    segment_age: Seconds = key(0.0, "roll the active segment when it is this old; 0 = never")
    retention_bytes: Size = key(0, "keep at most this much per topic, in whole segments; 0 = all")
    retention_age: Seconds = key(
        0.0, "delete segments whose newest record is older than this; 0 = never"
    )
    retention_interval: Seconds = key(30.0, "how often to apply retention and segment_age")
    max_record: Size = key(64 << 20, "largest payload of one record")
    producer_expiry: Seconds = key(
        604800.0, "forget idempotent producers that were silent this long"
    )
    lease_time: Seconds = key(30.0, "how long a group member may hold a leased range")
    free_space_reserve: Size = key(64 << 20, "refuse appends when the disk has less than this free")
    scrub_interval: Seconds = key(
        604800.0, "how often sealed segments are read again and checked; 0 = only when asked"
    )
    scrub_rate: Size = key(16 << 20, "most bytes read per second for that; 0 = no limit")
    tier: str = key(
        "", "where sealed segments are copied to: s3://, gs://, az:// or file://; empty = nowhere"
    )
    tier_delay: Seconds = key(60.0, "how old the newest record of a segment is when it is copied")
    tier_interval: Seconds = key(
        10.0, "how often segments and the state of groups are copied to the tier"
    )
    tier_cache: Size = key(1 << 30, "most bytes of the tier kept on the local disk for readers")
    tier_grace: Seconds = key(
        3600.0, "how long an object that is no longer needed stays in the tier for its readers"
    )
    local_retention: LocalRetention = section(LocalRetention, "what leaves the local disk")
    adopt: bool = key(
        False, "with an empty data directory: open the topics that the tier has, and own it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    encryption_keys: dict[str, str] = key(
        {}, "key id -> 64 hex digits (AES-256); the last one encrypts"
    )
    encryption_key: Secret = key(
        "", "a single key, 64 hex digits", "PENSTOCK_ENCRYPTION_KEY", "QUEEN_ENCRYPTION_KEY"
    )
    default_batch: int = key(
        1, "messages per pop when the client names no batch", "DEFAULT_BATCH_SIZE"
    )
    default_timeout_ms: Milliseconds = key(
        30_000, "long-poll limit when the client names none", "DEFAULT_TIMEOUT"
    )
    default_subscription_mode: Literal["", "all", "new", "new-only"] = key(
        "", "where a new group starts when the client does not say", "DEFAULT_SUBSCRIPTION_MODE"
    )
    max_batch: int = key(10_000, "most messages one pop may take")
    max_items: int = key(
        10_000, "most items of one request: pushed, acknowledged or in a transaction; above it 413"
    )
    max_batch_bytes: Size = key(
        32 << 20,
        "most bytes of payload and headers one pop takes, unless its first message has more",
    )
    merge_max: int = key(500, "most items merged into one SQL call")
    retention_interval_ms: Milliseconds = key(
        300_000, "how often retention runs", "RETENTION_INTERVAL"
    )
    eviction_interval_ms: Milliseconds = key(
        60_000, "how often eviction and ttl run", "EVICTION_INTERVAL"
    )
    partition_cleanup_days: int = key(
        30, "remove empty partitions idle this long", "PARTITION_CLEANUP_DAYS"
    )
    poll_interval: Seconds = key(
        1.0, "how often waiting pops look again when no notification arrives"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    enabled: bool = key(
        True,
        "false = no push is answered before the database has it:"
        " for a disk that does not outlive the broker",
    )
    dir: Path | None = key(
        None, "buffer files; default: under the data directory", "FILE_BUFFER_DIR"
    )
    flush_ms: Milliseconds = key(100, "flush, fsync and probe interval", "FILE_BUFFER_FLUSH_MS")
    max_batch: int = key(
        100, "events per batch; a call to the database carries up to ten", "FILE_BUFFER_MAX_BATCH"
    )
    events_per_file: int = key(10_000, "most events in one file", "FILE_BUFFER_EVENTS_PER_FILE")
    retry_interval: Seconds = key(
        5.0, "retry failed files after this", "FILE_BUFFER_RETRY_INTERVAL"
    )
    startup_recovery_timeout: Seconds = key(
        3600.0,
        "longest time to store buffered messages before accepting requests",
        "FILE_BUFFER_STARTUP_RECOVERY_TIMEOUT",
    )
    max_bytes: Size = key(
        10 << 30, "most bytes buffered; above it pushes are refused", "FILE_BUFFER_MAX_BYTES"
    )
    free_space_reserve: Size = key(
        64 << 20, "refuse to buffer when the disk has less than this free"
    )
    replay_rate: int = key(0, "most events replayed per second; 0 = no limit")
    replay_pause: Seconds = key(
        0.01, "pause after each 1000 events replayed while other pushes run"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    enabled: bool = key(True, "wait longer after each failure in a row")
    multiplier: float = key(2.0, "factor per failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreaker:
    enabled: bool = key(True, "stop sending to a destination that is down")
    threshold: int = key(5, "failures in a row that open it")
    reset_timeout: Seconds = key(30.0, "time until a probe is let through")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    enabled: bool = key(False, "separate preparing (CPU) from sending (I/O)")
    preparer_count: int = key(0, "0 = number of cores")
    sender_count: int = key(0, "0 = twice the number of cores")
    channel_size: int = key(256, "prepared batches waiting for a sender")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveWorkers:
    enabled: bool = key(False, "scale workers with backlog and latency")
    min_workers: int = key(1, "never fewer")
    max_workers: int = key(0, "never more; 0 = four times the number of cores")


@dataclass(frozen=True, slots=True, kw_only=True)
class SendQueue:
    """The `exporter.queue` block of the seed: the defaults of every route."""

    type: Literal["memory", "disk"] = key("disk", "where to keep what does not fit in memory")
    enabled: bool = key(True, "run routes")
    path: Path | None = key(
        None, "directory of the routes' queues; default: under the data directory"
    )
    max_size: int = key(10_000, "most batches queued")
    max_bytes: Size = key(1 << 30, "most bytes queued")
    full_behavior: Literal["drop_oldest", "drop_newest", "block"] = key(
        "drop_oldest", "what to do when the queue is full"
    )
    block_timeout: Seconds = key(30.0, "longest wait under `block`")
    inmemory_blocks: int = key(2048, "blocks held in memory before spilling")
    chunk_size: Size = key(512 << 20, "size of one disk chunk")
    meta_sync_interval: Seconds = key(1.0, "how often fastqueue.meta is written")
    stale_flush: Seconds = key(30.0, "memory blocks go to disk after this much inactivity")
    write_buffer_size: Size = key(256 << 10, "bytes coalesced into one write")
    compression: Literal["none", "snappy", "zstd", "gzip"] = key(
        "snappy", "compression of stored blocks"
    )
    always_queue: bool = key(True, "everything goes through the queue; false is refused")
    fsync: Literal["always", "interval", "never"] = key(
        "always",
        "when a push is answered: synced, written (synced every meta_sync_interval), in memory",
    )
    free_space_reserve: Size = key(
        64 << 20, "queue nothing more when the disk has less than this free"
    )
    failover_max_size: int = key(
        1000, "under fsync `never`: blocks held in memory beyond the usual while the disk fails"
    )
    failover_max_bytes: Size = key(256 << 20, "the same in bytes")
    drain_order: Literal["fifo", "newest_first", "mixed"] = key("fifo", "which batches go first")
    fresh_share: Share = key(
        0.5, "under `mixed`: share of sends that go to the newest while a backlog drains"
    )
    catchup_rate: float = key(
        0.0, "most batches per second taken from a backlog on disk; 0 = no limit"
    )
    max_attempts: int = key(
        0, "failed sends after which a batch goes to the dead letters; 0 = never"
    )
    max_age: Seconds = key(0.0, "age at which a batch goes to the dead letters; 0 = never")
    workers: int = key(0, "0 = twice the number of cores")
    max_concurrent_sends: int = key(4, "sends in flight per sender")
    global_send_limit: int = key(0, "sends in flight in all; 0 = eight times the number of cores")
    retry_interval: Seconds = key(5.0, "first retry delay")
    max_retry_delay: Seconds = key(300.0, "longest retry delay")
    memory_percent: Share = key(0.0, "size the queue as a share of memory; 0 = use max_bytes")
    memory_limit_ratio: Share = key(0.85, "share of the (cgroup) memory limit counted as ours")
    adaptive_enabled: bool = key(True, "shrink the memory layer when memory is short")
    target_utilization: Share = key(0.85, "utilisation adaptive sizing aims at")
    backoff: Backoff = section(Backoff, "exponential backoff")
    circuit_breaker: CircuitBreaker = section(CircuitBreaker, "circuit breaker")
    pipeline_split: PipelineSplit = section(PipelineSplit, "preparers and senders")
    adaptive_workers: AdaptiveWorkers = section(AdaptiveWorkers, "worker scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    queue: SendQueue = section(SendQueue, "defaults of every route's send queue")
    certificates: Path | None = key(
        None,
        "directory of the CA files that routes made over the API may name; "
        "default: under the data directory",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    max_series: int = key(
        1000,
        "values of one metric; queues, groups and topics beyond it are added up as (other)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server_name: str = key("penstock", "name shown in status and logs")
    log_level: Literal["debug", "info", "warning", "error"] = key(
        "info", "log lines of this level and above", "LOG_LEVEL"
    )
    log_format: Literal["auto", "text", "json"] = key(
        "auto", "auto = text on a terminal, JSON lines otherwise"
    )
    data_directory: Path = key(
        Path("penstock-data"), "topics, buffers, send queues and the embedded database"
    )
    thread_pool_size: int = key(
        0, "threads for blocking work (fsync, compression); 0 = number of cores"
    )
    workers: int = key(1, "processes that share the HTTP port")
    max_bodies: Size = key(
        256 << 20,
        "limit for all requests in progress, per process; "
        "beyond it, large ones are rejected (HTTP 503)",
    )
    shutdown_delay: Seconds = key(
        0.0,
        "first /health/ready says 503 for this long and all else is served,"
        " so that load balancers notice",
    )
    shutdown_timeout: Seconds = key(
        10.0, "time to finish open requests when stopping, after shutdown_delay"
    )
    database: Database = section(Database, "PostgreSQL")
    tcp_server: TcpServer = section(TcpServer, "binary protocol")
    http_server: HttpServer = section(HttpServer, "HTTP")
    websocket_server: WebsocketServer = section(WebsocketServer, "WebSocket")
    tls: Tls = section(Tls, "certificates of what listens")
    auth: Auth = section(Auth, "tokens and roles")
    topics: Topics = section(Topics, "topics")
    queues: Queues = section(Queues, "queues")
    buffer: Buffer = section(Buffer, "QoS 0 and failover files")
    exporter: Exporter = section(Exporter, "export routes' defaults")
    routes: dict[str, Any] = key({}, "named export routes")
    metrics: Metrics = section(Metrics, "what /metrics shows")

    @property
    def private_directory(self) -> Path:
        """What is ours in the data directory, beside the topics' directories (`.penstock` is no
        topic name).
        """
        return self.data_directory / ".penstock"
