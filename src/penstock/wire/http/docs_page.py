"""The OpenAPI document as a page for people: one HTML text, no script or font from elsewhere."""

import json
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 small { font-weight: normal; opacity: .6; font-size: 50%; }
h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; }
summary { padding: .45rem .8rem; cursor: pointer; }
summary b { display: inline-block; min-width: 4.2rem; }
summary i { opacity: .7; font-style: normal; margin-left: .8rem; }
details > div { padding: 0 .8rem .8rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .2rem .6rem .2rem 0; vertical-align: top; }
pre { background: var(--soft); padding: .6rem; border-radius: 6px; overflow: auto; }
code { font-family: ui-monospace, monospace; }
input { font: inherit; width: 100%; padding: .4rem .6rem; box-sizing: border-box; }
"""
_SCRIPT = """
document.querySelector("input").addEventListener("input", function () {
  const words = this.value.toLowerCase();
  for (const item of document.querySelectorAll("details"))
    item.hidden = !item.textContent.toLowerCase().includes(words);
});
"""


def page(document: dict[str, Any]) -> str:
    title, version = escape(document["info"]["title"]), escape(document["info"]["version"])
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = operation.get("tags", ["other"])[0]
            by_tag.setdefault(tag, []).append(_operation(path, method, operation))
    sections = "".join(f"<h2>{escape(tag)}</h2>{''.join(items)}" for tag, items in by_tag.items())
    types = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"<div>{_schema(schema)}</div></details>"
        for name, schema in sorted(document["components"]["schemas"].items())
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f'<h1>{title} <small>{version} · <a href="openapi.json">openapi.json</a></small></h1>'
        f'<input placeholder="Filter by path, parameter or word" autofocus>{sections}'
        f"<h2>Types</h2>{types}"
        f"<script>{_SCRIPT}</script></html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    parts = []
    parameters = operation.get("parameters", [])
    if parameters:
        rows = "".join(map(_parameter, parameters))
        parts.append(f"<table><tr><th>Parameter<th>In<th>Type<th>Default<th></tr>{rows}</table>")
    if "requestBody" in operation:
        needed = "" if operation["requestBody"]["required"] else " (optional)"
        parts.append(f"<p>Body{needed}</p>{_content(operation['requestBody']['content'])}")
    for status, answer in operation["responses"].items():
        parts.append(f"<p>{escape(status)} {escape(answer['description'])}</p>")
        parts.append(_content(answer.get("content", {})))
    return (
        f"<details><summary><b>{escape(method.upper())}</b><code>{escape(path)}</code>"
        f"<i>{escape(operation.get('summary', ''))}</i></summary>"
        f"<div>{''.join(parts)}</div></details>"
    )


def _parameter(parameter: dict[str, Any]) -> str:
    schema = parameter["schema"]
    kind = schema.get("type") or " or ".join(
        str(one.get("type", _name(one))) for one in schema.get("anyOf", [schema])
    )
    default = (
        "required"
        if parameter["required"]
        else json.dumps(schema["default"])
        if "default" in schema
        else ""
    )
    about = parameter.get("description", "")
    return (
        f"<tr><td><code>{escape(parameter['name'])}</code><td>{escape(parameter['in'])}"
        f"<td>{escape(str(kind))}<td>{escape(default)}<td>{escape(about)}</tr>"
    )


def _content(content: dict[str, Any]) -> str:
    return "".join(
        _schema(about["schema"]) if about.get("schema") else f"<pre>{escape(kind)}</pre>"
        for kind, about in content.items()
    )


def _schema(schema: dict[str, Any]) -> str:
    name = _name(schema)
    if name:
        return f'<p><a href="#{escape(name)}"><code>{escape(name)}</code></a></p>'
    return f"<pre>{escape(json.dumps(schema, indent=2))}</pre>"


def _name(schema: dict[str, Any]) -> str:
    return str(schema.get("$ref", "")).rsplit("/", 1)[-1]
