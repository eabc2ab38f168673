/** The message browser of a queue, and one message: its history, payload and actions. */
import { ask, bytes, get, path } from "../api.js";
import { html } from "../html.js";
import { count, moment, size, when } from "../format.js";
import { confirm } from "../components/dialog.js";
import { MODES, payload, preview, textOf } from "../components/json.js";
import { table } from "../components/table.js";
import { timeline } from "../components/timeline.js";
import { button, filter, pairs, tabs, teach } from "./common.js";

const PAGE = 50;
const linkTo = (message) =>
  `#/messages/${encodeURIComponent(message.partitionId)}/${encodeURIComponent(message.transactionId)}`;
const at = (value) => (typeof value === "number" ? value : Date.parse(value));
const STATES = {
  dead_letter: ["dead letter", "bad"],
  failed: ["failed", "bad"],
  leased: ["leased", "warn"],
  waiting: ["waiting", ""],
  completed: ["completed", "good"],
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
  {
    name: "transactionId",
    title: "Transaction id",
    card: true,
    cell: (m) => html`<a class="mono" href="${linkTo(m)}">${m.transactionId}</a>`,
  },
  {
    name: "payload",
    title: "Payload",
    kind: "preview",
    cell: (m) =>
      html`<span class="mono">${m.preview === undefined ? "" : preview(m.preview ?? "large or encrypted")}</span>`,
  },
  {
    name: "status",
    title: "Status",
    cell: (m) => (m.state ? state(m.state) : html`<small>${size(m.size)}</small>`),
  },
  { name: "producer", title: "By", cell: (m) => m.producer ?? "" },
];

/** Load the rows of a queue's messages tab: the results of a search, or the newest, each with a preview. */
export async function loadMessages(queue, query, signal) {
  const found = (asked) => get(path`/api/v1/queues/${queue}/messages`, asked, signal);
  if (query.id) return found({ transactionId: query.id });
  const place = {
    partition: query.partition,
    from: query.from && new Date(query.from).toISOString(),
    cursor: query.cursor,
  };
  if (query.search) return found({ ...place, search: query.search });
  const listed = { queue, ...place, from: place.from || "2000-01-01T00:00:00Z", limit: PAGE };
  const [list, { messages }] = await Promise.all([
    get("/api/v1/messages", listed, signal),
    found({ ...place, limit: PAGE }),
  ]);
  const previews = new Map(messages.map((m) => [linkTo(m), m.preview]));
  return { ...list, messages: list.messages.map((m) => ({ ...m, preview: previews.get(linkTo(m)) })) };
}

/** The age of a listing that comes from `database.read_url`. */
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
      ${filter(query, "Search payloads: text, or order.id=7", "search")}${filter(query, "Transaction id", "id")}
      ${filter(query, "Partition", "partition")}
      <label class="beside">since <input type="datetime-local" data-choice="from" value="${query.from ?? ""}" /></label>
    </div>
    ${
      query.search
        ? html`<p>
            <small
              >${count(list.searched)} messages searched, newest first${list.complete ? "; these are all" : ""}.</small
            >
          </p>`
        : ""
    }
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
      ${
        list.next
          ? html`<a href="${context.withQuery({ cursor: list.next })}">${query.search ? "search older" : "older"} →</a>`
          : ""
      }
    </div>`;
}

/** The fields of a message besides its payload. */
const facts = (data) =>
  pairs([
    ["transaction id", html`<code>${data.transactionId}</code>`],
    ["id", html`<code>${data.id}</code>`],
    ["partition id", html`<code>${data.partitionId}</code>`],
    ["pushed", moment(at(data.createdAt))],
    data.traceId && ["trace id", html`<code>${data.traceId}</code>`],
    ["status", state(data.state)],
    ["encrypted", data.encrypted ? "yes" : "no"],
    ...Object.entries(data.headers ?? {}).map(([name, value]) => [html`header <code>${name}</code>`, value]),
  ]);

export const message = {
  path: "/messages/:partition/:id",
  title: ({ id }) => `Message ${id}`,
  crumbs: ({ id }, data) =>
    html`<a href="#/queues">Queues</a> /
      ${data ? html`<a href="#/queues/${encodeURIComponent(data.queue)}?tab=messages">${data.queue}</a> / ` : ""}<b
        >${id}</b
      >`,
  every: 5000,
  async load({ partition, id }, _, signal) {
    const one = path`/api/v1/messages/${partition}/${id}`;
    const [about, { events }, body] = await Promise.all([
      get(one, {}, signal),
      get(`${one}/lifeline`, {}, signal),
      bytes(`${one}/payload`, signal),
    ]);
    return { ...about, events, body };
  },
  view(data, context) {
    const mode = context.query.mode ?? "json";
    const again = data.state === "dead_letter" ? "Requeue" : "Deliver again";
    const by = data.producer ? `, pushed by ${data.producer}` : "";
    return html`<h1>${data.queue} / ${data.partition} <small>${size(data.body.length)}${by}</small></h1>
      <div class="tools">
        ${button(context, "read_write", "copy-message", "Push a copy")}
        ${button(context, "read_write", "requeue", `${again} → ${data.queue} / ${data.partition}`)}
        <button data-action="copy" data-text="${textOf(data.body)}">Copy payload</button>
        ${button(context, "read_write", "remove", "Delete", { danger: true })}
      </div>
      <div class="card life">${timeline(data.events)}</div>
      <div class="cards">
        <div class="card">
          ${tabs(
            MODES.map((one) => [one, one]),
            mode,
            (one) => context.withQuery({ mode: one }),
            "View of the payload",
          )}
          ${payload(data.body, mode)}
        </div>
        <div class="card">${facts(data)}</div>
      </div>`;
  },
  actions: {
    async "copy-message"(_, { params, data, say }) {
      const text = html`<p>
        A new message with this payload and these headers goes to the end of ${data.queue} / ${data.partition}, under a
        new transaction id. All groups will get it.
      </p>`;
      if (!(await confirm({ title: "Push a copy", text, button: "Push a copy", danger: false }))) return;
      const pushed = await ask("POST", path`/api/v1/messages/${params.partition}/${params.id}/copy`);
      say(html`${pushed.status}: <a href="${linkTo(pushed)}">${pushed.transactionId}</a>`);
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
