/** In five seconds: is it well? */
import { html } from "../html.js";
import { count, duration, plural, rate, size } from "../format.js";
import { live } from "../live.js";
import { bars, lines, sparkline } from "../components/chart.js";
import { age, figure, groupName, pairs, since, teach } from "./common.js";
import { loadHistory, ranges } from "./history.js";

const tail = (name) => (live.history.series[name] ?? []).slice(-60);

const PARTS = { queues: "queues (per group)", routes: "routes", topics: "topics" };
const TERMS = [
  ["delivered", "delivered"],
  ["dead", "dead"],
  ["dropped", "dropped"],
  ["waiting", "waiting"],
  ["skipped", "skipped, or older than the group"],
  ["kept", "kept"],
  ["removed", "removed by retention"],
  ["compacted", "removed by compaction"],
];
const ONLY_SOME = ["dropped", "skipped", "removed", "compacted"]; // shown when there are any

/** accepted = delivered + dead + dropped + waiting (+ skipped), per part (of topics: kept + removed + compacted), and whether it is so. */
function ledger(rows) {
  return html`<div class="card">
    <h2>Messages by outcome</h2>
    ${rows.map(
      (row) =>
        html`<div class="ledger" data-key="${row.part}">
          <div class="sum">
            <b>${count(row.accepted)}</b> accepted by ${PARTS[row.part] ?? row.part}
            ${row.agrees ? html`<span class="good">✓ all accounted for</span>` : row.agrees === false ? html`<span class="bad">✗ the figures do not add up</span>` : ""}
          </div>
          ${bars(
            TERMS.filter(([name]) => name in row && (row[name] || !ONLY_SOME.includes(name))).map(([name, label]) => ({
              label,
              value: row[name],
            })),
            count,
            `Where the messages of ${row.part} are`,
          )}
          ${row.skipped ? html`<p><small>“Skipped” is not counted but computed as the remainder, so this total cannot reveal a loss.</small></p>` : ""}
        </div>`,
    )}
    ${rows.length ? "" : html`<p>No group, route or topic has accepted anything yet.</p>`}
  </div>`;
}

function database(card) {
  if (!card)
    return html`<div class="card">
      <h2>PostgreSQL</h2>
      <p>unknown</p>
    </div>`;
  const oldest = card.oldestTransaction;
  return html`<div class="card">
    <h2>PostgreSQL ${card.up ? html`<span class="good">● up</span>` : html`<span class="bad">✗ down</span>`}</h2>
    ${pairs([
      ["commit", duration(card.commitSeconds)],
      ["oldest transaction", oldest ? html`${age(oldest.seconds, 60)} <small>${oldest.who}</small>` : "none"],
      ["dead rows", count(card.deadRows)],
      [
        "messages per commit",
        card.messagesPerCommit === null || card.messagesPerCommit === undefined
          ? "–"
          : card.messagesPerCommit.toFixed(1),
      ],
      ["WAL", card.walPerSecond === null ? "–" : `${size(card.walPerSecond)}/s`],
      ["connections", `${count(card.connections)} of ${count(card.maxConnections)}`],
    ])}
  </div>`;
}

function machine(now) {
  const { disk, buffers, brokers = [] } = now;
  const left = disk?.daysLeft;
  const used = disk ? 1 - disk.free / disk.total : null;
  return html`<div class="card">
    <h2>Disk, buffers, brokers</h2>
    ${pairs([
      [
        "disk",
        disk
          ? html`${Math.round(used * 100)} % used, ${size(disk.free)}
            free${left === null || left === undefined ? "" : html`, full in <span class="${left < 7 ? "bad" : ""}">${plural(Math.floor(left), "day")}</span> at this rate`}`
          : "–",
      ],
      [
        "buffers",
        buffers
          ? html`<a href="#/buffers">${buffers.mode}</a>, ${count(buffers.pending)}
              waiting${buffers.failed ? html`, <span class="bad">${count(buffers.failed)} failed</span>` : ""}`
          : "–",
      ],
      [
        "brokers",
        html`<a href="#/system">${plural(brokers.length, "process", "processes")}</a
          >${brokers.slice(0, 4).map((broker) => html`<div>${broker.id}${broker.self ? " (this one)" : ""} <small>${broker.cpu === null || broker.cpu === undefined ? "" : `${broker.cpu.toFixed(2)} cores, `}seen ${since(broker.lastSeen)}</small></div>`)}`,
      ],
    ])}
  </div>`;
}

export const overview = {
  path: "/overview",
  title: () => "Overview",
  every: 30_000,
  load: async (_, query, signal) => ({ history: await loadHistory(query, signal, "", "15m") }),
  view(data, context) {
    const now = live.now;
    if (!now)
      return html`<h1>Overview</h1>
        <p class="loading">…</p>`;
    const sample = now.sample ?? {};
    const { times, series } = data.history ?? live.history;
    const latency = now.latency;
    const groups = now.groups ?? [];
    return html`<h1 class="hidden">Overview</h1>
      ${now.problems?.length ? "" : html`<p class="well">✓ No problems.</p>`}
      <div class="figures">
        ${figure("pushed/s", rate(sample.pushed), sparkline(tail("pushed"), "pushed", "pushed per second"))}
        ${figure("delivered/s", rate(sample.delivered), sparkline(tail("delivered"), "delivered", "delivered per second"))}
        ${figure("waiting", count(sample.waiting), sparkline(tail("waiting"), "waiting", "waiting messages"))}
        ${figure("oldest waiting", age(now.oldest))}
        ${figure("push → ack p50", latency ? duration(latency.p50) : "–", latency ? html`<small title="99 % of messages take no longer">p99 ${duration(latency.p99)}</small>` : "")}
      </div>
      <div class="cards">
        <div class="card">
          <h2>In and out, messages per second ${ranges(context, "15m")}</h2>
          ${lines({ times, series: ["pushed", "delivered"].map((name) => ({ name, values: series[name] ?? [] })), title: "Messages per second", format: rate })}
        </div>
        ${ledger(now.ledger ?? [])}
      </div>
      <div class="cards">
        <div class="card">
          <h2>Groups by lag</h2>
          ${
            groups.length
              ? bars(
                  groups.map((group) => ({
                    label: `${group.queue}@${groupName(group.group)}`,
                    value: group.lag,
                    more: group.lag ? duration(group.seconds) : "",
                    href: `#/queues/${encodeURIComponent(group.queue)}`,
                  })),
                  count,
                  "Groups by lag",
                )
              : teach("No group has consumed anything yet.", "penstock queue pop orders@billing")
          }
        </div>
        ${database(now.database)}${machine(now)}
      </div>`;
  },
};
