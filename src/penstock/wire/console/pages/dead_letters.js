/** Dead letters grouped by error, with counts over time; requeue or purge all that match. */
import { ask, get } from "../api.js";
import { html } from "../html.js";
import { count, plural } from "../format.js";
import { sparkline } from "../components/chart.js";
import { confirm } from "../components/dialog.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import { button, filter, since, teach } from "./common.js";

const matching = ({ queue, group, filter: error }) => ({ queue, consumerGroup: group, error });

const columns = (context) => [
  { name: "error", title: "Error", cell: (row) => html`<span class="bad">${visible(row.error)}</span>` },
  { name: "count", title: "Count", number: true, card: true, cell: (row) => count(row.count) },
  { name: "where", title: "Where", cell: (row) => html`<a href="#/queues/${encodeURIComponent(row.queue)}">${row.queue}</a>@${row.group || "queue mode"}` },
  { name: "history", title: "Over time", cell: (row) => sparkline(row.history ?? [], "dead", `dead letters of ${row.queue} over time`) },
  { name: "last", title: "Last", number: true, card: true, cell: (row) => since(row.last) },
  { name: "first", title: "First", number: true, cell: (row) => since(row.first) },
  { name: "sample", title: "Sample", cell: (row) => (row.sample ? html`<a href="#/messages/${encodeURIComponent(row.sample.partitionId)}/${encodeURIComponent(row.sample.transactionId)}">${row.sample.transactionId}</a>` : "") },
  { name: "actions", title: "", cell: (row) => button(context, "read_write", "requeue", "Requeue", { data: { queue: row.queue, group: row.group, error: row.error, count: row.count } }) },
];

/** Run a long action in the broker and show how far it is. Leaving the page does not stop it. */
async function follow(method, target, query, context, done) {
  const { task } = await ask(method, target, { query: { ...query, background: true } });
  for (;;) {
    const state = await get(`/api/v1/tasks/${encodeURIComponent(task)}`);
    context.state.progress = state.state === "running" ? state : null;
    context.draw();
    if (state.state === "failed") throw new Error(state.error);
    if (state.state === "finished") { context.say(done(state)); context.refresh(); return; }
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
}

export const deadLetters = {
  path: "/dead-letters",
  title: () => "Dead letters",
  load: (_, query, signal) => get("/api/v1/dlq/errors", { queue: query.queue, consumerGroup: query.group, filter: query.filter }, signal),
  view(data, context) {
    const { query, state } = context;
    return html`<h1>Dead letters <small>${count(data.total)} in all</small></h1>
      <div class="tools">${filter(query, "Filter by error")}${filter(query, "Queue", "queue")}${filter(query, "Group", "group")}
        ${button(context, "read_write", "requeue", `Requeue all ${count(data.total)} that match`, { data: { queue: query.queue ?? "", group: query.group ?? "", error: query.filter ?? "", count: data.total } })}
        ${button(context, "admin", "purge", "Purge all that match", { danger: true, data: { queue: query.queue ?? "", group: query.group ?? "", error: query.filter ?? "", count: data.total } })}</div>
      ${state.progress ? html`<p>${state.progress.what}: ${count(state.progress.done)} of ${count(state.progress.total)}
        <progress value="${state.progress.done}" max="${state.progress.total || 1}"></progress></p>` : ""}
      ${table({ columns: columns(context), rows: data.errors, key: (row) => `${row.queue}/${row.group}/${row.error}`, caption: "Dead letters by error",
        empty: query.filter || query.queue ? "No dead letter matches." : teach("No message has failed for good. When one does, it is listed here and by", "penstock queue dlq list orders") })}`;
  },
  actions: {
    async requeue(element, context) {
      const { queue, group, error, count: n } = element.dataset;
      const where = queue ? `${queue}${group ? `@${group}` : ""}` : "the queues and groups that they came from";
      const text = html`<p>${plural(Number(n), "message")}${error ? html` with the error “${visible(error)}”` : ""} will be delivered again to ${where}. Consumers see them as new deliveries.</p>`;
      if (!(await confirm({ title: "Requeue dead letters", text, button: `Requeue ${plural(Number(n), "message")}`, danger: false }))) return;
      await follow("POST", "/api/v1/dlq/requeue", matching({ queue, group, filter: error }), context, (state) => `${plural(state.done, "message")} requeued.`);
    },
    async purge(element, context) {
      const { queue, group, error, count: n } = element.dataset;
      const text = html`<p>${plural(Number(n), "dead letter")} will be deleted for good.</p>`;
      if (!(await confirm({ title: "Purge dead letters", text, button: `Delete ${plural(Number(n), "dead letter")}`, typed: queue || "all" }))) return;
      await follow("DELETE", "/api/v1/dlq", matching({ queue, group, filter: error }), context, (state) => `${plural(state.done, "dead letter")} deleted.`);
    },
  },
};
