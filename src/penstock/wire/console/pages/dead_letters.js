/**
 * Dead letters grouped by error, with counts over time and samples. What is asked for stands in the
 * address (queue, group, error); "requeue" and "purge" mean all that match it, and the broker does it.
 */
import { ask, get } from "../api.js";
import { html } from "../html.js";
import { ago, count, plural } from "../format.js";
import { bars, sparkline } from "../components/chart.js";
import { confirm } from "../components/dialog.js";
import { payload, visible } from "../components/json.js";
import { table } from "../components/table.js";
import { QUEUE_MODE, button, filter, groupName, since, teach } from "./common.js";
import { cancelTask, loadTasks, tasks } from "./tasks.js";

const SAMPLES = 10;
const place = (row) => `${row.queue}@${groupName(row.group)}`;
const linkTo = (row) =>
  `#/dead-letters?${new URLSearchParams({ queue: row.queue, group: row.group || QUEUE_MODE, filter: row.error })}`;

const COLUMNS = [
  {
    name: "error",
    title: "Error",
    kind: "text",
    card: true,
    cell: (row) => html`<span class="bad">${visible(row.error)}</span>`,
  },
  { name: "count", title: "Count", number: true, card: true, cell: (row) => count(row.count) },
  { name: "history", title: "Over time", cell: (row) => sparkline(row.history, "dead", `${row.error} over time`) },
  {
    name: "where",
    title: "Where",
    cell: (row) => html`<a href="#/queues/${encodeURIComponent(row.queue)}">${row.queue}</a>@${groupName(row.group)}`,
  },
  { name: "last", title: "Last", number: true, cell: (row) => since(row.last) },
  { name: "first", title: "First", number: true, cell: (row) => since(row.first) },
];

const LETTERS = [
  { name: "failedAt", title: "Failed", card: true, cell: (m) => since(Date.parse(m.failedAt)) },
  {
    name: "message",
    title: "Message",
    kind: "text",
    card: true,
    cell: (m) =>
      html`<a href="#/messages/${encodeURIComponent(m.partitionId)}/${encodeURIComponent(m.transactionId)}"
          >${m.queue} / ${m.partition}</a
        ><br /><small class="mono">${m.transactionId}</small>`,
  },
  { name: "attempts", title: "Attempts", number: true, cell: (m) => count(m.attempts) },
  {
    name: "error",
    title: "Error",
    kind: "text",
    card: true,
    cell: (m) => html`<span class="bad">${visible(m.errorMessage)}</span>`,
  },
  {
    name: "payload",
    title: "Payload",
    kind: "text",
    cell: (m) =>
      html`<details>
        <summary class="mono">${visible(JSON.stringify(m.data ?? null).slice(0, 80))}</summary>
        ${payload(JSON.stringify(m.data ?? null), "json")}
      </details>`,
  },
];

const which = ({ queue, group, filter: error }) => ({ queue, consumerGroup: group, error });
const inWords = ({ queue, group, filter: error }) =>
  [
    queue ? `of ${queue}${group ? `@${groupName(group)}` : ""}` : "of all queues",
    error ? `whose error contains “${error}”` : "",
  ]
    .filter(Boolean)
    .join(" ");

/** Where the messages go, with counts: named before anything happens. */
function destinations(data) {
  const rows = new Map();
  for (const row of data.errors) rows.set(place(row), (rows.get(place(row)) ?? 0) + row.count);
  return [...rows].map(([label, value]) => ({ label, value }));
}

export const deadLetters = {
  path: "/dead-letters",
  title: () => "Dead letters",
  every: 2000,
  async load(_, query, signal) {
    const [errors, samples, running] = await Promise.all([
      get("/api/v1/dlq/errors", { queue: query.queue, consumerGroup: query.group, filter: query.filter }, signal),
      get("/api/v1/dlq", { ...which(query), limit: SAMPLES }, signal),
      loadTasks(signal),
    ]);
    return { ...errors, samples: samples.messages, tasks: running.tasks };
  },
  view(data, context) {
    const { query } = context;
    const narrow = query.filter || query.queue || query.group;
    const all = html`all ${count(data.total)}`;
    return html`<h1>Dead letters <small>${plural(data.total, "message")}${narrow ? " that match" : ""}</small></h1>
      ${tasks(data.tasks, context)}
      <div class="tools">
        ${filter(query, "Filter by error")}${filter(
          query,
          "Queue",
          "queue",
          data.errors.map((row) => row.queue),
        )}${filter(
          query,
          "Group",
          "group",
          data.errors.map((row) => row.group),
        )}
        ${data.total ? html`${button(context, "read_write", "requeue", html`Requeue ${all}`, { primary: true })}${button(context, "admin", "purge", html`Purge ${all}`, { danger: true })}` : ""}
        ${narrow ? html`<a href="#/dead-letters">show all</a>` : ""}
      </div>
      ${table({
        columns: COLUMNS,
        rows: data.errors,
        key: (row) => `${row.queue}/${row.group}/${row.error}`,
        caption: "Dead letters by error",
        href: linkTo,
        empty: narrow
          ? "No dead letter matches."
          : teach("No message has failed for good. When one does, it is listed here and by", "penstock queue dlq list"),
      })}
      ${
        data.samples.length
          ? html`<h2>Newest</h2>
              ${table({ columns: [...LETTERS, { name: "actions", title: "", kind: "actions", cell: (m) => button(context, "read_write", "requeue-one", "Requeue", { data: { id: m.dlqId, to: `${m.queue} / ${m.partition}`, group: m.consumerGroup } }) }], rows: data.samples, key: (m) => m.dlqId, caption: "The newest dead letters that match" })}`
          : ""
      }`;
  },
  actions: {
    "cancel-task": cancelTask,
    async "requeue-one"(element, { say, refresh }) {
      const { id, to, group } = element.dataset;
      const text = html`<p>1 message in ${to} will be delivered to ${groupName(group)} again.</p>`;
      if (!(await confirm({ title: "Requeue a dead letter", text, button: "Requeue 1 message", danger: false })))
        return;
      await ask("POST", "/api/v1/dlq/requeue", { query: { id } });
      say("It will be delivered again.");
      refresh();
    },
    async requeue(_, { query, data, say, refresh }) {
      const oldest = Math.min(...data.errors.map((row) => row.oldest));
      const text = html`<p>
          ${plural(data.total, "message")} ${inWords(query)} will be delivered again. The oldest was pushed
          ${ago(oldest)}. Consumers see them as new deliveries.
        </p>
        ${bars(destinations(data), count, "Destinations")}
        <p><small>The broker does this in the background; you can leave this page.</small></p>`;
      if (
        !(await confirm({
          title: "Requeue dead letters",
          text,
          button: `Requeue ${plural(data.total, "message")}`,
          danger: false,
        }))
      )
        return;
      const task = await ask("POST", "/api/v1/tasks/requeue", { query: which(query) });
      say(`${plural(task.total, "message")} are being requeued.`);
      refresh();
    },
    async purge(_, { query, data, say, refresh }) {
      const typed = query.queue || "all queues";
      const text = html`<p>
          ${plural(data.total, "dead letter")} ${inWords(query)} will be deleted. This cannot be undone.
        </p>
        ${bars(destinations(data), count, "Where they are")}`;
      if (
        !(await confirm({
          title: "Purge dead letters",
          text,
          button: `Delete ${plural(data.total, "dead letter")}`,
          typed,
        }))
      )
        return;
      const task = await ask("POST", "/api/v1/tasks/purge", { query: which(query) });
      say(`${plural(task.total, "dead letter")} are being deleted.`);
      refresh();
    },
  },
};
