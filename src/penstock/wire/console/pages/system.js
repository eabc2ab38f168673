/** What this broker is, where it listens, and its recent warnings. */
import { get } from "../api.js";
import { html } from "../html.js";
import { count, duration } from "../format.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import { pairs, since } from "./common.js";

const LOG = [
  { name: "at", title: "When", card: true, cell: (l) => since(l.at) },
  { name: "level", title: "Level", cell: (l) => html`<span class="badge ${l.level === "error" ? "bad" : l.level === "warning" ? "warn" : ""}">${l.level}</span>` },
  { name: "message", title: "Message", card: true, cell: (l) => visible(l.message) },
  { name: "logger", title: "Part", cell: (l) => l.logger },
];

const LEVELS = ["warning", "error", "info"];

export const system = {
  path: "/system",
  title: () => "System",
  async load(_, query, signal) {
    const about = get("/health", {}, signal, true);
    const log = get("/api/v1/logs", { level: query.level ?? "warning", limit: 200 }, signal).catch((error) => ({ lines: [], refused: error.message }));
    return { about: await about, log: await log };
  },
  view({ about, log }, { query }) {
    return html`<h1>System</h1>
      <div class="cards"><div class="card">${pairs([["version", about.version], ["server", about.server], ["running for", duration(about.uptime)], ["worker", count(about.worker_id)],
    ["database", about.database], ["database host", about.database_host || "–"]])}</div>
        <div class="card"><h2>Listeners</h2>${pairs(Object.entries(about.listeners))}</div></div>
      <p><a href="../docs">HTTP API</a> · <a href="../metrics">Prometheus metrics</a></p>
      <h2>Log</h2>${log.refused ? html`<p>${log.refused}</p>` : html`<div class="tools"><select data-choice="level" aria-label="Level">${LEVELS.map((level) => html`<option ${level === (query.level ?? "warning") ? html`selected` : ""}>${level}</option>`)}</select></div>
        ${table({ columns: LOG, rows: log.lines, key: (l) => `${l.at}${l.message}`, caption: "Recent log lines", empty: "No such line since the broker started." })}`}`;
  },
};
