/** This broker: versions, listeners, processes, effective configuration, log and audit. */
import { get } from "../api.js";
import { html } from "../html.js";
import { count, duration, size } from "../format.js";
import { live } from "../live.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import { filter, pairs, since, tabs } from "./common.js";

const LEVELS = ["warning", "error", "info"];

const LOG = [
  { name: "at", title: "When", card: true, cell: (l) => since(l.at) },
  {
    name: "level",
    title: "Level",
    cell: (l) =>
      html`<span class="badge ${l.level === "error" ? "bad" : l.level === "warning" ? "warn" : ""}">${l.level}</span>`,
  },
  { name: "message", title: "Message", kind: "text", card: true, cell: (l) => visible(l.message) },
  { name: "logger", title: "Logger", cell: (l) => html`<small>${l.logger}</small>` },
];

const AUDIT = [
  { name: "at", title: "When", card: true, cell: (e) => since(e.at) },
  { name: "who", title: "Who", card: true, cell: (e) => visible(e.who) },
  { name: "action", title: "Action", kind: "whole", cell: (e) => html`<code>${e.action}</code>` },
  { name: "object", title: "Object", card: true, kind: "whole", cell: (e) => html`<b>${visible(e.object)}</b>` },
  {
    name: "detail",
    title: "Detail",
    kind: "text",
    cell: (e) =>
      Object.entries(e.detail).map(
        ([name, value]) => html`<span class="badge">${name}: ${visible(String(value))}</span> `,
      ),
  },
];

const KEYS = [
  { name: "key", title: "Key", card: true, cell: (k) => html`<code>${k.key}</code>` },
  {
    name: "value",
    title: "Value",
    card: true,
    cell: (k) => (k.default ? visible(k.value) : html`<b>${visible(k.value)}</b>`),
  },
  { name: "origin", title: "Source", cell: (k) => html`<small>${k.origin}</small>` },
];

const BROKERS = [
  {
    name: "id",
    title: "Process",
    card: true,
    cell: (b) => html`${b.id}${b.self ? html` <span class="badge">this one</span>` : ""}`,
  },
  { name: "version", title: "Version", cell: (b) => b.version ?? "–" },
  { name: "worker", title: "Worker", number: true, cell: (b) => count(b.worker) },
  {
    name: "cpu",
    title: "Cores in use",
    number: true,
    card: true,
    cell: (b) => (b.cpu === null || b.cpu === undefined ? "–" : b.cpu.toFixed(2)),
  },
  { name: "memory", title: "Memory", number: true, cell: (b) => size(b.memory) },
  { name: "waitingPops", title: "Waiting pops", number: true, cell: (b) => count(b.waitingPops) },
  { name: "started", title: "Started", number: true, cell: (b) => since(b.startedAt) },
  { name: "seen", title: "Seen", number: true, cell: (b) => since(b.lastSeen) },
];

const about = ({ health }) =>
  html`<div class="cards">
      <div class="card">
        <h2>This broker</h2>
        ${pairs([
          ["version", health.version],
          ["server", health.server],
          ["running for", duration(health.uptime)],
          ["database", html`${health.database}${health.database_host ? `, ${health.database_host}` : ""}`],
          ["topics’ disk", health.disk],
        ])}
      </div>
      <div class="card">
        <h2>Listeners</h2>
        ${pairs(Object.entries(health.listeners))}
        <p><a href="../docs">HTTP API</a> · <a href="../metrics">Prometheus metrics</a></p>
      </div>
    </div>
    <h2>Processes on this database</h2>
    ${table({
      columns: BROKERS,
      rows: live.now?.brokers ?? [],
      key: (b) => b.id,
      caption: "Processes on this database",
      empty: "Unknown.",
    })}`;

const log = (data, { query }) =>
  html`<div class="tools">
      <select data-choice="level" aria-label="Level">
        ${LEVELS.map((level) => html`<option .selected="${level === (query.level ?? "warning")}">${level}</option>`)}
      </select>
      <small>of this process, since it started</small>
    </div>
    ${table({
      columns: LOG,
      rows: data.lines,
      key: (l) => `${l.at}${l.message}`,
      caption: "Recent log lines",
      empty: "No line of this level since the broker started.",
    })}`;

const audit = (data, context) =>
  html`<div class="tools">${filter(context.query, "Filter by who, what or object")}</div>
    ${table({
      columns: AUDIT,
      rows: data.entries,
      key: (e) => `${e.at}${e.action}${e.object}`,
      caption: "Who changed what",
      empty: context.query.filter
        ? "No entry matches."
        : "No changes yet. Creating, configuring, deleting, seeking, requeueing and similar actions are recorded here.",
    })}
    <div class="pager">
      ${
        context.query.before ? html`<a href="${context.withQuery({ before: "" })}">← newest</a>` : ""
      }${data.next ? html`<a href="${context.withQuery({ before: data.next })}">older →</a>` : ""}
    </div>`;

function config(data, { query }) {
  const words = (query.filter ?? "").toLowerCase();
  const rows = data.keys.filter(
    (k) => (words || !k.default || query.all) && `${k.key} ${k.value} ${k.origin}`.toLowerCase().includes(words),
  );
  return html`<div class="tools">
      ${filter(query, "Filter by key, value or origin")}<small
        >${words ? "" : `only keys that were set; a filter searches all ${data.keys.length}`}</small
      >
    </div>
    ${table({ columns: KEYS, rows, key: (k) => k.key, caption: "Configuration", empty: "All keys have their defaults." })}`;
}

const TABS = [
  ["about", "Broker", about, async (_, signal) => ({ health: await get("/health", {}, signal, true) })],
  ["config", "Configuration", config, (_, signal) => get("/api/v1/config", {}, signal)],
  ["log", "Log", log, (query, signal) => get("/api/v1/logs", { level: query.level ?? "warning", limit: 200 }, signal)],
  [
    "audit",
    "Audit",
    audit,
    (query, signal) => get("/api/v1/audit", { filter: query.filter, before: query.before, limit: 100 }, signal),
  ],
];
const tabOf = (query) => TABS.find(([name]) => name === query.tab) ?? TABS[0];

export const system = {
  path: "/system",
  title: () => "System",
  every: 5000,
  async load(_, query, signal) {
    const [tab, , , more] = tabOf(query);
    return { tab, list: await more(query, signal) };
  },
  view(data, context) {
    const [tab, , draw] = tabOf(context.query);
    return html`<h1>System</h1>
      ${tabs(TABS, tab, (name) => `#/system?tab=${name}`, "Parts of the system")}
      ${tab === data.tab ? draw(data.list, context) : html`<p class="loading">…</p>`}`;
  },
};
