/** One queue: its groups, messages and options, in tabs whose choice stands in the address. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { ago, count, plural, rate } from "../format.js";
import { sparkline } from "../components/chart.js";
import { confirm, form } from "../components/dialog.js";
import { table } from "../components/table.js";
import { age, bad, button, figure, pairs, teach } from "./common.js";
import { linkTo } from "./queues.js";
import { messages } from "./messages.js";

const QUEUE_MODE = "__QUEUE_MODE__";
const title = (group) => group || "queue mode";

function groups(data, context) {
  const columns = [
    { name: "name", title: "Group", cell: (g) => html`<b>${title(g.name)}</b>` },
    { name: "lag", title: "Lag", number: true, card: true, cell: (g) => count(g.lag) },
    { name: "seconds", title: "Behind", number: true, card: true, cell: (g) => age(g.lagSeconds) },
    { name: "leased", title: "Leased", number: true, cell: (g) => count(g.leased) },
    { name: "rate", title: "Acked/s", number: true, cell: (g) => rate(g.rate) },
    { name: "acked", title: "Acked", number: true, cell: (g) => count(g.acked) },
    { name: "failed", title: "Failed attempts", number: true, cell: (g) => count(g.failed) },
    { name: "dead", title: "Dead letters", number: true, cell: (g) => g.dead ? html`<a href="#/dead-letters?queue=${encodeURIComponent(data.name)}&group=${encodeURIComponent(g.name)}">${bad(g.dead)}</a>` : "0" },
    { name: "actions", title: "", cell: (g) => html`${button(context, "read_write", "seek", "Seek", { data: { group: g.name } })}
      ${button(context, "admin", "forget", "Delete", { danger: true, data: { group: g.name, lag: g.lag } })}` },
  ];
  return table({ columns, rows: data.groups, key: (g) => g.name, caption: "Groups",
    empty: teach("Nobody has consumed from this queue yet.", `penstock queue pop ${data.name}@billing`) });
}

function consumers(data) {
  const columns = [
    { name: "name", title: "Consumer", cell: (c) => html`<b>${c.name}</b>` },
    { name: "group", title: "Group", cell: (c) => title(c.group === QUEUE_MODE ? "" : c.group) },
    { name: "hand", title: "In hand", number: true, card: true, cell: (c) => `${count(c.inFlight)} of ${count(c.concurrency)}` },
    { name: "waiting", title: "Wait for a retry", number: true, cell: (c) => count(c.waiting) },
    { name: "handled", title: "Handled", number: true, cell: (c) => count(c.handled) },
    { name: "failed", title: "Failed", number: true, cell: (c) => bad(c.failed) },
    { name: "error", title: "Last error", cell: (c) => c.lastError ? html`${c.lastError} <small>${ago(c.lastErrorAt)}</small>` : "" },
    { name: "seen", title: "Seen", cell: (c) => ago(c.seenAt) },
  ];
  return table({ columns, rows: data.consumers, key: (c) => c.id, caption: "Consumers",
    empty: teach("No consumer reports from this queue. Those of the Python client do.", "penstock worker shop.consumers:client") });
}

const options = (data) => html`<div class="card">${pairs(Object.entries(data.options).map(([name, value]) => [name, String(value)]))}</div>`;

const TABS = [["groups", "Groups", groups], ["consumers", "Consumers", consumers], ["messages", "Messages", messages], ["options", "Options", options]];

export const queue = {
  path: "/queues/:queue",
  title: ({ queue: name }) => name,
  crumbs: ({ queue: name }) => html`<a href="#/queues">Queues</a> / <b>${name}</b>`,
  async load({ queue: name }, query, signal) {
    const one = get(path`/api/v1/queues/${name}`, {}, signal);
    if (query.tab === "consumers") return { ...(await one), ...(await get("/api/v1/consumers", { queue: name }, signal)) };
    if (query.tab !== "messages") return one;
    const from = query.from ? new Date(query.from).toISOString() : "2000-01-01T00:00:00Z";
    const rows = get("/api/v1/messages", { queue: name, partition: query.partition, from, cursor: query.cursor, limit: 50 }, signal);
    return { ...(await one), list: await rows };
  },
  view(data, context) {
    const tab = TABS.find(([name]) => name === context.query.tab) ?? TABS[0];
    if ((tab[0] === "messages" && !data.list) || (tab[0] === "consumers" && !data.consumers)) return html`<p class="loading">…</p>`;
    return html`<h1>${data.name} <small>${data.namespace ?? ""} ${data.task ?? ""}</small></h1>
      <div class="tools">${button(context, "read_write", "push", "Push a message", { primary: true })}
        ${button(context, "admin", "clear", "Clear", { danger: true })}${button(context, "admin", "delete", "Delete", { danger: true })}</div>
      <div class="figures">${figure("waiting", count(data.waiting), sparkline(data.history ?? [], "waiting", "waiting, last minute"))}${figure("oldest waiting", age(data.oldest))}${figure("pushed/s", rate(data.pushedRate))}
        ${figure("acked/s", rate(data.deliveredRate))}${figure("stored", count(data.stored))}${figure("dead letters", bad(data.deadLetters))}</div>
      <div class="tabs" role="navigation" aria-label="Parts of this queue">${TABS.map(([name, label]) => html`<a class="badge" href="${linkTo(data.name)}?tab=${name}" ${name === tab[0] ? html`aria-current="page"` : ""}>${label}</a>`)}</div>
      ${tab[2](data, context)}`;
  },
  actions: {
    async push(_, { params, say, refresh }) {
      const values = await form({
        title: `Push a message to ${params.queue}`, button: "Push",
        fields: [{ name: "payload", label: "Payload (JSON)", kind: "json", value: "{}" }, { name: "partition", label: "Partition", value: "Default" },
          { name: "transactionId", label: "Transaction id", help: "a message with the same id in the same partition is stored once" }],
        check: async ({ payload, partition, transactionId }) => {
          try {
            const item = { queue: params.queue, partition: partition || "Default", payload: JSON.parse(payload) };
            if (transactionId) item.transactionId = transactionId;
            const [pushed] = await ask("POST", "/api/v1/push", { body: { items: [item] } });
            say(`${pushed.status}: ${pushed.transaction_id}`);
          } catch (error) { return error.message; }
          return "";
        },
      });
      if (values) refresh();
    },
    async clear(_, { params, data, say, refresh }) {
      const text = html`<p>${plural(data.stored, "message")} of ${params.queue} will be deleted for all groups, ${count(data.waiting)} of them not consumed yet. This cannot be undone.</p>`;
      if (!(await confirm({ title: "Clear the queue", text, button: `Delete ${plural(data.stored, "message")}`, typed: params.queue }))) return;
      await ask("DELETE", path`/api/v1/queues/${params.queue}/clear`);
      say(`${params.queue} is empty.`);
      refresh();
    },
    async delete(_, { params, data, say, go }) {
      const text = html`<p>The queue ${params.queue}, its ${plural(data.stored, "message")}, ${plural(data.groups.length, "group")} and ${plural(data.deadLetters ?? 0, "dead letter")} will be gone.</p>`;
      if (!(await confirm({ title: "Delete the queue", text, button: `Delete ${params.queue}`, typed: params.queue }))) return;
      await ask("DELETE", path`/api/v1/resources/queues/${params.queue}`);
      say(`${params.queue} was deleted.`);
      go("#/queues");
    },
    async forget(element, { params, say, refresh }) {
      const { group, lag } = element.dataset;
      const text = html`<p>The group ${title(group)} of ${params.queue} will be forgotten with its position; ${count(Number(lag))} messages that it has not consumed are not delivered to it any more.</p>`;
      if (!(await confirm({ title: "Delete the group", text, button: `Delete ${title(group)}`, typed: title(group) }))) return;
      await ask("DELETE", path`/api/v1/consumer-groups/${group || QUEUE_MODE}/queues/${params.queue}`);
      say(`The group ${title(group)} was deleted.`);
      refresh();
    },
    async seek(element, { params, say, refresh }) {
      const { group } = element.dataset;
      const url = path`/api/v1/consumer-groups/${group || QUEUE_MODE}/queues/${params.queue}/seek`;
      const values = await form({
        title: `Where should ${title(group)} go on?`, button: "Preview",
        fields: [{ name: "to", label: "To", choices: ["beginning", "end", "time"], value: "beginning" }, { name: "time", label: "Time", kind: "datetime-local", help: "only for “time”" }],
        check: ({ to, time }) => (to === "time" && !time ? "Choose a time." : ""),
      });
      if (!values) return;
      const time = values.time && new Date(values.time).toISOString();
      const body = { beginning: { toBeginning: true }, end: { toEnd: true }, time: { timestamp: time } }[values.to];
      const preview = await ask("POST", url, { body: { ...body, dryRun: true } });
      const text = html`<p>${plural(preview.redelivered, "message")} will be delivered to ${title(group)} again; ${plural(preview.skipped, "message")} that it has not consumed will be skipped.</p>`;
      if (!(await confirm({ title: "Seek", text, button: `Deliver ${plural(preview.redelivered, "message")} again`, danger: preview.skipped > 0 }))) return;
      await ask("POST", url, { body });
      say(`${title(group)} goes on from ${values.to}.`);
      refresh();
    },
  },
};
