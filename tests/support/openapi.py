"""Hold a running server to its own OpenAPI document, with requests that schemathesis makes up from
it.

    check_document("http://127.0.0.1:6632")

For every operation, valid and invalid requests are generated (the same ones in every run) and each
answer is judged: no server error, a documented status, content type and shape, invalid data
refused, unknown methods refused.
"""

from collections.abc import Callable
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode


def check_document(
    url: str,
    examples: int = 25,
    *,
    skip: Callable[[str, str], bool] = lambda method, path: False,
    adjust: Callable[[Case], None] = lambda case: None,
    excluded_checks: list[Any] | None = None,
) -> int:
    """Check every operation with `examples` valid and as many invalid requests; how many requests
    were sent.

    `skip(method, path)` leaves operations out; `adjust(case)` may change a request before it is
    sent (a long poll's timeout, say).
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    sent = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if skip(operation.method, operation.path):
            continue
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not _can_be_wrong(operation):
                continue

            @settings(
                max_examples=examples,
                derandomize=True,
                database=None,
                deadline=None,
                phases=(Phase.explicit, Phase.generate),
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Case) -> None:
                nonlocal sent
                case.body = _with_plain_integers(case.body)
                adjust(case)
                sent += 1
                case.call_and_validate(excluded_checks=excluded_checks or [])

            check()
    return sent


def _can_be_wrong(operation: Any) -> bool:
    """Whether there is anything in a request to this operation that could be invalid."""
    body = operation.definition.raw.get("requestBody", {"content": {}})
    return bool(len(operation.query)) or any(
        "schema" in about for about in body["content"].values()
    )


def _with_plain_integers(value: Any) -> Any:
    """To JSON Schema 3.0 is an integer; we ask for an integer's usual spelling, and a schema cannot
    say so.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _with_plain_integers(item) for key, item in value.items()}
    return [_with_plain_integers(item) for item in value] if isinstance(value, list) else value
