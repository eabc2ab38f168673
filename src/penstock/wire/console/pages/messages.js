/** The message browser of a queue, and one message with its life line. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { clock, count, moment, size } from "../format.js";
import { confirm } from "../components/dialog.js";
import { payload, visible } from "../components/json.js";
import { table } from "../components/table.js";
import { timeline } from "../components/timeline.js";
import { button, filter, pairs, teach } from "./common.js";

const MODES = ["json", "raw", "hex"];
const textOf = (message) => (typeof message.payload === "string" ? message.payload : JSON.stringify(message.payload));
const linkTo = (message) => `#/messages/${encodeURIComponent(message.partitionId)}/${encodeURIComponent(message.transactionId)}`;

const COLUMNS = [
  { name: "seq", title: "#", number: true, cell: (m) => count(m.seq) },
  { name: "partition", title: "Partition", cell: (m) => m.partition },
  { name: "createdAt", title: "Pushed", card: true, cell: (m) => html`<time title="${moment(m.createdAt)}">${clock(m.createdAt, true)}</time>` },
  { name: "payload", title: "Payload", card: true, cell: (m) => html`<span class="mono">${visible(textOf(m).slice(0, 160))}</span>` },
  { name: "size", title: "Size", number: true, cell: (m) => size(m.size) },
  { name: "states", title: "Groups", cell: (m) => html`${(m.states ?? []).map((s) => html`<span class="badge ${s.state === "dead" ? "bad" : ""}">${s.group || "queue mode"} ${s.state}</span> `)}` },
];

export function messages(data, context) {
  const { query } = context;
  const list = data.messages;
  return html`<div class="tools">${filter(query, "JSON path, such as $.id = 7", "search")}${filter(query, "Partition", "partition")}${filter(query, "Transaction id", "id")}
      <label>since <input type="datetime-local" data-choice="from" value="${query.from ?? ""}"></label></div>
    ${table({ columns: COLUMNS, rows: list.messages, key: (m) => `${m.partitionId}/${m.transactionId}`, href: linkTo, caption: "Messages, the newest first",
      empty: query.search || query.partition || query.id ? "No message matches." : teach("There is no message yet.", `penstock queue push ${data.name} '{"id": 7}'`) })}
    <div class="pager">${list.searched !== undefined ? `looked at ${count(list.searched)} messages${list.complete ? "" : ", there are more"}` : ""}
      ${query.after ? html`<a href="${context.withQuery({ after: "" })}">← newest</a>` : ""}
      ${list.next ? html`<a href="${context.withQuery({ after: list.next })}">older →</a>` : ""}</div>`;
}

export const messageTools = {};

export const message = {
  path: "/messages/:partition/:id",
  title: ({ id }) => `Message ${id}`,
  crumbs: ({ id }) => html`<a href="#/queues">Queues</a> / <b>${id}</b>`,
  load: ({ partition, id }, _, signal) => get(path`/api/v1/messages/${partition}/${id}`, { lifeline: true }, signal),
  view(data, context) {
    const mode = context.query.mode ?? "json";
    const text = textOf(data);
    return html`<h1>${data.queue} / ${data.partition} / #${count(data.seq)} <small>${size(data.size ?? text.length)}</small></h1>
      ${data.events?.length ? timeline(data.events) : ""}
      <div class="tools">${button(context, "read_write", "copy-message", "Push a copy")}${button(context, "read_write", "requeue", "Deliver again")}
        ${button(context, "admin", "remove", "Delete", { danger: true })}<button data-action="copy" data-text="${text}">Copy payload</button></div>
      <div class="cards"><div class="card"><div class="tabs">${MODES.map((one) => html`<a class="badge" href="${context.withQuery({ mode: one })}" ${one === mode ? html`aria-current="page"` : ""}>${one}</a>`)}</div>
        ${data.encrypted && data.payload === null ? "encrypted: this broker does not have the key" : payload(text, mode)}</div>
        <div class="card">${pairs([["transaction id", html`<code>${data.transactionId}</code>`], ["pushed", moment(data.createdAt)], ["by", data.producer ?? "–"], ["trace id", data.traceId ?? "–"],
          data.headers && ["headers", html`${Object.entries(data.headers).map(([name, value]) => html`<div><code>${visible(name)}: ${visible(value)}</code></div>`)}`],
          ["groups", html`${(data.states ?? []).map((s) => html`<div>${s.group || "queue mode"}: ${s.state}</div>`)}`]])}</div></div>`;
  },
  actions: {
    async "copy-message"(_, { data, say }) {
      const text = html`<p>A new message with this payload goes to the end of ${data.queue} / ${data.partition}, under a new transaction id. All groups will get it.</p>`;
      if (!(await confirm({ title: "Push a copy", text, button: "Push a copy", danger: false }))) return;
      const [pushed] = await ask("POST", "/api/v1/push", { body: { items: [{ queue: data.queue, partition: data.partition, payload: JSON.parse(textOf(data)) }] } });
      say(`${pushed.status}: ${pushed.transaction_id ?? ""}`);
    },
    async requeue(_, { data, say, refresh }) {
      const text = html`<p>The message is delivered again to the groups that are done with it, from its place in ${data.queue} / ${data.partition}.</p>`;
      if (!(await confirm({ title: "Deliver again", text, button: "Deliver again", danger: false }))) return;
      await ask("POST", path`/api/v1/messages/${data.partitionId}/${data.transactionId}/retry`);
      say("It will be delivered again.");
      refresh();
    },
    async remove(_, { data, say, go }) {
      const text = html`<p>The message is deleted from ${data.queue} for all groups.</p>`;
      if (!(await confirm({ title: "Delete the message", text, button: "Delete 1 message" }))) return;
      await ask("DELETE", path`/api/v1/messages/${data.partitionId}/${data.transactionId}`);
      say("Deleted.");
      go(`#/queues/${encodeURIComponent(data.queue)}?tab=messages`);
    },
  },
};
