/**
 * The HTTP API as a page: every operation of openapi.json with its parameters, its bodies and answers by
 * example, types written out in place, and its curl line.
 */
import { html, render } from "./html.js";

const answer = await fetch("../openapi.json");
const api = await answer.json();
const base = location.href.split("/console/")[0];

const nameOf = (schema) => (schema.$ref ?? "").split("/").pop();
const resolved = (schema) => (schema.$ref ? api.components.schemas[nameOf(schema)] : schema);
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The curl line of an operation, with the examples filled in. */
function curl(path, method, operation) {
  let address = path;
  const query = new URLSearchParams();
  for (const { name, required, example, ...parameter } of operation.parameters ?? []) {
    if (parameter.in === "path") address = address.replace(`{${name}}`, encodeURIComponent(example ?? name));
    else if (example !== undefined || required) query.append(name, example ?? name);
  }
  if (query.size) address += `?${query}`;
  const live = Object.values(operation.responses).some((one) => one.content?.["text/event-stream"]);
  const words = ["curl", ...(live ? ["-N"] : [])];
  if (method !== "get") words.push("-X", method.toUpperCase());
  words.push(`"$PENSTOCK_URL${address}"`);
  if (operation.security) words.push('-H "Authorization: Bearer $PENSTOCK_TOKEN"');
  const content = operation.requestBody?.content ?? {};
  const json = content["application/json"];
  if (json) words.push("-H 'Content-Type: application/json' -d", quoted(JSON.stringify(json.example ?? null)));
  else if (Object.keys(content).length) words.push("--data-binary @file");
  return words.join(" ");
}

/** A type in a few words. */
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema).split(".").pop();
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.anyOf) return [...new Set(schema.anyOf.map(typeOf))].join(" or ");
  if (schema.type === "array" && schema.items) return `array of ${typeOf(schema.items)}`;
  const limits = { minimum: "from", maximum: "to", maxLength: "up to" };
  const words = Object.entries(limits).filter(([key]) => key in schema);
  return [schema.type ?? "any JSON", ...words.map(([key, word]) => `${word} ${schema[key]}`)].join(" ");
}

/** The fields of a schema, with their types written out in place; `within`: the types around it. */
function fields(schema, within = []) {
  const name = nameOf(schema);
  if (within.includes(name)) return ""; // a type that contains itself
  const around = name ? [...within, name] : within;
  const { anyOf, items, properties = {}, required = [] } = resolved(schema);
  if (anyOf) return anyOf.map((one) => fields(one, around));
  if (items) return fields(items, around);
  const rows = Object.entries(properties).map(
    ([field, about]) =>
      html`<li>
        <code>${field}</code><span class="type">${typeOf(about)}${required.includes(field) ? ", required" : ""}</span>
        ${resolved(about).description} ${fields(about, around)}
      </li>`,
  );
  return rows.length
    ? html`<ul class="fields">
        ${rows}
      </ul>`
    : "";
}

/** A body or an answer of each type that it has. */
function contents(content = {}) {
  return Object.entries(content).map(([kind, { example, schema }]) => {
    if (example === undefined && !schema) return html`<pre>${kind}</pre>`;
    const types = schema ? fields(schema) : "";
    return html`<pre>${JSON.stringify(example ?? null, null, 2)}</pre>
      ${
        types &&
        html`<details>
          <summary>${typeOf(schema)}</summary>
          ${types}
        </details>`
      }`;
  });
}

function parameters(all) {
  const rows = all.map(({ name, required, schema, description }) => {
    const value = required ? "required" : schema.default === undefined ? "" : JSON.stringify(schema.default);
    const shown = value === "null" ? "" : value;
    return html`<tr>
      <td><code>${name}</code></td>
      <td>${typeOf(schema)}</td>
      <td>${shown}</td>
      <td>${description}</td>
    </tr>`;
  });
  return html`<table>
    <tbody>
      <tr>
        <th>Parameter</th>
        <th>Type</th>
        <th>Default</th>
        <th></th>
      </tr>
      ${rows}
    </tbody>
  </table>`;
}

function shown(path, method, operation) {
  const body = operation.requestBody;
  // what all have in common is said once, in the document
  const answers = Object.entries(operation.responses).filter(([status]) => status !== "default");
  return html`<details class="${method}" id="${operation.operationId}">
    <summary><b>${method.toUpperCase()}</b><code>${path}</code><i>${operation.summary}</i></summary>
    <div>
      ${operation["x-role"] && html`<p>Role: ${operation["x-role"]}</p>`}
      <pre class="curl">${curl(path, method, operation)}</pre>
      ${operation.parameters && parameters(operation.parameters)}
      ${body && html`<h4>Body${body.required ? "" : " (optional)"}</h4>`} ${contents(body?.content)}
      ${answers.map(
        ([status, about]) =>
          html`<h4>${status} ${about.description}</h4>
            ${contents(about.content)}`,
      )}
    </div>
  </details>`;
}

const sections = new Map();
for (const [path, operations] of Object.entries(api.paths)) {
  for (const [method, operation] of Object.entries(operations)) {
    const [tag] = operation.tags ?? ["other"];
    if (!sections.has(tag)) sections.set(tag, []);
    sections.get(tag).push(shown(path, method, operation));
  }
}
// what few people need comes last
const LAST = ["queen", "internal"];
const ordered = [...sections].toSorted(([one], [other]) => LAST.indexOf(one) - LAST.indexOf(other));
render(
  document.body,
  html`<h1>
      ${api.info.title} <small>${api.info.version} · <a href="../openapi.json">openapi.json</a></small>
    </h1>
    <p>The curl lines below need the address of the broker, and a token where it asks for one:</p>
    <pre>export PENSTOCK_URL=<span id="base">${base}</span></pre>
    <input aria-label="Filter" placeholder="Filter by path, parameter or word (/)" />
    <main>
      ${ordered.map(
        ([tag, shown]) =>
          html`<section>
            <h2>${tag}</h2>
            ${shown}
          </section>`,
      )}
    </main>`,
);

const filter = document.querySelector("input");
filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase();
  for (const item of document.querySelectorAll("main > section > details"))
    item.hidden = !item.textContent.toLowerCase().includes(words);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target !== filter) {
    event.preventDefault();
    filter.focus();
  }
});
const opened = location.hash && document.getElementById(location.hash.slice(1));
if (opened) {
  opened.open = true;
  opened.scrollIntoView();
} else filter.focus();
