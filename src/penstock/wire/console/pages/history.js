/** Charts over an hour, a day or a week, from the minutes that PostgreSQL keeps. */
import { get } from "../api.js";
import { html } from "../html.js";
import { count, duration, rate } from "../format.js";
import { lines } from "../components/chart.js";

const RANGES = [
  ["15m", "15 min"],
  ["1h", "1 h"],
  ["24h", "24 h"],
  ["7d", "7 days"],
];

const ROLLED_UP_MS = 30_000; // a new minute comes once a minute
let last = { key: "", at: 0, minutes: null };

/** Load the series of the range in the address; null for the last 15 minutes, which the live state has. */
export const loadHistory = (query, signal, queue = "", standard = "1h") => {
  const range = query.range ?? standard;
  return range === "15m" ? null : get("/api/v1/history", { range, queue }, signal);
};

/** Links to the other time ranges. */
export const ranges = (context, standard, some = RANGES) =>
  html`<span class="tabs" role="navigation" aria-label="Time range"
    >${some.map(
      ([name, title]) =>
        html`<a
          class="badge"
          href="${context.withQuery({ range: name })}"
          aria-current="${(context.query.range ?? standard) === name ? "page" : null}"
          >${title}</a
        >`,
    )}</span
  >`;

const chart = ({ times, series }, names, title) =>
  html`<div class="card">
    <h2>${title}</h2>
    ${lines({ times, series: names.map((name) => ({ name: words(name), values: series[name] ?? [] })), title, format: rate })}
  </div>`;

/** The words of a name in camelCase. */
const words = (name) => name.replace(/[A-Z]/g, (letter) => ` ${letter.toLowerCase()}`);

/** Load the last hour of a queue or a topic from the rollup; no points where the pipeline did not run. */
export async function loadRolledUp(of, signal) {
  const key = JSON.stringify(of);
  if (!(Date.now() - last.at < ROLLED_UP_MS && last.key === key)) {
    last = {
      key,
      at: Date.now(),
      minutes: await get("/api/v1/analytics", { ...of, interval: "minute", limit: 2000 }, signal),
    };
  }
  return last.minutes;
}

/** Minutes of all groups together: the longest lag and latency of each; null where it has none. */
function worst(points) {
  const minutes = new Map();
  const larger = (a, b) => (a === null || a === undefined ? (b ?? null) : Math.max(a, b ?? a));
  for (const { time, lag, latency } of points) {
    const row = minutes.get(time) ?? { lag: null, p50: null, p99: null };
    minutes.set(time, {
      lag: larger(row.lag, lag),
      p50: larger(row.p50, latency?.p50),
      p99: larger(row.p99, latency?.p99),
    });
  }
  const rows = [...minutes.values()];
  const values = (name) => ({ name, values: rows.map((row) => row[name]) });
  return {
    times: [...minutes.keys()].map((time) => Date.parse(time)),
    lag: [values("lag")],
    latency: [values("p50"), values("p99")],
  };
}

/** Charts of figures that only the rollup has: lag and latency over the last hour. */
export function rolledUp(minutes) {
  if (!minutes?.points.length) return "";
  const { times, lag, latency } = worst(minutes.points);
  return html`<div class="cards">
    <div class="card">
      <h2>Lag <small>per minute, from the rollup</small></h2>
      ${lines({ times, series: lag, title: "Lag per minute", format: count })}
    </div>
    <div class="card">
      <h2>Latency from push to ack <small>per minute, from the rollup</small></h2>
      ${lines({ times, series: latency, title: "From push to ack, per minute", format: (ms) => duration(ms / 1000) })}
    </div>
  </div>`;
}

/** The charts of a queue: its minutes, and the figures of the rollup. */
export const loadCharts = async (name, query, signal) => {
  const [series, minutes] = await Promise.all([
    loadHistory(query, signal, name),
    loadRolledUp({ queue: name }, signal),
  ]);
  return { ...series, minutes };
};

export function history(data, context) {
  return html`<div class="tools">${ranges(context, "1h", RANGES.slice(1))}</div>
    <div class="cards">
      ${chart(data.list, ["pushed", "completed"], "Messages per second")}
      ${chart(data.list, ["failed", "deadLetters"], "Failed attempts and dead letters per second")}
    </div>
    ${rolledUp(data.list.minutes)}`;
}
