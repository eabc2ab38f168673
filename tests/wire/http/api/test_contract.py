"""The contract as a whole: its routes, its document, what later versions may send."""

import json
import re

import jsonschema

from penstock.wire.http.examples import recorded

CONTRACT = """
POST /api/v1/push                                    GET /api/v1/pop
GET /api/v1/pop/queue/{}                             GET /api/v1/pop/queue/{}/partition/{}
POST /api/v1/ack                                     POST /api/v1/ack/batch
POST /api/v1/lease/{}/extend                         POST /api/v1/transaction
POST /api/v1/configure                               POST /api/v1/stats/refresh
GET /api/v1/dlq                                      POST /api/v1/dlq/requeue
DELETE /api/v1/dlq                                   GET /api/v1/consumer-groups
GET /api/v1/consumer-groups/lagging                  GET /api/v1/consumer-groups/{}
DELETE /api/v1/consumer-groups/{}                    DELETE /api/v1/consumer-groups/{}/queues/{}
POST /api/v1/consumer-groups/{}/subscription         POST /api/v1/consumer-groups/{}/queues/{}/seek
POST /api/v1/consumer-groups/{}/queues/{}/partitions/{}/seek
GET /api/v1/messages                                 GET /api/v1/messages/{}/{}
DELETE /api/v1/messages/{}/{}                        POST /api/v1/messages/{}/{}/retry
POST /api/v1/messages/{}/{}/dlq                      DELETE /api/v1/queues/{}/clear
POST /api/v1/traces                                  GET /api/v1/traces/{}/{}
GET /api/v1/traces/by-name/{}                        GET /api/v1/traces/names
GET /api/v1/resources/queues                         GET /api/v1/resources/queues/{}
DELETE /api/v1/resources/queues/{}                   GET /api/v1/resources/partitions
GET /api/v1/resources/namespaces                     GET /api/v1/resources/tasks
GET /api/v1/resources/overview                       GET /api/v1/status
GET /api/v1/status/queues                            GET /api/v1/status/queues/{}
GET /api/v1/status/queues/{}/messages                GET /api/v1/status/analytics
GET /api/v1/status/buffers                           GET /api/v1/analytics/system-metrics
GET /api/v1/analytics/worker-metrics                 GET /api/v1/analytics/queue-lag
GET /api/v1/analytics/queue-ops                      GET /api/v1/analytics/queue-parked-replicas
GET /api/v1/analytics/retention                      GET /api/v1/analytics/postgres-stats
GET /health                                          GET /metrics
GET /metrics/prometheus                              GET /api/v1/system/maintenance
POST /api/v1/system/maintenance                      GET /api/v1/system/maintenance/pop
POST /api/v1/system/maintenance/pop                  GET /api/v1/system/shared-state
GET /internal/api/shared-state/stats                 GET /internal/api/inter-instance/stats
POST /internal/api/notify
"""


def test_every_route_of_the_contract_is_served(api):
    paths = api.client.get("/openapi.json").json()["paths"]
    served = {
        f"{method.upper()} {re.sub('{.*?}', '{}', path)}"
        for path, methods in paths.items()
        for method in methods
    }
    assert {
        route.strip() for route in re.split(r"  +|\n", CONTRACT) if route.strip()
    } - served == set()


def test_the_document_says_what_parameters_mean_and_shows_examples_that_fit(api):
    made = api.client.get("/openapi.json").json()
    served = {}
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            name = f"{method.upper()} {path}"
            served[name] = operation
            for parameter in operation.get("parameters", ()):
                assert parameter.get("description"), f"{name}: {parameter['name']}"
            contents = [answer.get("content", {}) for answer in operation["responses"].values()][:1]
            contents.append(operation.get("requestBody", {}).get("content", {}))
            for about in (one["application/json"] for one in contents if "application/json" in one):
                schema = about["schema"] | {"components": made["components"]}
                jsonschema.validate(about["example"], schema)
    assert recorded().keys() <= served.keys(), "run tools/api-examples again"


def test_whatever_the_database_refuses_no_sql_text_reaches_a_client(api, queue):
    api.push(queue, 1)
    nowhere = "00000000-0000-0000-0000-000000000000"
    huge = 10**12
    for method, path, body, query in (
        ("POST", "configure", {"queue": queue, "options": {"leaseTime": huge}}, {}),
        ("POST", "configure", {"queue": queue, "options": {"priority": -huge}}, {}),
        ("POST", "configure", {"queue": queue, "namespace": "\x00"}, {}),
        ("GET", f"pop/queue/{queue}", None, {"batch": huge, "partitions": huge}),
        ("GET", f"pop/queue/{queue}", None, {"consumerGroup": "\x00"}),
        (
            "GET",
            f"pop/queue/{queue}",
            None,
            {"consumerGroup": "g", "subscriptionFrom": "9999999-01-01T00:00:00Z"},
        ),
        ("GET", "pop", None, {"namespace": "\x00"}),
        ("POST", "ack", {"transactionId": "\x00", "partitionId": nowhere}, {}),
        ("POST", "ack", {"transactionId": "x", "partitionId": "'; DROP TABLE messages; --"}, {}),
        ("POST", "ack", {"transactionId": "x", "partitionId": nowhere, "status": "'"}, {}),
        ("POST", "lease/not-a-uuid/extend", {"seconds": huge}, {}),
        ("POST", f"lease/{nowhere}/extend", {"seconds": huge}, {}),
        ("GET", "messages", None, {"queue": queue, "from": "yesterday", "limit": huge}),
        ("GET", "messages", None, {"queue": "\x00"}),
        ("GET", f"messages/{nowhere}/'", None, {}),
        ("GET", "dlq", None, {"queue": "\x00", "offset": huge}),
        ("GET", "traces/by-name/%00", None, {}),
        ("DELETE", "resources/queues/%00", None, {}),
        ("DELETE", "consumer-groups/%00", None, {}),
        ("POST", "consumer-groups/g/queues/none/seek", {"timestamp": "never"}, {}),
        (
            "GET",
            f"pop/queue/{queue}",
            None,
            {"consumerGroup": "".join(str(n) for n in range(2000))},
        ),
        ("POST", f"messages/{nowhere}/x/dlq", {"error": "\x00", "consumerGroup": "\x00"}, {}),
    ):
        content = None if body is None else json.dumps(body).encode()
        answer = api.client.request(
            method, f"/api/v1/{path}", content=content, params=query or None
        )
        assert answer.status_code < 500, (method, path, body, query, answer.text)
        for word in (
            "asyncpg",
            "psql",
            "SELECT",
            "INSERT",
            "syntax",
            "relation",
            "int4",
            "out of range for type",
            "0x00",
        ):
            assert word not in answer.text, (path, answer.text)
    assert api.pop(queue, consumerGroup="still there")


def test_unknown_fields_of_a_later_version_are_ignored_and_unknown_options_refused(api, queue):
    item = {"queue": queue, "payload": 1, "someFutureField": {"a": 1}}
    (pushed,) = api.post("push", {"items": [item], "clientVersion": "9.9"}, 201)
    assert pushed["status"] == "queued"
    (message,) = api.pop(queue, someFutureParameter="7", autopilot="true")
    ids = {name: message[name] for name in ("transactionId", "partitionId", "leaseId")}
    (acked,) = api.post("ack", {**ids, "status": "completed", "someFutureField": 1})
    assert acked["success"]
    refused = api.post("configure", {"queue": queue, "options": {"someFutureOption": 1}}, 400)
    assert "someFutureOption" in refused["error"]  # it would silently not be in force
    refused = api.post(
        "configure", {"queue": queue, "leaseTime": 5}, 400
    )  # nor would an option beside `options`
    assert "leaseTime must be in options" in refused["error"]
