/** Pipelines run on Spark and report here: all of them, and one with its graph, last batches, runs and errors. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { count, duration, moment, plural, rate, size, when } from "../format.js";
import { lines, sparkline } from "../components/chart.js";
import { confirm } from "../components/dialog.js";
import { graph } from "../components/graph.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import { badge, button, figure, pairs, since, teach } from "./common.js";

const linkTo = (name) => `#/pipelines/${encodeURIComponent(name)}`;
const MINUTES = 15;

/** A figure of the 15 minutes up to the last report; null where nothing was reported. */
function perMinute(pipeline, name) {
  const known = new Map(pipeline.minutes.map((minute) => [minute.at, minute[name]]));
  const last = pipeline.minutes.at(-1)?.at ?? 0;
  return Array.from({ length: MINUTES }, (_, i) => known.get(last - (MINUTES - 1 - i) * 60) ?? null);
}

const target = (p) => {
  if (p.target_seconds == null) return "";
  const late = p.lag_seconds > p.target_seconds;
  const text = `${duration(p.lag_seconds ?? 0)} of ${duration(p.target_seconds)}`;
  return html`<br /><small class="${late ? "bad" : ""}">${text}</small>`;
};

const wrong = (one) => (one.error ? html`<span class="bad">${visible(String(one.error))}</span>` : "");
const state = (p) => badge(p.stopping && ["running", "idle"].includes(p.state) ? "stopping" : p.state);

const PIPELINES = [
  {
    name: "name",
    title: "Pipeline",
    kind: "whole",
    card: true,
    cell: (p) => html`<a href="${linkTo(p.name)}">${p.name}</a><br /><small>${p.host}</small>`,
  },
  { name: "state", title: "State", card: true, cell: state },
  { name: "rate", title: "Rows/s", number: true, card: true, cell: (p) => rate(p.rows_per_second) },
  {
    name: "rows",
    title: "Rows",
    number: true,
    cell: (p) => html`${count(p.rows)}${sparkline(perMinute(p, "rows"), "out", `rows of ${p.name} per minute`)}`,
  },
  {
    name: "lag",
    title: "Lag",
    number: true,
    cell: (p) =>
      html`${count(p.lag)}${sparkline(perMinute(p, "lag"), "lag", `lag of ${p.name} per minute`)}${target(p)}`,
  },
  { name: "seen", title: "Seen", number: true, cell: (p) => since(p.reported_at * 1000) },
  { name: "error", title: "Last error", kind: "text", cell: wrong },
];

const RUNS = [
  { name: "state", title: "State", card: true, cell: (r) => badge(r.state) },
  { name: "started", title: "Started", number: true, card: true, cell: (r) => since(r.started_at * 1000) },
  { name: "lasted", title: "Duration", number: true, cell: (r) => duration(r.reported_at - r.started_at) },
  { name: "rows", title: "Rows", number: true, card: true, cell: (r) => count(r.rows) },
  { name: "host", title: "Host", cell: (r) => r.host ?? "" },
  { name: "error", title: "Error", kind: "text", cell: wrong },
];
const ALL_RUNS = [
  {
    name: "pipeline",
    title: "Pipeline",
    kind: "whole",
    card: true,
    cell: (r) => html`<a href="${linkTo(r.pipeline)}">${r.pipeline}</a>`,
  },
  ...RUNS,
];

const BATCHES = [
  { name: "batch", title: "Batch", number: true, card: true, cell: (b) => count(b.batch) },
  {
    name: "at",
    title: "Started",
    card: true,
    cell: (b) => html`<time title="${moment(Date.parse(b.at))}">${when(Date.parse(b.at))}</time>`,
  },
  { name: "rows", title: "Rows", number: true, card: true, cell: (b) => count(b.rows) },
  { name: "ms", title: "Duration", number: true, cell: (b) => duration(b.ms / 1000) },
];

/** The rollup of all queues and topics, per minute. */
function rolledUp({ upto, times, series }) {
  if (!upto) return "";
  const shown = Object.entries(series).map(([name, values]) => ({
    name: name === "produced" ? "records" : name,
    values,
  }));
  const title = "Messages and records per minute, from the rollup";
  return html`<h2>Rollup <small>up to ${since(upto)}; queues and topics show their own in their charts</small></h2>
    <div class="cards"><div class="card">${lines({ times, series: shown, title, format: count })}</div></div>`;
}

/** The button of a pipeline: stop it while it runs, remove it afterwards. */
function deed(p, context) {
  if (["running", "idle"].includes(p.state) && !p.stopping) {
    return button(context, "admin", "stop", "Stop", { data: { name: p.name } });
  }
  if (!["failed", "finished", "lost"].includes(p.state)) return "";
  return button(context, "admin", "forget", "Remove", { data: { name: p.name } });
}

const actions = {
  async stop({ dataset: { name } }, { say, refresh }) {
    const text = html`<p>${name} stops after its current batch. It can be started again from its checkpoint.</p>`;
    if (!(await confirm({ title: "Stop the pipeline", text, button: `Stop ${name}`, danger: false }))) return;
    await ask("POST", path`/api/v1/pipelines/${name}/stop`);
    say(`${name} was asked to stop.`);
    refresh();
  },
  async forget({ dataset: { name } }, { say, go, refresh }) {
    const text = html`<p>
      The last report and the runs of ${name} are removed from this list. It appears again when it reports.
    </p>`;
    if (!(await confirm({ title: "Remove the pipeline", text, button: `Remove ${name}`, danger: false }))) return;
    await ask("DELETE", path`/api/v1/pipelines/${name}`);
    say(`${name} was removed.`);
    go("#/pipelines");
    refresh();
  },
};

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
    const runs = data.pipelines
      .flatMap((p) => p.runs.map((run) => ({ ...run, pipeline: p.name })))
      .toSorted((a, b) => b.started_at - a.started_at);
    return html`<h1>Pipelines</h1>
      ${table({
        columns: [...PIPELINES, { name: "actions", title: "", kind: "actions", cell: (p) => deed(p, context) }],
        rows: data.pipelines,
        key: (p) => p.name,
        href: (p) => linkTo(p.name),
        caption: "Pipelines",
        empty: teach("No pipeline has reported yet.", "penstock pipeline run pipeline.yaml"),
      })}
      ${rolledUp(data.rollup)}
      ${
        runs.length
          ? html`<h2>Runs</h2>
              ${table({
                columns: ALL_RUNS,
                rows: runs.slice(0, 50),
                key: (r) => `${r.pipeline}${r.started_at}`,
                caption: "Runs, the newest first",
              })}`
          : ""
      }`;
  },
  actions,
};

/** The charts of a pipeline's last minutes. */
function charts(p) {
  const last = p.minutes.at(-1)?.at ?? 0;
  const times = Array.from({ length: MINUTES }, (_, i) => (last - (MINUTES - 1 - i) * 60) * 1000);
  const chart = (name, title, label) =>
    html`<div class="card">
      <h2>${title}</h2>
      ${lines({ times, series: [{ name: label, values: perMinute(p, name) }], title, format: count })}
    </div>`;
  return html`<div class="cards">${chart("rows", "Rows per minute", "out")}${chart("lag", "Lag", "lag")}</div>`;
}

export const pipeline = {
  path: "/pipelines/:pipeline",
  title: ({ pipeline: name }) => name,
  crumbs: ({ pipeline: name }) => html`<a href="#/pipelines">Pipelines</a> / <b>${name}</b>`,
  load: ({ pipeline: name }, _, signal) => get(path`/api/v1/pipelines/${name}`, {}, signal),
  view(p, context) {
    return html`<h1>${p.name} ${state(p)} <small>on ${p.host}${p.master ? `, Spark ${p.master}` : ""}</small></h1>
      <div class="tools">${deed(p, context)}</div>
      ${p.error ? html`<p class="problem" role="alert">${visible(String(p.error))}</p>` : ""}
      <div class="figures">
        ${figure("rows/s", rate(p.rows_per_second))} ${figure("rows", count(p.rows))} ${figure("lag", count(p.lag))}
        ${figure("last batch", p.batch < 0 ? "–" : duration(p.batch_ms / 1000))}
        ${figure(
          "behind",
          p.lag_seconds === null ? "–" : duration(p.lag_seconds),
          p.target_seconds === null ? "" : html`<small>at most ${duration(p.target_seconds)}</small>`,
        )}
        ${p.state_rows ? figure("state", html`${count(p.state_rows)} <small>rows, ${size(p.state_bytes)}</small>`) : ""}
      </div>
      <h2>Graph</h2>
      ${
        p.graph.length
          ? graph(p.graph, `Graph of ${p.name}`)
          : html`<div class="empty">This pipeline does not report its sources, steps and sinks.</div>`
      }
      ${p.position ? pairs([["position", visible(p.position)]]) : ""}
      <h2>Last minutes</h2>
      ${charts(p)}
      <h2>Last batches</h2>
      ${table({
        columns: BATCHES,
        rows: p.batches,
        key: (b) => b.batch,
        caption: "Last batches",
        empty:
          p.batch < 0
            ? "No batch yet."
            : `${plural(p.batch + 1, "batch", "batches")}; it does not report them one by one.`,
      })}
      <h2>Runs</h2>
      ${table({ columns: RUNS, rows: p.runs, key: (r) => r.started_at, caption: "Runs, the newest first", empty: "No run yet." })}`;
  },
  actions,
};
