/** Buffers and pipelines: what waits in files, and what runs elsewhere. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { count, duration, plural, rate, size } from "../format.js";
import { lines, sparkline } from "../components/chart.js";
import { confirm } from "../components/dialog.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import { age, bad, badge, button, figure, since, teach } from "./common.js";

const kindName = (kind) => (kind === "qos0" ? "QoS 0" : "Failover");
const MODES = {
  direct: "Pushes go to PostgreSQL.",
  failover: "PostgreSQL is down: pushes go to files and are replayed, in order, when it is back.",
  maintenance: "Maintenance mode: pushes go to files until it is switched off.",
};

const KINDS = [
  { name: "kind", title: "Kind", card: true, cell: (k) => kindName(k.kind) },
  { name: "pending", title: "Waiting", number: true, card: true, cell: (k) => count(k.pending) },
  { name: "files", title: "Files", number: true, cell: (k) => count(k.files) },
  { name: "bytes", title: "Size", number: true, cell: (k) => size(k.bytes) },
  { name: "age", title: "Oldest", number: true, cell: (k) => (k.files ? age(k.oldestAge) : "–") },
  { name: "flushed", title: "Committed", number: true, cell: (k) => count(k.flushed) },
];

const FILES = [
  { name: "name", title: "File", cell: (f) => html`<code>${f.name}</code>` },
  { name: "kind", title: "Kind", cell: (f) => kindName(f.kind) },
  { name: "state", title: "State", card: true, cell: (f) => badge(f.state) },
  { name: "events", title: "Events", number: true, card: true, cell: (f) => count(f.events) },
  { name: "bytes", title: "Size", number: true, cell: (f) => size(f.bytes) },
  { name: "age", title: "Age", number: true, card: true, cell: (f) => age(f.age) },
  {
    name: "reason",
    title: "Reason",
    kind: "text",
    cell: (f) => (f.reason ? html`<span class="bad">${visible(f.reason)}</span>` : ""),
  },
];

export const buffers = {
  path: "/buffers",
  title: () => "Buffers",
  load: (_, __, signal) => get("/api/v1/status/buffers", {}, signal),
  view(data, context) {
    const mode = data.maintenanceMode ? "maintenance" : data.dbHealthy ? "direct" : "failover";
    return html`<h1>Buffers ${badge(mode)} <small>${MODES[mode]}</small></h1>
      <div class="tools">
        ${button(context, "admin", "maintenance", data.maintenanceMode ? "Switch maintenance off" : "Switch maintenance on", { data: { on: !data.maintenanceMode } })}
        ${data.failed ? button(context, "admin", "retry", `Retry ${plural(data.failed, "failed event")}`) : ""}
      </div>
      <div class="figures">
        ${figure("waiting events", count(data.pending))}${figure("replayed in", data.pending ? duration(data.drainSeconds) : "–")}
        ${figure("replay", `${rate(data.replayRate)}/s`)}${figure("failed", bad(data.failed))}${figure("in quarantine", bad(data.quarantined))}
      </div>
      ${table({ columns: KINDS, rows: ["failover", "qos0"].map((kind) => ({ kind, ...data[kind] })), key: (k) => k.kind, caption: "Buffers by kind", empty: "" })}
      <h2>Files</h2>
      ${table({ columns: FILES, rows: data.files, key: (f) => f.name, caption: "Buffer files", empty: html`<p>No buffered events. Files appear while PostgreSQL is down, and for pushes with QoS 0.</p>` })}`;
  },
  actions: {
    async maintenance(element, { data, say, refresh }) {
      const on = element.dataset.on === "true";
      const text = on
        ? "Pushes of all brokers go to files on disk until you switch it off; pops still deliver stored messages."
        : `${plural(data.pending, "event")} are replayed into PostgreSQL, in order.`;
      if (
        !(await confirm({
          title: on ? "Maintenance on" : "Maintenance off",
          text,
          button: on ? "Send pushes to the buffer" : "Replay the buffer",
          danger: on,
        }))
      )
        return;
      await ask("POST", "/api/v1/system/maintenance", { body: { enabled: on } });
      say(on ? "Pushes go to the buffer." : "The buffer is being replayed.");
      refresh();
    },
    async retry(_, { say, refresh }) {
      const done = await ask("POST", "/api/v1/buffers/retry-failed");
      say(`${plural(done.failed, "failed event")} left.`);
      refresh();
    },
  },
};

/** A figure of the 15 minutes up to the last report; null where nothing was reported. */
function perMinute(pipeline, name) {
  const known = new Map(pipeline.minutes.map((minute) => [minute.at, minute[name]]));
  const last = pipeline.minutes.at(-1)?.at ?? 0;
  return Array.from({ length: 15 }, (_, i) => known.get(last - (14 - i) * 60) ?? null);
}

const target = (p) => {
  if (p.target_seconds == null) return "";
  const late = p.lag_seconds > p.target_seconds;
  const text = `${duration(p.lag_seconds ?? 0)} of ${duration(p.target_seconds)}`;
  return html`<br /><small class="${late ? "bad" : ""}">${text}</small>`;
};

const PIPELINES = [
  { name: "name", title: "Pipeline", card: true, cell: (p) => html`<b>${p.name}</b><br /><small>${p.host}</small>` },
  {
    name: "state",
    title: "State",
    card: true,
    cell: (p) => badge(p.stopping && ["running", "idle"].includes(p.state) ? "stopping" : p.state),
  },
  { name: "rate", title: "Rows/s", number: true, card: true, cell: (p) => rate(p.rows_per_second) },
  {
    name: "minute",
    title: "Rows/min",
    number: true,
    cell: (p) =>
      html`${count(p.minutes.at(-1)?.rows)}${sparkline(perMinute(p, "rows"), "out", `rows of ${p.name} per minute`)}`,
  },
  {
    name: "rows",
    title: "Rows",
    number: true,
    cell: (p) =>
      html`${count(p.rows)}${p.batch >= 0 ? html`<br /><small>${plural(p.batch, "batch", "batches")}</small>` : ""}`,
  },
  {
    name: "lag",
    title: "Lag",
    number: true,
    cell: (p) =>
      html`${count(p.lag)}${sparkline(perMinute(p, "lag"), "lag", `lag of ${p.name} per minute`)}${target(p)}`,
  },
  { name: "position", title: "Position", kind: "text", cell: (p) => visible(p.position ?? "") },
  { name: "seen", title: "Seen", number: true, cell: (p) => since(p.reported_at * 1000) },
  {
    name: "error",
    title: "Last error",
    kind: "text",
    cell: (p) => (p.error ? html`<span class="bad">${visible(String(p.error))}</span>` : ""),
  },
];

const RUNS = [
  { name: "pipeline", title: "Pipeline", card: true, cell: (r) => r.pipeline },
  { name: "state", title: "State", card: true, cell: (r) => badge(r.state) },
  { name: "started", title: "Started", number: true, cell: (r) => since(r.started_at * 1000) },
  { name: "lasted", title: "Duration", number: true, cell: (r) => duration(r.reported_at - r.started_at) },
  { name: "rows", title: "Rows", number: true, card: true, cell: (r) => count(r.rows) },
  {
    name: "error",
    title: "Error",
    kind: "text",
    cell: (r) => (r.error ? html`<span class="bad">${visible(String(r.error))}</span>` : ""),
  },
];

/** What the rollup pipeline wrote down of all queues and topics, per minute. */
function rolledUp({ upto, times, series }) {
  if (!upto) return "";
  return html`<h2>Rollup <small>up to ${since(upto)}; queues and topics show their own in their charts</small></h2>
    <div class="cards">
      <div class="card">
        ${lines({ times, series: Object.entries(series).map(([name, values]) => ({ name: name === "produced" ? "records" : name, values })), title: "Messages and records per minute, from the rollup", format: count })}
      </div>
    </div>`;
}

export const pipelines = {
  path: "/pipelines",
  title: () => "Pipelines",
  async load(_, __, signal) {
    const [list, rollup] = await Promise.all([
      get("/api/v1/pipelines", {}, signal),
      get("/api/v1/analytics/rollup", {}, signal),
    ]);
    return { ...list, rollup };
  },
  view(data, context) {
    const shown = (column) => column.name !== "position" || data.pipelines.some((p) => p.position);
    const columns = [
      ...PIPELINES.filter(shown),
      {
        name: "actions",
        title: "",
        kind: "actions",
        cell: (p) =>
          ["running", "idle"].includes(p.state) && !p.stopping
            ? button(context, "admin", "stop", "Stop", { data: { name: p.name } })
            : ["failed", "finished", "lost"].includes(p.state)
              ? button(context, "admin", "forget", "Remove", { data: { name: p.name } })
              : "",
      },
    ];
    const runs = data.pipelines
      .flatMap((p) => p.runs.map((run) => ({ ...run, pipeline: p.name })))
      .toSorted((a, b) => b.started_at - a.started_at);
    return html`<h1>Pipelines</h1>
      ${table({ columns, rows: data.pipelines, key: (p) => p.name, caption: "Pipelines", empty: teach("No pipeline has reported yet.", "penstock pipeline run pipeline.yaml") })}
      ${rolledUp(data.rollup)}
      ${
        runs.length
          ? html`<h2>Runs</h2>
              ${table({ columns: RUNS, rows: runs.slice(0, 50), key: (r) => `${r.pipeline}${r.started_at}`, caption: "Runs, the newest first" })}`
          : ""
      }`;
  },
  actions: {
    async stop(element, { say, refresh }) {
      const { name } = element.dataset;
      if (
        !(await confirm({
          title: "Stop the pipeline",
          text: html`<p>${name} stops after its current batch. It can be started again from its checkpoint.</p>`,
          button: `Stop ${name}`,
          danger: false,
        }))
      )
        return;
      await ask("POST", path`/api/v1/pipelines/${name}/stop`);
      say(`${name} was asked to stop.`);
      refresh();
    },
    async forget(element, { say, refresh }) {
      const { name } = element.dataset;
      if (
        !(await confirm({
          title: "Remove the pipeline",
          text: html`<p>
            The last report and the runs of ${name} are removed from this list. It appears again when it reports.
          </p>`,
          button: `Remove ${name}`,
          danger: false,
        }))
      )
        return;
      await ask("DELETE", path`/api/v1/pipelines/${name}`);
      say(`${name} was removed.`);
      refresh();
    },
  },
};
