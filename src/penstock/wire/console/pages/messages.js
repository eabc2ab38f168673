/** The message browser of a queue, and one message: its life line, its payload, what can be done. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { count, moment, size, when } from "../format.js";
import { confirm } from "../components/dialog.js";
import { payload } from "../components/json.js";
import { table } from "../components/table.js";
import { timeline } from "../components/timeline.js";
import { button, filter, pairs, teach } from "./common.js";

const MODES = ["json", "raw", "hex"];
const linkTo = (message) =>
  `#/messages/${encodeURIComponent(message.partitionId)}/${encodeURIComponent(message.transactionId)}`;
const at = (value) => (typeof value === "number" ? value : Date.parse(value));
const STATES = {
  dead_letter: ["dead letter", "bad"],
  failed: ["failed", "bad"],
  leased: ["leased", "warn"],
  waiting: ["waiting", ""],
  completed: ["delivered", "good"],
};
const state = (status) => {
  const [word, kind] = STATES[status] ?? [status, ""];
  return html`<span class="badge ${kind}">${word}</span>`;
};

const COLUMNS = [
  {
    name: "createdAt",
    title: "Pushed",
    card: true,
    cell: (m) => html`<time title="${moment(at(m.createdAt))}">${when(at(m.createdAt))}</time>`,
  },
  { name: "partition", title: "Partition", card: true, cell: (m) => m.partition },
  { name: "transactionId", title: "Transaction id", cell: (m) => html`<code>${m.transactionId}</code>` },
  { name: "status", title: "Status", cell: (m) => (m.state ? state(m.state) : html`<small>${size(m.size)}</small>`) },
  { name: "producer", title: "By", cell: (m) => m.producer ?? "" },
];

/** The rows of a queue's messages tab: a search when one is asked for, else the newest. */
export function loadMessages(queue, query, signal) {
  const from = query.from ? new Date(query.from).toISOString() : "";
  if (query.id) return get(path`/api/v1/queues/${queue}/messages`, { transactionId: query.id }, signal);
  if (query.search)
    return get(
      path`/api/v1/queues/${queue}/messages`,
      { search: query.search, partition: query.partition, from, cursor: query.cursor },
      signal,
    );
  return get(
    "/api/v1/messages",
    { queue, partition: query.partition, from: from || "2000-01-01T00:00:00Z", cursor: query.cursor, limit: 50 },
    signal,
  );
}

/** How old a listing may be that comes from `database.read_url`. */
const standby = (behind) =>
  behind === undefined
    ? ""
    : html`<p>
        <small>Read on a standby, ${behind < 1 ? "up to date" : `${count(Math.ceil(behind))} s behind`}.</small>
      </p>`;

export function messages(data, context) {
  const { query } = context;
  const { list } = data;
  const narrow = query.partition || query.from || query.search || query.id;
  return html`<div class="tools">
      ${filter(query, "Search payloads: text, or order.id=7", "search")}${filter(query, "Transaction id", "id")}${filter(query, "Partition", "partition")}
      <label class="beside">since <input type="datetime-local" data-choice="from" value="${query.from ?? ""}" /></label>
    </div>
    ${query.search ? html`<p><small>${count(list.searched)} messages searched, newest first${list.complete ? "; these are all" : ""}.</small></p>` : ""}
    ${standby(list.behindSeconds)}
    ${table({
      columns: COLUMNS,
      rows: list.messages,
      key: (m) => `${m.partitionId}/${m.transactionId}`,
      href: linkTo,
      caption: "Messages, the newest first",
      empty: narrow
        ? "No message matches."
        : teach("There is no message yet.", `penstock queue push ${data.name} '{"id": 7}'`),
    })}
    <div class="pager">
      ${query.cursor ? html`<a href="${context.withQuery({ cursor: "" })}">← newest</a>` : ""}
      ${list.next ? html`<a href="${context.withQuery({ cursor: list.next })}">${query.search ? "search older" : "older"} →</a>` : ""}
    </div>`;
}

export const message = {
  path: "/messages/:partition/:id",
  title: ({ id }) => `Message ${id}`,
  crumbs: ({ id }, data) =>
    html`<a href="#/queues">Queues</a> /
      ${data ? html`<a href="#/queues/${encodeURIComponent(data.queue)}">${data.queue}</a> / ` : ""}<b>${id}</b>`,
  every: 5000,
  async load({ partition, id }, _, signal) {
    const [one, { events }] = await Promise.all([
      get(path`/api/v1/messages/${partition}/${id}`, {}, signal),
      get(path`/api/v1/messages/${partition}/${id}/lifeline`, {}, signal),
    ]);
    return { ...one, events };
  },
  view(data, context) {
    const mode = context.query.mode ?? "json";
    const text = JSON.stringify(data.payload ?? null);
    const headers = Object.entries(data.headers ?? {});
    return html`<h1>
        ${data.queue} / ${data.partition}
        <small>${size(text.length)}${data.producer ? `, pushed by ${data.producer}` : ""}</small>
      </h1>
      <div class="tools">
        ${button(context, "read_write", "copy-message", "Push a copy")}${button(context, "read_write", "requeue", html`${data.state === "dead_letter" ? "Requeue" : "Deliver again"} → ${data.queue} / ${data.partition}`)}
        <button data-action="copy" data-text="${text}">Copy payload</button
        >${button(context, "read_write", "remove", "Delete", { danger: true })}
      </div>
      <div class="card life">${timeline(data.events)}</div>
      <div class="cards">
        <div class="card">
          <div class="tabs">
            ${MODES.map((one) => html`<a class="badge" href="${context.withQuery({ mode: one })}" aria-current="${one === mode ? "page" : null}">${one}</a>`)}
          </div>
          ${payload(text, mode)}
        </div>
        <div class="card">
          ${pairs([
            ["transaction id", html`<code>${data.transactionId}</code>`],
            ["id", html`<code>${data.id}</code>`],
            ["partition id", html`<code>${data.partitionId}</code>`],
            ["pushed", moment(at(data.createdAt))],
            data.traceId && ["trace id", html`<code>${data.traceId}</code>`],
            ["status", state(data.state)],
            ["encrypted", data.encrypted ? "yes" : "no"],
            ...headers.map(([name, value]) => [html`header <code>${name}</code>`, value]),
          ])}
        </div>
      </div>`;
  },
  actions: {
    async "copy-message"(_, { data, say }) {
      const text = html`<p>
        A new message with this payload and these headers goes to the end of ${data.queue} / ${data.partition}, under a
        new transaction id. All groups will get it.
      </p>`;
      if (!(await confirm({ title: "Push a copy", text, button: "Push a copy", danger: false }))) return;
      const [pushed] = await ask("POST", "/api/v1/push", {
        body: {
          items: [
            { queue: data.queue, partition: data.partition, payload: data.payload, headers: data.headers ?? undefined },
          ],
        },
      });
      say(`${pushed.status}: ${pushed.transaction_id}`);
    },
    async requeue(_, { params, data, say, refresh }) {
      const text = html`<p>
        The message will be delivered again to the groups that have finished it. It keeps its position in ${data.queue}
        / ${data.partition}.
      </p>`;
      if (!(await confirm({ title: "Deliver again", text, button: "Deliver again", danger: false }))) return;
      await ask("POST", path`/api/v1/messages/${params.partition}/${params.id}/retry`);
      say("It will be delivered again.");
      refresh();
    },
    async remove(_, { params, data, say, go }) {
      const text = html`<p>The message will be deleted from ${data.queue} for all groups.</p>`;
      if (!(await confirm({ title: "Delete the message", text, button: "Delete 1 message" }))) return;
      await ask("DELETE", path`/api/v1/messages/${params.partition}/${params.id}`);
      say("Deleted.");
      go(`#/queues/${encodeURIComponent(data.queue)}?tab=messages`);
    },
  },
};
