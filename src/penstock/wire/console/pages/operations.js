/** Routes, buffers and pipelines: what carries data on, and what waits. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { count, plural, rate, size } from "../format.js";
import { confirm, form } from "../components/dialog.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import { age, bad, button, figure, filter, pairs, since, teach } from "./common.js";

const STATES = { running: "good", active: "good", paused: "warn", closed: "good", open: "bad", failed: "bad", lost: "bad", finished: "" };
const badge = (state) => html`<span class="badge ${STATES[state] ?? ""}">${state ?? "–"}</span>`;
const linkTo = (route) => `#/routes/${encodeURIComponent(route)}`;

const ROUTES = [
  { name: "name", title: "Route", cell: (r) => html`<a href="${linkTo(r.name)}">${r.name}</a>` },
  { name: "state", title: "State", card: true, cell: (r) => badge(r.state) },
  { name: "breaker", title: "Breaker", cell: (r) => badge(r.breaker?.state) },
  { name: "backlog", title: "Lag", number: true, card: true, cell: (r) => count(r.lag) },
  { name: "dead", title: "Dead letters", number: true, cell: (r) => bad(r.deadLetters) },
  { name: "error", title: "Last error", cell: (r) => (r.lastError ? html`<span class="bad">${visible(String(r.lastError))}</span>` : "") },
];

export const routes = {
  path: "/routes",
  title: () => "Routes",
  load: (_, query, signal) => get("/api/v1/routes", {}, signal),
  view(data, context) {
    const words = (context.query.filter ?? "").toLowerCase();
    const rows = data.routes.filter((route) => route.name.toLowerCase().includes(words));
    return html`<h1>Routes</h1><div class="tools">${filter(context.query, "Filter by name")}${button(context, "admin", "create", "Create a route", { primary: true })}</div>
      ${table({ columns: ROUTES, rows, key: (r) => r.name, href: (r) => linkTo(r.name), caption: "Routes",
        empty: words ? "No route matches." : teach("There is no route yet. A route sends a topic or a queue on to another place.", `curl -X POST ${location.origin}/api/v1/routes -H 'Content-Type: application/json' -d '{"name": "lake", "source": {"topic": "orders"}, "destination": {"type": "http", "url": "https://example.com/in"}}'`) })}`;
  },
  actions: {
    async create(_, context) {
      const example = { name: "lake", source: { topic: "orders" }, destination: { type: "http", url: "https://example.com/in" } };
      const values = await form({
        title: "Create a route", button: "Create", fields: [{ name: "definition", label: "Definition (JSON)", kind: "json", value: JSON.stringify(example, null, 2) }],
        check: async ({ definition }) => {
          try { await ask("POST", "/api/v1/routes", { body: JSON.parse(definition) }); } catch (error) { return error.message; }
          return "";
        },
      });
      if (values) context.refresh();
    },
  },
};

const act = (action, done) => async (_, { params, say, refresh }) => {
  const result = await ask("POST", path`/api/v1/routes/${params.route}/${action}`);
  say(done(result ?? {}));
  refresh();
};

export const route = {
  path: "/routes/:route",
  title: ({ route: name }) => name,
  crumbs: ({ route: name }) => html`<a href="#/routes">Routes</a> / <b>${name}</b>`,
  load: ({ route: name }, _, signal) => get(path`/api/v1/routes/${name}`, {}, signal),
  view(data, context) {
    const plain = Object.entries(data).filter(([, value]) => value !== null && typeof value !== "object");
    const books = Object.entries(data).filter(([, value]) => value !== null && typeof value === "object");
    return html`<h1>${data.name} ${badge(data.state)}</h1>
      <div class="tools">${data.state === "paused" ? button(context, "admin", "resume", "Resume", { primary: true }) : button(context, "admin", "pause", "Pause")}
        ${button(context, "admin", "drain", "Drain")}${button(context, "admin", "replay", "Replay dead letters")}
        ${button(context, "admin", "purge", "Purge", { danger: true })}${button(context, "admin", "delete", "Delete", { danger: true })}</div>
      ${data.lastError ? html`<p class="problem">${visible(String(data.lastError))}</p>` : ""}
      <div class="cards"><div class="card">${pairs(plain.map(([name, value]) => [name, String(value)]))}</div>
        ${books.map(([name, value]) => html`<div class="card" data-key="${name}"><h2>${name}</h2>${pairs(Object.entries(value).map(([key, one]) => [key, typeof one === "object" ? JSON.stringify(one) : String(one)]))}</div>`)}</div>`;
  },
  actions: {
    pause: act("pause", () => "Paused."),
    resume: act("resume", () => "Resumed."),
    drain: act("drain", () => "It sends what it has and takes nothing new."),
    replay: act("replay", ({ count: n }) => `${plural(n ?? 0, "dead letter")} queued again.`),
    async purge(_, { params, say, refresh }) {
      if (!(await confirm({ title: "Purge the route", text: html`<p>Everything that waits in ${params.route} is dropped and never sent.</p>`, button: "Drop what waits", typed: params.route }))) return;
      const done = await ask("POST", path`/api/v1/routes/${params.route}/purge`);
      say(`${plural(done?.count ?? 0, "record")} dropped.`);
      refresh();
    },
    async delete(_, { params, say, go }) {
      if (!(await confirm({ title: "Delete the route", text: html`<p>The route ${params.route} ends. What it still holds must be drained or purged before.</p>`, button: `Delete ${params.route}`, typed: params.route }))) return;
      await ask("DELETE", path`/api/v1/routes/${params.route}`);
      say(`${params.route} was deleted.`);
      go("#/routes");
    },
  },
};

const KINDS = [
  { name: "kind", title: "Kind", cell: (k) => (k.kind === "qos0" ? "QoS 0" : "Failover") },
  { name: "pending", title: "Waiting", number: true, card: true, cell: (k) => count(k.pending) },
  { name: "files", title: "Files", number: true, cell: (k) => count(k.files) },
  { name: "bytes", title: "Size", number: true, cell: (k) => size(k.bytes) },
  { name: "age", title: "Oldest", number: true, card: true, cell: (k) => (k.files ? age(k.oldestAge) : "–") },
  { name: "flushed", title: "Committed", number: true, cell: (k) => count(k.flushed) },
];

export const buffers = {
  path: "/buffers",
  title: () => "Buffers",
  load: (_, query, signal) => get("/api/v1/status/buffers", {}, signal),
  view(data, context) {
    return html`<h1>Buffers ${badge(data.maintenanceMode ? "maintenance" : data.dbHealthy ? "direct" : "failover")}</h1>
      <div class="tools">${button(context, "admin", "maintenance", data.maintenanceMode ? "Switch maintenance off" : "Switch maintenance on", { data: { on: !data.maintenanceMode } })}
        ${button(context, "admin", "retry", `Retry ${plural(data.failed, "failed event")}`)}</div>
      <div class="figures">${figure("waiting events", count(data.pending))}${figure("failed", bad(data.failed))}${figure("in quarantine", bad(data.quarantined))}
        ${figure("replay", `${rate(data.replayRate)}/s`)}</div>
      ${table({ columns: KINDS, rows: ["failover", "qos0"].map((kind) => ({ kind, ...data[kind] })), key: (k) => k.kind, caption: "Buffers by kind", empty: "" })}
      ${data.failedFiles.length ? html`<h2>Failed files</h2><ul>${data.failedFiles.map((name) => html`<li><code>${name}</code></li>`)}</ul>` : ""}`;
  },
  actions: {
    async maintenance(element, { say, refresh }) {
      const on = element.dataset.on === "true";
      const text = on ? "Pushes of all brokers go to files on disk until you switch it off; pops still work on what is stored." : "The files are replayed into PostgreSQL, in order.";
      if (!(await confirm({ title: on ? "Maintenance on" : "Maintenance off", text, button: on ? "Send pushes to the buffer" : "Replay the buffer", danger: on }))) return;
      await ask("POST", "/api/v1/system/maintenance", { body: { enabled: on } });
      say(on ? "Pushes go to the buffer." : "The buffer drains.");
      refresh();
    },
    async retry(_, { say, refresh }) {
      const done = await ask("POST", "/api/v1/buffers/retry-failed");
      say(`${plural(done.failed, "event")} left in failed.`);
      refresh();
    },
  },
};

const PIPELINES = [
  { name: "name", title: "Pipeline", cell: (p) => p.name },
  { name: "state", title: "State", card: true, cell: (p) => badge(p.state) },
  { name: "rate", title: "Rows/s", number: true, card: true, cell: (p) => rate(p.rows_per_second) },
  { name: "lag", title: "Lag", number: true, cell: (p) => count(p.lag) },
  { name: "seen", title: "Seen", number: true, cell: (p) => since(p.reported_at * 1000) },
  { name: "error", title: "Last error", cell: (p) => (p.error ? html`<span class="bad">${visible(String(p.error))}</span>` : "") },
];

export const pipelines = {
  path: "/pipelines",
  title: () => "Pipelines",
  load: (_, query, signal) => get("/api/v1/pipelines", {}, signal),
  view(data, context) {
    const columns = [...PIPELINES, { name: "actions", title: "", cell: (p) => (p.state === "running" ? button(context, "read_write", "stop", "Stop", { data: { name: p.name } }) : "") }];
    const rows = Array.isArray(data) ? data : data.pipelines ?? Object.values(data);
    return html`<h1>Pipelines</h1>${table({ columns, rows, key: (p) => p.name, caption: "Pipelines", empty: teach("No pipeline has reported yet.", "penstock pipeline run file pipeline.yaml") })}`;
  },
  actions: {
    async stop(element, { say, refresh }) {
      const { name } = element.dataset;
      if (!(await confirm({ title: "Stop the pipeline", text: html`<p>${name} ends after its current batch and can be started again from its checkpoint.</p>`, button: `Stop ${name}`, danger: false }))) return;
      await ask("POST", path`/api/v1/pipelines/${name}/stop`);
      say(`${name} was asked to stop.`);
      refresh();
    },
  },
};
