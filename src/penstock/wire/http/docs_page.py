"""The OpenAPI document as a page for people: every operation with its parameters, its bodies and
answers by example, types written out in place, and the curl line that does it.

One HTML text that needs nothing from elsewhere. Its style and script are part of it and named in
`POLICY` by their hashes, so that nothing else runs on it.
"""

import base64
import hashlib
import json
import shlex
from html import escape
from typing import Any
from urllib.parse import quote, urlencode

from penstock.wire.http.openapi import ref_name

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --quiet: #666; --get: #0b6bcb;
  --post: #1a7f37; --put: #9a6700; --patch: #8250df; --delete: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --quiet: #aaa; --get: #6cb6ff; --post: #57ab5a;
  --put: #daaa3f; --patch: #b083f0; --delete: #f47067; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 small { font-weight: normal; color: var(--quiet); font-size: 50%; }
h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
h4 { margin: 1rem 0 .2rem; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; }
details details { border: 0; margin: 0; }
summary { padding: .45rem .8rem; cursor: pointer; overflow-wrap: anywhere; }
details details summary { padding: .2rem 0; color: var(--quiet); }
summary b { display: inline-block; min-width: 4.4rem; color: var(--verb); }
.get { --verb: var(--get); } .post { --verb: var(--post); } .put { --verb: var(--put); }
.patch { --verb: var(--patch); } .delete { --verb: var(--delete); }
.get, .post, .put, .patch, .delete { border-left: 4px solid var(--verb); }
summary i, .type { color: var(--quiet); font-style: normal; margin-left: .8rem; }
details > div { padding: 0 .8rem .8rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .2rem .6rem .2rem 0; vertical-align: top; }
pre { background: var(--soft); padding: .6rem; border-radius: 6px; overflow: auto;
  margin: .3rem 0; }
code, pre { font-family: ui-monospace, monospace; font-size: 13px; }
.fields { list-style: none; margin: 0; padding-left: 1rem; border-left: 1px solid var(--line); }
input { font: inherit; width: 100%; padding: .4rem .6rem; box-sizing: border-box; }
"""
_SCRIPT = """
const filter = document.querySelector("input");
filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase();
  for (const item of document.querySelectorAll("main > section > details"))
    item.hidden = !item.textContent.toLowerCase().includes(words);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target !== filter) { event.preventDefault(); filter.focus(); }
});
document.getElementById("base").textContent = location.href.split("/docs")[0];
const opened = location.hash && document.getElementById(location.hash.slice(1));
if (opened) { opened.open = true; opened.scrollIntoView(); }
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(document: dict[str, Any]) -> str:
    title, version = escape(document["info"]["title"]), escape(document["info"]["version"])
    types = document["components"]["schemas"]
    sections: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = operation.get("tags", ["other"])[0]
            sections.setdefault(tag, []).append(_Operation(path, method, operation, types).html())
    shown = "".join(
        f"<section><h2>{escape(tag)}</h2>{''.join(items)}</section>"
        for tag, items in sections.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f'<h1>{title} <small>{version} · <a href="openapi.json">openapi.json</a></small></h1>'
        "<p>The curl lines below need the address of the broker, and a token where it asks for one:"
        '</p><pre>export PENSTOCK_URL=<span id="base"></span></pre>'
        '<input aria-label="Filter" placeholder="Filter by path, parameter or word (/)" autofocus>'
        f"<main>{shown}</main><script>{_SCRIPT}</script></html>"
    )


class _Operation:
    def __init__(
        self, path: str, method: str, operation: dict[str, Any], types: dict[str, Any]
    ) -> None:
        self._path = path
        self._method = method
        self._operation = operation
        self._types = types
        self._parameters = operation.get("parameters", [])

    def html(self) -> str:
        operation = self._operation
        role = f"<p>Role: {escape(operation['x-role'])}</p>" if "x-role" in operation else ""
        parts = [role, f"<pre>{escape(self.curl())}</pre>"]
        if self._parameters:
            rows = "".join(map(self._parameter, self._parameters))
            parts.append(f"<table><tr><th>Parameter<th>Type<th>Default<th></tr>{rows}</table>")
        if body := operation.get("requestBody"):
            parts.append(f"<h4>Body{'' if body['required'] else ' (optional)'}</h4>")
            parts.append(self._content(body["content"]))
        for status, answer in operation["responses"].items():
            if status == "default":
                continue  # the same for all: said once, in the document
            parts.append(f"<h4>{escape(status)} {escape(answer['description'])}</h4>")
            parts.append(self._content(answer.get("content", {})))
        name = escape(operation["operationId"])
        return (
            f'<details class="{escape(self._method)}" id="{name}"><summary>'
            f"<b>{escape(self._method.upper())}</b><code>{escape(self._path)}</code>"
            f"<i>{escape(operation.get('summary', ''))}</i></summary>"
            f"<div>{''.join(parts)}</div></details>"
        )

    def curl(self) -> str:
        """The line that does it, with the examples filled in."""
        path, query = self._path, {}
        for parameter in self._parameters:
            name, example = parameter["name"], parameter.get("example")
            if parameter["in"] == "path":
                path = path.replace(f"{{{name}}}", quote(str(example or name), safe=""))
            elif example is not None or parameter["required"]:
                query[name] = str(name if example is None else example)
        address = path + (f"?{urlencode(query)}" if query else "")
        words = ["curl"]
        if self._method != "get":
            words += ["-X", self._method.upper()]
        words.append(f'"$PENSTOCK_URL{address}"')
        if "security" in self._operation:
            words.append('-H "Authorization: Bearer $PENSTOCK_TOKEN"')
        content = self._operation.get("requestBody", {}).get("content", {})
        if "application/json" in content:
            body = json.dumps(content["application/json"].get("example"), ensure_ascii=False)
            words += ["-H", "'Content-Type: application/json'", "-d", shlex.quote(body)]
        elif content:
            words += ["--data-binary", "@file"]
        answers = self._operation["responses"].values()
        if any("text/event-stream" in answer.get("content", {}) for answer in answers):
            words.insert(1, "-N")
        return " ".join(words)

    def _parameter(self, parameter: dict[str, Any]) -> str:
        schema = parameter["schema"]
        default = (
            "required"
            if parameter["required"]
            else json.dumps(schema["default"])
            if schema.get("default") is not None
            else ""
        )
        about = parameter.get("description", "")
        return (
            f"<tr><td><code>{escape(parameter['name'])}</code>"
            f"<td>{escape(self._type(schema))}<td>{escape(default)}<td>{escape(about)}</tr>"
        )

    def _content(self, content: dict[str, Any]) -> str:
        return "".join(self._medium(kind, about) for kind, about in content.items())

    def _medium(self, kind: str, about: dict[str, Any]) -> str:
        schema = about.get("schema")
        if "example" not in about and not schema:
            return f"<pre>{escape(kind)}</pre>"
        example = json.dumps(about.get("example"), indent=2, ensure_ascii=False)
        fields = self._fields(schema or {}, ())
        title = escape(self._type(schema or {}))
        types = f"<details><summary>{title}</summary>{fields}</details>" if fields else ""
        return f"<pre>{escape(example)}</pre>{types}"

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        name = ref_name(schema)
        return dict(self._types.get(name, {})) if name else schema

    def _type(self, schema: dict[str, Any]) -> str:
        """A type in a few words."""
        if name := ref_name(schema):
            return name.rsplit(".", 1)[-1]
        if "enum" in schema:
            return " or ".join(map(json.dumps, schema["enum"]))
        if choices := schema.get("anyOf"):
            return " or ".join(dict.fromkeys(map(self._type, choices)))
        kind = str(schema.get("type", "any JSON"))
        if kind == "array" and isinstance(schema.get("items"), dict):
            return f"array of {self._type(schema['items'])}"
        limits = (("minimum", "from"), ("maximum", "to"), ("maxLength", "up to"))
        return " ".join([kind, *(f"{word} {schema[key]}" for key, word in limits if key in schema)])

    def _fields(self, schema: dict[str, Any], within: tuple[str, ...]) -> str:
        """The fields below a schema, with types written out in place."""
        name = ref_name(schema)
        if name and name in within:
            return ""  # a type that holds itself
        if name:
            within = (*within, name)
        schema = self._resolved(schema)
        if choices := schema.get("anyOf"):
            return "".join(self._fields(choice, within) for choice in choices)
        if isinstance(items := schema.get("items"), dict):
            return self._fields(items, within)
        required = set(schema.get("required", ()))
        rows = []
        for field, about in schema.get("properties", {}).items():
            needed = ", required" if field in required else ""
            text = self._resolved(about).get("description", "")
            rows.append(
                f"<li><code>{escape(field)}</code>"
                f'<span class="type">{escape(self._type(about))}{needed}</span> {escape(text)}'
                f"{self._fields(about, within)}</li>"
            )
        return f'<ul class="fields">{"".join(rows)}</ul>' if rows else ""
