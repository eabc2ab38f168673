/** In five seconds: is it well? */
import { each, html } from "../html.js";
import { count, duration, plural, rate, size } from "../format.js";
import { live } from "../live.js";
import { bars, inSteps, lines, sparkline } from "../components/chart.js";
import { age, figure, groupName, pairs, since, teach } from "./common.js";
import { loadHistory, ranges } from "./history.js";

const MINUTE = 60_000;

/** The samples of the last minute, for a sparkline. */
function tail(name) {
  const { times, series } = live.history;
  const first = times.findIndex((at) => at > times.at(-1) - MINUTE);
  return first < 0 ? [] : (series[name] ?? []).slice(first);
}

const WAITING = "messages that a group of their queue has not finished yet, or that no group reads";

const PARTS = { queues: "queues, once per group", routes: "routes", topics: "topics" };
// A message waits once; what is outstanding are deliveries, one for each group that has not had it.
const TERMS = [
  ["completed", "completed"],
  ["delivered", "delivered"],
  ["deadLetters", "dead letters"],
  ["dropped", "dropped"],
  ["waiting", "outstanding"],
  ["skipped", "skipped, or older than the group"],
  ["kept", "kept"],
  ["removed", "removed by retention"],
  ["compacted", "removed by compaction"],
];
const ONLY_SOME = ["dropped", "skipped", "removed", "compacted"]; // shown when there are any

/** Return whether everything accepted is accounted for; null if that is not known. */
const verdict = (agrees) =>
  agrees === null || agrees === undefined
    ? ""
    : agrees
      ? html`<span class="good">✓ all accounted for</span>`
      : html`<span class="bad">✗ the figures do not add up</span>`;

/**
 * accepted = completed (of routes: delivered) + dead letters + dropped + outstanding (+ skipped), per part.
 * Of topics: accepted = kept + removed + compacted.
 */
function part(row) {
  const terms = TERMS.filter(([name]) => name in row && (row[name] || !ONLY_SOME.includes(name)));
  return html`<div class="ledger">
    <div class="sum">
      <b>${count(row.accepted)}</b> accepted by ${PARTS[row.part] ?? row.part} ${verdict(row.agrees)}
    </div>
    ${bars(
      terms.map(([name, label]) => ({ label, value: row[name] })),
      count,
      `Where the messages of ${row.part} are`,
    )}
    ${
      row.skipped
        ? html`<p>
            <small>“Skipped” is not counted but computed as the remainder, so this total cannot reveal a loss.</small>
          </p>`
        : ""
    }
  </div>`;
}

const ledger = (rows) =>
  html`<div class="card">
    <h2>Where everything is</h2>
    ${each(rows, (row) => row.part, part)}
    ${rows.length ? "" : html`<p>No group, route or topic has accepted anything yet.</p>`}
  </div>`;

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

const DAY = 86_400;

/** How full the disk is, and when it will be full at the rate of the last hours. */
function space(disk) {
  if (!disk) return "–";
  const left = disk.fullInSeconds;
  const end =
    left === null
      ? ""
      : html`, full in <span class="${left < 7 * DAY ? "bad" : ""}">${duration(left)}</span> at the rate of the last
          hours`;
  return html`${Math.round((1 - disk.free / disk.total) * 100)} % used, ${size(disk.free)} free${end}`;
}

const process = (broker) =>
  html`<div>
    ${broker.id}${broker.self ? " (this one)" : ""}
    <small>${broker.cpu === null ? "" : `${broker.cpu.toFixed(2)} cores, `}seen ${since(broker.lastSeen)}</small>
  </div>`;

function machine({ disk, buffers, brokers = [] }) {
  const failed = buffers?.failed ? html`, <span class="bad">${count(buffers.failed)} failed</span>` : "";
  return html`<div class="card">
    <h2>Disk, buffers, brokers</h2>
    ${pairs([
      ["disk", space(disk)],
      [
        "buffers",
        buffers ? html`<a href="#/buffers">${buffers.mode}</a>, ${count(buffers.pending)} buffered${failed}` : "–",
      ],
      [
        "brokers",
        html`<a href="#/system">${plural(brokers.length, "process", "processes")}</a>
          ${brokers.slice(0, 4).map(process)}`,
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
    const { times, series } = data.history ?? inSteps(live.history);
    const latency = now.latency;
    const groups = now.groups ?? [];
    return html`<h1 class="hidden">Overview</h1>
      ${now.problems?.length ? "" : html`<p class="well">✓ No problems.</p>`}
      <div class="figures">
        ${figure("pushed/s", rate(sample.pushed), sparkline(tail("pushed"), "pushed", "pushed per second"))}
        ${figure("completed/s", rate(sample.completed), sparkline(tail("completed"), "completed", "completed per second"))}
        ${figure(
          html`<span title="${WAITING}">waiting</span>`,
          count(sample.waiting),
          sparkline(tail("waiting"), "waiting", "waiting messages"),
        )}
        ${figure("oldest waiting", age(now.oldest))}
        ${figure(
          "push → ack p50",
          latency ? duration(latency.p50) : "–",
          latency ? html`<small title="99 % of messages take no longer">p99 ${duration(latency.p99)}</small>` : "",
        )}
      </div>
      <div class="cards">
        <div class="card">
          <h2>In and out, messages per second ${ranges(context, "15m")}</h2>
          ${lines({
            times,
            series: ["pushed", "completed"].map((name) => ({ name, values: series[name] ?? [] })),
            title: "Messages per second",
            format: rate,
          })}
        </div>
        ${ledger(now.ledger ?? [])}
      </div>
      <div class="cards">
        <div class="card">
          <h2>Groups by waiting messages</h2>
          ${
            groups.length
              ? bars(
                  groups.map((group) => ({
                    label: `${group.queue}@${groupName(group.group)}`,
                    value: group.waiting,
                    more: group.waiting ? duration(group.lagSeconds) : "",
                    href: `#/queues/${encodeURIComponent(group.queue)}`,
                  })),
                  count,
                  "Groups by waiting messages",
                )
              : teach("No group has consumed anything yet.", "penstock queue pop orders@billing")
          }
        </div>
        ${database(now.database)}${machine(now)}
      </div>`;
  },
};
