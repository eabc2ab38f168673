/** The delayed messages of a queue, and how to cancel them. */
import { ask, bytes, get, path } from "../api.js";
import { html } from "../html.js";
import { duration, moment } from "../format.js";
import { confirm, show } from "../components/dialog.js";
import { payload } from "../components/json.js";
import { table } from "../components/table.js";
import { button, filter, pairs, since, teach } from "./common.js";

const LIMIT = 50;
const address = (m) => path`/api/v1/scheduled/${m.queue}/${m.partition}/${m.transactionId}`;
const time = (text) => new Date(text).getTime();

const columns = (context) => [
  {
    name: "due",
    title: "Due",
    card: true,
    cell: (m) =>
      html`<time title="${moment(time(m.deliverAt))}"
        >in ${duration(Math.max(0, (time(m.deliverAt) - Date.now()) / 1000))}</time
      >`,
  },
  { name: "partition", title: "Partition", card: true, cell: (m) => m.partition },
  { name: "id", title: "Transaction id", kind: "text", cell: (m) => html`<code>${m.transactionId}</code>` },
  { name: "pushed", title: "Pushed", number: true, cell: (m) => since(time(m.pushedAt)) },
  { name: "by", title: "By", cell: (m) => m.producer ?? "" },
  {
    name: "actions",
    title: "",
    kind: "actions",
    cell: (m) =>
      html`<button data-action="show-scheduled" data-id="${m.transactionId}" data-partition="${m.partition}">
          Show
        </button>
        ${button(context, "read_write", "cancel-scheduled", "Cancel", {
          danger: true,
          data: { id: m.transactionId, partition: m.partition },
        })}`,
  },
];

export const loadScheduled = (queue, query, signal) =>
  get("/api/v1/scheduled", { queue, partition: query.partition, cursor: query.cursor, limit: LIMIT }, signal);

export function scheduled(data, context) {
  const { list } = data;
  return html`<div class="tools">${filter(context.query, "Partition", "partition")}</div>
    ${table({
      columns: columns(context),
      rows: list.messages,
      key: (m) => `${m.partition}/${m.transactionId}`,
      caption: "Delayed messages, the next due first",
      empty: context.query.partition
        ? "No delayed message in this partition."
        : teach(
            "No delayed message. Push one with a delay:",
            `curl -X POST ${location.origin}/api/v1/push -H 'Content-Type: application/json' -d '${JSON.stringify({
              items: [{ queue: data.name, payload: { id: 7 }, delay: 3600 }],
            })}'`,
          ),
    })}
    <div class="pager">
      ${
        context.query.cursor ? html`<a href="${context.withQuery({ cursor: "" })}">← next due</a>` : ""
      }${list.next ? html`<a href="${context.withQuery({ cursor: list.next })}">later →</a>` : ""}
    </div>`;
}

const of = (element, params) => ({
  queue: params.queue,
  partition: element.dataset.partition,
  transactionId: element.dataset.id,
});

export const actions = {
  async "show-scheduled"(element, { params }) {
    const at = address(of(element, params));
    const [one, body] = await Promise.all([get(at), bytes(`${at}/payload`)]);
    await show({
      title: "Delayed message",
      content: html`${pairs([
        ["due", moment(time(one.deliverAt))],
        ["pushed", moment(time(one.pushedAt))],
        ...Object.entries(one.headers ?? {}).map(([name, value]) => [html`header <code>${name}</code>`, value]),
      ])}${payload(body)}`,
    });
  },
  async "cancel-scheduled"(element, { params, say, refresh }) {
    const one = of(element, params);
    const text = html`<p>The message <code>${one.transactionId}</code> will be removed and never delivered.</p>`;
    if (!(await confirm({ title: "Cancel the message", text, button: "Cancel 1 message" }))) return;
    await ask("DELETE", address(one));
    say("It was cancelled.");
    refresh();
  },
};
