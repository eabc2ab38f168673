/** In five seconds: is it well? */
import { html } from "../html.js";
import { count, duration, rate, size } from "../format.js";
import { live } from "../live.js";
import { bars, lines, sparkline } from "../components/chart.js";
import { age, figure, pairs, since, teach } from "./common.js";

const tail = (name) => (live.history.series[name] ?? []).slice(-60);

/** What became of messages, counted once per group. Messages from before a group began are not in it. */
function ledger(rows) {
  return html`<div class="card"><h2>Where everything is</h2>${rows.map((row) => html`<div data-key="${row.part}">${pairs([
    ["pushed", count(row.accepted)], ["delivered", count(row.delivered)], ["dead letters", count(row.dead)],
    ["dropped", count(row.dropped)], ["waiting", count(row.waiting)]])}<small>over all queues, once per group</small></div>`)}
    ${rows.length ? "" : html`<p>Nothing was delivered to a group yet.</p>`}</div>`;
}

function database(card) {
  if (!card) return html`<div class="card"><h2>PostgreSQL</h2><p>unknown</p></div>`;
  const oldest = card.oldestTransaction;
  return html`<div class="card"><h2>PostgreSQL ${card.up ? html`<span class="good">● up</span>` : html`<span class="bad">✗ down</span>`}</h2>
    ${pairs([
      ["answers in", duration(card.answerSeconds)],
      ["oldest transaction", oldest ? html`${age(oldest.seconds, 60)} <small>${oldest.who}</small>` : "none"],
      ["dead rows", count(card.deadRows)],
      ["WAL", card.walPerSecond === null ? "–" : `${size(card.walPerSecond)}/s`],
      ["connections", `${count(card.connections)} of ${count(card.maxConnections)}`],
    ])}</div>`;
}

function machine(now) {
  const { disk, buffers, brokers = [] } = now;
  const used = disk ? 1 - disk.free / disk.total : null;
  return html`<div class="card"><h2>Disk, buffers, brokers</h2>${pairs([
    ["disk", disk ? html`${Math.round(used * 100)} % used, ${size(disk.free)} free` : "–"],
    ["buffers", buffers ? html`<a href="#/buffers">${buffers.mode}</a>, ${count(buffers.pending)} waiting${buffers.failed ? html`, <span class="bad">${count(buffers.failed)} failed</span>` : ""}` : "–"],
    ["brokers", html`${brokers.map((broker) => html`<div>${broker.id}${broker.self ? " (this one)" : ""} <small>${broker.version}, seen ${since(broker.lastSeen)}</small></div>`)}`],
  ])}</div>`;
}

export const overview = {
  path: "/overview",
  title: () => "Overview",
  view() {
    const now = live.now;
    if (!now) return html`<h1>Overview</h1><p class="loading">…</p>`;
    const sample = now.sample ?? {};
    const { times, series } = live.history;
    const groups = now.groups ?? [];
    return html`<h1 class="hidden">Overview</h1>
      <div class="figures">
        ${figure("pushed/s", rate(sample.pushed), sparkline(tail("pushed"), "pushed", "pushed per second"))}
        ${figure("delivered/s", rate(sample.delivered), sparkline(tail("delivered"), "delivered", "delivered per second"))}
        ${figure("waiting", count(sample.waiting), sparkline(tail("waiting"), "waiting", "waiting messages"))}
        ${figure("oldest waiting", age(now.oldest))}
      </div>
      <div class="cards"><div class="card"><h2>In and out <small>last 15 minutes</small></h2>
        ${lines({ times, series: ["pushed", "delivered"].map((name) => ({ name, values: series[name] ?? [] })), title: "Messages per second" })}</div>
        ${ledger(now.ledger ?? [])}</div>
      <div class="cards"><div class="card"><h2>Groups by lag</h2>${groups.length
        ? bars(groups.map((group) => ({ label: `${group.queue}@${group.group || "queue mode"}`, value: group.lag, href: `#/queues/${encodeURIComponent(group.queue)}` })), count, "Groups by lag")
        : teach("No group has consumed anything yet.", "penstock queue pop orders@billing")}</div>
        ${database(now.database)}${machine(now)}</div>`;
  },
};
