/** Configuration with its origin, listeners, versions, recent warnings of the log, audit. */
import { get } from "../api.js";
import { html } from "../html.js";
import { count, duration, moment } from "../format.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import { filter, pairs, since } from "./common.js";

const TABS = [["about", "About"], ["config", "Configuration"], ["logs", "Log"], ["audit", "Audit"]];

const CONFIG = [
  { name: "key", title: "Key", cell: (c) => html`<code>${c.key}</code>` },
  { name: "value", title: "Value", card: true, cell: (c) => html`<code>${visible(String(c.value))}</code>` },
  { name: "origin", title: "From", card: true, cell: (c) => c.origin },
];
const LOG = [
  { name: "at", title: "When", card: true, cell: (l) => since(l.at) },
  { name: "level", title: "Level", cell: (l) => html`<span class="badge ${l.level === "error" ? "bad" : l.level === "warning" ? "warn" : ""}">${l.level}</span>` },
  { name: "message", title: "Message", card: true, cell: (l) => visible(l.message) },
  { name: "logger", title: "Part", cell: (l) => l.logger },
];
const AUDIT = [
  { name: "at", title: "When", card: true, cell: (a) => html`<time title="${moment(a.at)}">${since(a.at)}</time>` },
  { name: "who", title: "Who", cell: (a) => a.who },
  { name: "action", title: "Action", card: true, cell: (a) => a.action },
  { name: "object", title: "Object", cell: (a) => visible(a.object ?? "") },
  { name: "detail", title: "Detail", cell: (a) => html`<small>${visible(typeof a.detail === "string" ? a.detail : JSON.stringify(a.detail ?? ""))}</small>` },
];

function about(data) {
  return html`<div class="cards"><div class="card">${pairs([["version", data.version], ["server", data.server], ["running for", duration(data.uptime)], ["worker", count(data.worker_id)],
    ["database", data.database]])}</div>
    <div class="card"><h2>Listeners</h2>${pairs(Object.entries(data.listeners ?? {}))}</div></div>
    <p><a href="../docs">HTTP API with examples</a> · <a href="../metrics">Prometheus metrics</a></p>`;
}

export const system = {
  path: "/system",
  title: () => "System",
  load(_, query, signal) {
    const tab = query.tab ?? "about";
    if (tab === "config") return get("/api/v1/config", {}, signal);
    if (tab === "logs") return get("/api/v1/logs", { level: query.level ?? "warning", limit: 200 }, signal);
    if (tab === "audit") return get("/api/v1/audit", { filter: query.filter, before: query.before, limit: 100 }, signal);
    return get("/health/details", {}, signal);
  },
  view(data, context) {
    const { query } = context;
    const tab = query.tab ?? "about";
    const words = (query.filter ?? "").toLowerCase();
    let shown = "";
    if (tab === "config" && data.keys) {
      const rows = data.keys.filter((c) => c.key.toLowerCase().includes(words));
      shown = html`<div class="tools">${filter(query, "Filter by key")}</div>${table({ columns: CONFIG, rows, key: (c) => c.key, caption: "Configuration", empty: "No key matches." })}`;
    } else if (tab === "logs" && data.lines) {
      shown = html`<div class="tools"><select data-choice="level" aria-label="Level">${["warning", "error", "info"].map((level) => html`<option ${level === (query.level ?? "warning") ? html`selected` : ""}>${level}</option>`)}</select></div>
        ${table({ columns: LOG, rows: data.lines, key: (l) => `${l.at}${l.message}`, caption: "Recent log lines", empty: "No warning and no error since the broker started." })}`;
    } else if (tab === "audit" && data.entries) {
      shown = html`<div class="tools">${filter(query, "Filter by who, action or object")}</div>
        ${table({ columns: AUDIT, rows: data.entries, key: (a) => `${a.at}${a.action}${a.object}`, caption: "Audit", empty: "Nobody has changed anything yet." })}
        ${data.next ? html`<div class="pager"><a href="${context.withQuery({ before: data.next })}">older →</a></div>` : ""}`;
    } else if (tab === "about") shown = about(data);
    return html`<h1>System</h1><div class="tabs" role="navigation" aria-label="Parts of the system">${TABS.map(([name, label]) => html`<a class="badge" href="#/system?tab=${name}" ${name === tab ? html`aria-current="page"` : ""}>${label}</a>`)}</div>${shown}`;
  },
};
