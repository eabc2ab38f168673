from pathlib import Path

import pytest

from penstock.config import load, show
from penstock.config.load import leaves
from penstock.errors import ConfigError

SEED_003 = """
server_name: "MyPersistentEventQueue"
log_level: "info"
data_directory: "./event_queue_server_data_from_yaml"
thread_pool_size: 0 # 0 for hardware_concurrency

tcp_server:
  enabled: true
  host: "0.0.0.0"
  port: 12345

http_server:
  enabled: true
  host: "0.0.0.0"
  port: 8080
  ssl_cert_path: "./certs/server.crt" # For HTTPS
  ssl_key_path: "./certs/server.key"  # For HTTPS

websocket_server:
  enabled: true
  host: "0.0.0.0"
  port: 9090
"""

SEED_004 = """
exporter:
  queue:
    type: disk
    enabled: true
    path: ./queue
    max_size: 10000
    max_bytes: 1Gi
    full_behavior: drop_oldest
    inmemory_blocks: 2048
    chunk_size: 512Mi
    meta_sync_interval: 1s
    write_buffer_size: 256Ki
    compression: snappy
    always_queue: true
    workers: 0
    backoff:
      enabled: true
      multiplier: 2.0
    circuit_breaker:
      enabled: true
      threshold: 5
      reset_timeout: 30s
    pipeline_split:
      enabled: false
      preparer_count: 0
      sender_count: 0
      channel_size: 256
    adaptive_workers:
      enabled: false
      min_workers: 1
      max_workers: 0
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "penstock.yaml"
    file.write_text(text)
    return file


def test_the_yaml_of_seed_003_loads_unmodified(tmp_path):
    config = load(written(tmp_path, SEED_003), environ={}).config
    assert config.server_name == "MyPersistentEventQueue"
    assert config.data_directory == Path("event_queue_server_data_from_yaml")
    assert (config.http_server.host, config.http_server.port) == ("0.0.0.0", 8080)
    assert config.http_server.ssl_cert_path == Path("certs/server.crt")


def test_the_exporter_block_of_seed_004_loads_unmodified(tmp_path):
    queue = load(written(tmp_path, SEED_004), environ={}).config.exporter.queue
    assert (queue.max_bytes, queue.chunk_size, queue.write_buffer_size) == (
        1 << 30,
        512 << 20,
        256 << 10,
    )
    assert (queue.meta_sync_interval, queue.circuit_breaker.reset_timeout) == (1.0, 30.0)
    assert queue.full_behavior == "drop_oldest"


def test_a_section_whose_keys_are_all_commented_out_is_fine(tmp_path):
    assert (
        load(written(tmp_path, "http_server:\n#  port: 1\n"), environ={}).config.http_server.port
        == 6632
    )


def test_flags_win_over_environment_over_yaml_over_defaults(tmp_path):
    file = written(tmp_path, "http_server: {port: 1}\ntcp_server: {port: 1}\nlog_level: error\n")
    environ = {"PENSTOCK_HTTP_SERVER_PORT": "2", "PENSTOCK_TCP_SERVER_PORT": "2"}
    loaded = load(file, environ, {"http_server.port": 3})
    config = loaded.config
    assert (config.http_server.port, config.tcp_server.port, config.log_level) == (3, 2, "error")
    assert config.websocket_server.port == 9090
    origins = {name: origin for name, _, origin in show(loaded)}
    assert origins["http_server.port"] == "flag"
    assert origins["tcp_server.port"] == "environment PENSTOCK_TCP_SERVER_PORT"
    assert origins["log_level"] == str(file)
    assert origins["websocket_server.port"] == "default"


def test_the_seeds_environment_names_work():
    environ = {
        "FILE_BUFFER_FLUSH_MS": "50",
        "FILE_BUFFER_DIR": "/spool",
        "PG_HOST": "db",
        "PG_PASSWORD": "s3cret",
        "DEFAULT_TIMEOUT": "1000",
    }
    config = load(environ=environ).config
    assert config.buffer.flush_interval == 0.05
    assert config.buffer.dir == Path("/spool")
    assert config.database.host == "db"
    assert config.queues.default_timeout == 1


def test_durations_are_durations_and_former_keys_in_milliseconds_still_work(tmp_path):
    file = tmp_path / "penstock.yaml"
    file.write_text("queues: {retention_interval: 5m, eviction_interval_ms: 1500}\n")
    environ = {"RETENTION_INTERVAL": "2m", "PENSTOCK_BUFFER_FLUSH_MS": "20"}
    config = load(file, environ).config
    assert (config.queues.retention_interval, config.queues.eviction_interval) == (120, 1.5)
    assert config.buffer.flush_interval == 0.02
    config = load(
        file, {}, {"queues.default_timeout": "30s", "queues.retention_interval": 7}
    ).config
    assert (config.queues.default_timeout, config.queues.retention_interval) == (30, 7)
    with pytest.raises(ConfigError, match=r"eviction_interval = 'soon': expected a duration"):
        load(environ={"EVICTION_INTERVAL": "soon"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "htp_server: {port: 1}",
            "htp_server = {'port': 1}: no such key ({file}); did you mean http_server",
        ),
        (
            "http_server: {prot: 1}",
            "http_server.prot = 1: no such key ({file}); did you mean http_server.port?",
        ),
        (
            "http_server: {port: many}",
            "http_server.port = 'many': expected a whole number ({file})",
        ),
        (
            "http_server: {port: -1}",
            "http_server.port = -1: expected a whole number that is not negative ({file})",
        ),
        ("http_server: 80", "http_server: expected a section with keys, got 80 ({file})"),
        (
            "topics: {fsync: grop}",
            "topics.fsync = 'grop': expected one of always, group, interval, never; did you",
        ),
        (
            "topics: {segment_bytes: 3 apples}",
            "expected a size such as 4096, 256Ki or 1Gi ({file})",
        ),
        ("topics: {segment_age: soon}", "expected a duration such as 5, 100ms or 5m ({file})"),
        (
            "tcp_server: {enabled: maybe}",
            "tcp_server.enabled = 'maybe': expected true or false ({file})",
        ),
        ("database: {url: [1]}", "database.url = ***: expected text ({file})"),
        ("- a\n- b", "{file}: expected a mapping of keys at the top, got list"),
        ("a: [", "{file} is not valid YAML"),
        ("routes:\n  r: {}\n  s: {}\n  r: {}\n", "{file} is not valid YAML: 'r' is given twice"),
        ("topics: {segment_age: .inf}", "expected a duration such as 5, 100ms or 5m ({file})"),
        (
            "exporter: {queue: {memory_percent: 85}}",
            "expected a share between 0 and 1, such as 0.1 or 10% ({file})",
        ),
    ],
)
def test_a_mistake_is_named_with_key_value_expectation_and_suggestion(tmp_path, text, said):
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load(file, environ={})
    assert said.replace("{file}", str(file)) in str(refused.value)


def test_all_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as refused:
        load(written(tmp_path, "log_level: loud\nworkers: few\n"), environ={})
    assert len(str(refused.value).splitlines()) == 2


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"cannot read the configuration file .*nowhere\.yaml: No such file"
    ):
        load(tmp_path / "nowhere.yaml", environ={})


def test_an_unknown_environment_variable_is_reported_not_fatal():
    loaded = load(environ={"PENSTOCK_HTTP_SERVER_PROT": "1", "PENSTOCK_SERVICE_HOST": "10.0.0.1"})
    assert any("did you mean PENSTOCK_HTTP_SERVER_PORT?" in warning for warning in loaded.warnings)


def test_secrets_are_masked_wherever_configuration_is_shown():
    environ = {"DATABASE_URL": "postgresql://me:s3cret@db/app", "QUEEN_ENCRYPTION_KEY": "ab" * 32}
    route = {"destination": {"type": "http", "headers": {"Authorization": "Bearer t0ken"}}}
    flags = {"queues.encryption_keys": {"k1": "cd" * 32}, "routes": {"lake": route}}
    shown = "\n".join("\t".join(row) for row in show(load(environ=environ, flags=flags)))
    assert "s3cret" not in shown
    assert "abab" not in shown
    assert "cdcd" not in shown
    assert "t0ken" not in shown
    assert "{k1: ***}" in shown


def test_what_config_show_prints_reads_back_as_the_same_configuration():
    loaded = load(environ={})
    again = load(
        environ={},
        flags={name: value for name, value, _ in show(loaded) if value not in ("", '""', "{}")},
    )
    assert again.config == loaded.config


def test_every_key_has_a_help_text():
    assert [name for name, _, item in leaves() if not item.metadata["help"]] == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"DATABASE_URL": "mysql://x"},
            "postgresql://user:password@host:5432/database, not mysql://...",
        ),
        ({"DATABASE_URL": "host=db dbname=app"}, "not a URL without postgresql:// in front"),
        ({"DATABASE_URL": "postgresql://db:port/app"}, "a port from 1 to 65535 after host:"),
        (
            {"DATABASE_URL": "postgresql://me:s3/cret@db/app"},
            "in a password / : @ are written %2F %3A %40",
        ),
        ({"DATABASE_URL": "postgresql:///app?host=/run&port=70000"}, "a port from 1 to 65535"),
        ({"PG_HOST": "one,two:five"}, "host or host:port, several with commas"),
    ],
)
def test_what_cannot_be_the_address_of_a_postgresql_is_refused_without_showing_its_password(
    given, expected
):
    with pytest.raises(ConfigError) as refused:
        load(environ=given)
    assert expected in str(refused.value)
    assert "s3" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgres://db",
        "postgresql://me:p%40s:s@one:5433,[::1]:5432,three/app?sslmode=disable",
        "postgresql:///app?host=/run/a,/run/b&port=5432,5433",
        "postgresql://",
    ],
)
def test_every_form_of_a_postgresql_url_is_taken(url):
    assert load(environ={"DATABASE_URL": url}).config.database.url == url
