/** Charts over an hour, a day or a week, from the minutes that PostgreSQL keeps. */
import { get } from "../api.js";
import { html } from "../html.js";
import { rate } from "../format.js";
import { lines } from "../components/chart.js";

const RANGES = [["15m", "15 min"], ["1h", "1 h"], ["24h", "24 h"], ["7d", "7 days"]];

/** The series of the range in the address; null for the 15 minutes that the live state has. */
export const loadHistory = (query, signal, queue = "", standard = "24h") => {
  const range = query.range ?? standard;
  return range === "15m" ? null : get("/api/v1/history", { range, queue }, signal);
};

/** Links to the other ranges. */
export const ranges = (context, standard, some = RANGES) => html`<span class="tabs" role="navigation" aria-label="Time range">${some.map(([name, title]) => html`<a class="badge"
  href="${context.withQuery({ range: name })}" ${(context.query.range ?? standard) === name ? html`aria-current="page"` : ""}>${title}</a>`)}</span>`;

const chart = ({ times, series }, names, title) => html`<div class="card"><h2>${title}</h2>${lines({ times, series: names.map((name) => ({ name, values: series[name] ?? [] })), title, format: rate })}</div>`;

/** The tab of a queue. */
export function history(data, context) {
  return html`<div class="tools">${ranges(context, "24h", RANGES.slice(1))}</div>
    <div class="cards">${chart(data.list, ["pushed", "delivered"], "Messages per second")}${chart(data.list, ["failed", "dead"], "Failed attempts and dead letters per second")}</div>`;
}
