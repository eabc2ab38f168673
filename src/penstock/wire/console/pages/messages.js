/** The message browser of a queue, and one message as each group sees it. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { clock, day, moment, size } from "../format.js";
import { confirm } from "../components/dialog.js";
import { payload } from "../components/json.js";
import { table } from "../components/table.js";
import { button, filter, pairs, teach } from "./common.js";

const MODES = ["json", "raw", "hex"];
const linkTo = (message) => `#/messages/${encodeURIComponent(message.partitionId)}/${encodeURIComponent(message.transactionId)}`;
const at = (text) => Date.parse(text);
const STATES = { dead_letter: "bad", failed: "bad", processing: "warn", completed: "good" };

const COLUMNS = [
  { name: "createdAt", title: "Pushed", card: true, cell: (m) => html`<time title="${moment(at(m.createdAt))}">${day(at(m.createdAt))} <small>${clock(at(m.createdAt), true)}</small></time>` },
  { name: "partition", title: "Partition", card: true, cell: (m) => m.partition },
  { name: "transactionId", title: "Transaction id", cell: (m) => html`<code>${m.transactionId}</code>` },
  { name: "status", title: "Status", cell: (m) => html`<span class="badge ${STATES[m.status] ?? ""}">${m.status}</span>` },
  { name: "producer", title: "By", cell: (m) => m.producerSub ?? "" },
];

export function messages(data, context) {
  const { query } = context;
  return html`<div class="tools">${filter(query, "Partition", "partition")}
      <label>since <input type="datetime-local" data-choice="from" value="${query.from ?? ""}"></label></div>
    ${table({ columns: COLUMNS, rows: data.list.messages, key: (m) => `${m.partitionId}/${m.transactionId}`, href: linkTo, caption: "Messages, the newest first",
      empty: query.partition || query.from ? "No message matches." : teach("There is no message yet.", `penstock queue push ${data.name} '{"id": 7}'`) })}
    <div class="pager">${query.cursor ? html`<a href="${context.withQuery({ cursor: "" })}">← newest</a>` : ""}
      ${data.list.next ? html`<a href="${context.withQuery({ cursor: data.list.next })}">older →</a>` : ""}</div>`;
}

export const message = {
  path: "/messages/:partition/:id",
  title: ({ id }) => `Message ${id}`,
  crumbs: ({ id }) => html`<a href="#/queues">Queues</a> / <b>${id}</b>`,
  load: ({ partition, id }, _, signal) => get(path`/api/v1/messages/${partition}/${id}`, {}, signal),
  view(data, context) {
    const mode = context.query.mode ?? "json";
    const text = JSON.stringify(data.payload ?? null);
    const known = Object.entries(data).filter(([name, value]) => name !== "payload" && value !== null && typeof value !== "object");
    return html`<h1>${data.queue} / ${data.partition} <small>${size(text.length)}</small></h1>
      <div class="tools">${button(context, "read_write", "copy-message", "Push a copy")}${button(context, "read_write", "requeue", "Deliver again")}
        ${button(context, "read_write", "remove", "Delete", { danger: true })}<button data-action="copy" data-text="${text}">Copy payload</button></div>
      <div class="cards"><div class="card"><div class="tabs">${MODES.map((one) => html`<a class="badge" href="${context.withQuery({ mode: one })}" ${one === mode ? html`aria-current="page"` : ""}>${one}</a>`)}</div>
        ${payload(text, mode)}</div><div class="card">${pairs(known.map(([name, value]) => [name, String(value)]))}</div></div>`;
  },
  actions: {
    async "copy-message"(_, { data, say }) {
      const text = html`<p>A new message with this payload goes to the end of ${data.queue} / ${data.partition}, under a new transaction id. All groups will get it.</p>`;
      if (!(await confirm({ title: "Push a copy", text, button: "Push a copy", danger: false }))) return;
      const [pushed] = await ask("POST", "/api/v1/push", { body: { items: [{ queue: data.queue, partition: data.partition, payload: data.payload }] } });
      say(`${pushed.status}: ${pushed.transaction_id}`);
    },
    async requeue(_, { params, data, say, refresh }) {
      const text = html`<p>The message is delivered again to the groups that are done with it, from its place in ${data.queue} / ${data.partition}.</p>`;
      if (!(await confirm({ title: "Deliver again", text, button: "Deliver again", danger: false }))) return;
      await ask("POST", path`/api/v1/messages/${params.partition}/${params.id}/retry`);
      say("It will be delivered again.");
      refresh();
    },
    async remove(_, { params, data, say, go }) {
      const text = html`<p>The message is deleted from ${data.queue} for all groups.</p>`;
      if (!(await confirm({ title: "Delete the message", text, button: "Delete 1 message" }))) return;
      await ask("DELETE", path`/api/v1/messages/${params.partition}/${params.id}`);
      say("Deleted.");
      go(`#/queues/${encodeURIComponent(data.queue)}?tab=messages`);
    },
  },
};
