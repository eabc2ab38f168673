/** Dead letters grouped by error; requeue or purge those of a queue and group. */
import { ask, get } from "../api.js";
import { html } from "../html.js";
import { count, plural } from "../format.js";
import { confirm } from "../components/dialog.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import { button, filter, since, teach } from "./common.js";

const COLUMNS = [
  { name: "error", title: "Error", cell: (row) => html`<span class="bad">${visible(row.error)}</span>` },
  { name: "count", title: "Count", number: true, card: true, cell: (row) => count(row.count) },
  { name: "where", title: "Where", cell: (row) => html`<a href="#/queues/${encodeURIComponent(row.queue)}">${row.queue}</a>@${row.group || "queue mode"}` },
  { name: "last", title: "Last", number: true, card: true, cell: (row) => since(row.last) },
  { name: "first", title: "First", number: true, cell: (row) => since(row.first) },
];

const which = ({ queue, group }) => ({ queue, consumerGroup: group });

export const deadLetters = {
  path: "/dead-letters",
  title: () => "Dead letters",
  load: (_, query, signal) => get("/api/v1/dlq/errors", { ...which(query), filter: query.filter }, signal),
  view(data, context) {
    const { query } = context;
    const chosen = Boolean(query.queue) && !query.filter;
    const all = html`all ${count(data.total)} of ${query.queue ?? ""}${query.group ? html`@${query.group}` : ""}`;
    return html`<h1>Dead letters <small>${plural(data.total, "message")}</small></h1>
      <div class="tools">${filter(query, "Filter by error")}${filter(query, "Queue", "queue")}${filter(query, "Group", "group")}
        ${chosen && data.total ? html`${button(context, "read_write", "requeue", html`Requeue ${all}`)}${button(context, "admin", "purge", html`Purge ${all}`, { danger: true })}`
    : html`<small>Name a queue to requeue or purge its dead letters.</small>`}</div>
      ${table({ columns: COLUMNS, rows: data.errors, key: (row) => `${row.queue}/${row.group}/${row.error}`, caption: "Dead letters by error",
        href: (row) => `#/dead-letters?queue=${encodeURIComponent(row.queue)}&group=${encodeURIComponent(row.group)}`,
        empty: query.filter || query.queue ? "No dead letter matches." : teach("No message has failed for good. When one does, it is listed here and by", "penstock queue dlq list") })}`;
  },
  actions: {
    async requeue(_, { query, data, say, refresh }) {
      const where = `${query.queue}${query.group ? `@${query.group}` : ""}`;
      const text = html`<p>${plural(data.total, "message")} will be delivered again to ${where}. Consumers see them as new deliveries.</p>`;
      if (!(await confirm({ title: "Requeue dead letters", text, button: `Requeue ${plural(data.total, "message")}`, danger: false }))) return;
      const done = await ask("POST", "/api/v1/dlq/requeue", { query: which(query) });
      say(`${plural(done.requeued, "message")} requeued.`);
      refresh();
    },
    async purge(_, { query, data, say, refresh }) {
      const text = html`<p>${plural(data.total, "dead letter")} of ${query.queue} will be deleted for good.</p>`;
      if (!(await confirm({ title: "Purge dead letters", text, button: `Delete ${plural(data.total, "dead letter")}`, typed: query.queue }))) return;
      const done = await ask("DELETE", "/api/v1/dlq", { query: which(query) });
      say(`${plural(done.deleted, "dead letter")} deleted.`);
      refresh();
    },
  },
};
