"""Every operation says what it answers, and a broker answers that: the session of
`tools/api-examples`, whose whole answers are held against the OpenAPI document.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest

from penstock.contract import operations as contract
from penstock.contract.operation import Operation
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess

# What the client makes of answers, by operation.
DECODED: dict[str, Any] = {
    f"{one.method} {one.path}": one.answer
    for one in vars(contract).values()
    if isinstance(one, Operation) and one.answer is not NoneType
}
# The fields that clients of Queen MQ know, by operation, as paths into the answers of the session.
QUEEN = json.loads((Path(__file__).parent / "queen_fields.json").read_text())
TOOL = Path(__file__).parents[2] / "tools/api-examples"


@pytest.fixture(scope="module")
def session(postgres, tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document, and what the operations of the session answered."""
    directory = tmp_path_factory.mktemp("answers")
    settings = {"topics__tier": directory / "tier"}
    url = fresh_database(postgres)
    with BrokerProcess(directory / "data", database_url=url, **settings) as broker:
        document = httpx.get(f"{broker.url}/openapi.json").json()
        played = directory / "played.json"
        subprocess.run([sys.executable, TOOL, broker.url, played], check=True, timeout=110)
    return document, json.loads(played.read_text())


def strict(value: Any) -> Any:
    """A schema that allows no fields but those it names."""
    if isinstance(value, list):
        return [strict(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: strict(item) for key, item in value.items()}
    if isinstance(made.get("properties"), dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def answers(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The schemas of the JSON answers, by operation."""
    schemas = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for status, about in operation["responses"].items():
                if status.startswith("2") and "application/json" in about.get("content", {}):
                    schema = about["content"]["application/json"].get("schema", {})
                    schemas[f"{method.upper()} {path}"] = schema
    return schemas


def is_queens(document: dict[str, Any], name: str) -> bool:
    """Whether an operation is of Queen MQ's dialect: its answers are the recorded ones."""
    method, path = name.split(" ")
    return "queen" in document["paths"][path][method.lower()].get("tags", ())


def test_every_operation_names_the_type_of_its_answer(session):
    document, _ = session
    without = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            good = {s: a for s, a in operation["responses"].items() if s.startswith("2")}
            assert good, f"{method} {path} never succeeds"
            if good.keys() != {"204"} and not any(one.get("content") for one in good.values()):
                without.append(f"{method} {path}")
    untyped = [
        name
        for name, schema in answers(document).items()
        if not is_queens(document, name)
        and not ({"$ref", "anyOf", "items"} & schema.keys() or schema.get("additionalProperties"))
    ]
    assert (without, untyped) == ([], [])


def test_every_answer_has_the_shape_that_is_documented(session):
    document, played = session
    schemas = answers(document)
    components = strict(document["components"])
    for name, exchange in played.items():
        if "answer" in exchange:
            schema = strict(schemas[name]) | {"components": components}
            errors = jsonschema.Draft202012Validator(schema).iter_errors(exchange["answer"])
            assert [f"{error.json_path}: {error.message[:200]}" for error in errors] == [], name


def test_every_example_fits_its_schema(session):
    document, _ = session
    wrong = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for part in (operation.get("requestBody", {}), *operation["responses"].values()):
                content = part.get("content", {}).get("application/json", {})
                if "example" in content:
                    schema = strict(content["schema"]) | strict(
                        {"components": document["components"]}
                    )
                    errors = jsonschema.Draft202012Validator(schema).iter_errors(content["example"])
                    wrong += [
                        f"{method} {path} {one.json_path}: {one.message[:200]}" for one in errors
                    ]
    assert wrong == [], "run tools/api-examples again"


def test_every_operation_is_played(session):
    document, played = session
    assert " ".join(sorted(answers(document).keys() - played.keys())) == ""


@pytest.mark.parametrize("operation", DECODED)
def test_the_client_understands_every_answer(session, operation):
    _, played = session
    text = json.dumps(played[operation]["answer"]).encode()
    msgspec.json.decode(text, type=DECODED[operation])


def fields(value: Any, path: str = "") -> set[str]:
    """The paths of all fields in an answer."""
    if isinstance(value, dict):
        return set().union(*({f"{path}.{k}"} | fields(v, f"{path}.{k}") for k, v in value.items()))
    if isinstance(value, list):
        return set().union(*(fields(item, f"{path}[]") for item in value))
    return set()


@pytest.mark.parametrize("operation", QUEEN)
def test_clients_of_queen_find_every_field_that_they_know(session, operation):
    _, played = session
    assert set(QUEEN[operation]) - fields(played[operation]["answer"]) == set()
