/** One queue: its groups, partitions and messages, in tabs whose choice stands in the address. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { count, day, duration, plural, rate } from "../format.js";
import { lines } from "../components/chart.js";
import { confirm, form } from "../components/dialog.js";
import { table } from "../components/table.js";
import { age, bad, button, figure, filter, pager, pairs, since, teach } from "./common.js";
import { linkTo } from "./queues.js";
import { messageTools, messages } from "./messages.js";

const title = (group) => group || "queue mode";
const STATES = { active: "good", idle: "", blocked: "warn" };

function groups(data, context) {
  const columns = [
    { name: "name", title: "Group", cell: (g) => html`<b>${title(g.name)}</b>` },
    { name: "lag", title: "Lag", number: true, card: true, cell: (g) => count(g.lag) },
    { name: "seconds", title: "Behind", number: true, card: true, cell: (g) => age(g.lagSeconds) },
    { name: "state", title: "State", cell: (g) => html`<span class="badge ${STATES[g.state] ?? ""}">${g.state}</span>` },
    { name: "members", title: "Connected", cell: (g) => g.members.length ? html`${g.members.map((m) => html`<div>${m.name} <small>${plural(m.inFlight, "message")} in flight${m.lastError ? html`, <span class="bad">${m.lastError}</span>` : ""}</small></div>`)}` : html`<small>nobody</small>` },
    { name: "leased", title: "Leased", number: true, cell: (g) => count(g.leased) },
    { name: "rate", title: "Acked/s", number: true, cell: (g) => rate(g.rate) },
    { name: "acked", title: "Acked", number: true, cell: (g) => count(g.acked) },
    { name: "failed", title: "Failed attempts", number: true, cell: (g) => count(g.failed) },
    { name: "dead", title: "Dead letters", number: true, cell: (g) => g.dead ? html`<a href="#/dead-letters?queue=${encodeURIComponent(data.name)}&group=${encodeURIComponent(g.name)}">${bad(g.dead)}</a>` : "0" },
    { name: "actions", title: "", cell: (g) => html`${button(context, "read_write", "seek", "Seek", { data: { group: g.name } })}
      ${button(context, "admin", "forget", "Delete", { danger: true, data: { group: g.name, lag: g.lag } })}` },
  ];
  return table({ columns, rows: data.groups, key: (g) => g.name, caption: "Groups",
    empty: teach("Nobody has consumed from this queue yet.", `penstock queue take ${data.name} --group billing`) });
}

const PARTITIONS = [
  { name: "name", title: "Partition", sort: true, cell: (p) => p.name },
  { name: "lag", title: "Lag", number: true, card: true, sort: true, cell: (p) => count(p.lag) },
  { name: "stored", title: "Stored", number: true, cell: (p) => count(p.stored) },
  { name: "oldest", title: "Oldest", number: true, card: true, cell: (p) => (p.oldest ? since(p.oldest) : "–") },
  { name: "newest", title: "Newest", number: true, cell: (p) => (p.newest ? since(p.newest) : "–") },
  { name: "leases", title: "Leases", cell: (p) => html`${p.leases.map((l) => html`<div>${title(l.group)}: ${plural(l.count, "message")}, ends ${day(l.expiresAt)}</div>`)}` },
];

function partitions(data, context) {
  return html`<div class="tools">${filter(context.query, "Filter by partition")}</div>
    ${table({ columns: PARTITIONS, rows: data.partitions.partitions, key: (p) => p.name, sort: context.query.sort ?? "-lag", caption: "Partitions",
      href: (p) => `${linkTo(data.name)}?tab=messages&partition=${encodeURIComponent(p.name)}`, empty: "No partition matches." })}
    ${pager(context.query, data.partitions.total, data.partitions.partitions.length, context)}`;
}

function options(data, context) {
  return html`<div class="card">${pairs(Object.entries(data.options).map(([name, value]) => [name, String(value)]))}
    <p>${button(context, "read_write", "configure", "Change options")}</p></div>`;
}

const TABS = [["groups", "Groups"], ["partitions", "Partitions"], ["messages", "Messages"], ["options", "Options"]];

export const queue = {
  path: "/queues/:queue",
  title: ({ queue: name }) => name,
  crumbs: ({ queue: name }) => html`<a href="#/queues">Queues</a> / <b>${name}</b>`,
  async load({ queue: name }, query, signal) {
    const one = get(path`/api/v1/queues/${name}`, {}, signal);
    const tab = query.tab ?? "groups";
    if (tab === "partitions") {
      const rows = get(path`/api/v1/queues/${name}/partitions`, { filter: query.filter, sort: query.sort ?? "-lag", limit: 50, offset: query.offset, group: query.group }, signal);
      return { ...(await one), partitions: await rows };
    }
    if (tab === "messages") {
      const wanted = { partition: query.partition, transactionId: query.id, search: query.search, from: query.from && Date.parse(query.from), after: query.after, limit: 50 };
      const rows = get(path`/api/v1/queues/${name}/messages`, wanted, signal);
      return { ...(await one), messages: await rows };
    }
    return one;
  },
  view(data, context) {
    const tab = context.query.tab ?? "groups";
    const { times = [], series = {} } = data.history ?? {};
    const shown = { groups, partitions, messages, options }[tab] ?? groups;
    return html`<h1>${data.name} <small>${data.namespace ?? ""} ${data.task ?? ""}</small></h1>
      <div class="tools">${button(context, "read_write", "push", "Push a message", { primary: true })}
        ${button(context, "admin", "clear", "Clear", { danger: true })}${button(context, "admin", "delete", "Delete", { danger: true })}</div>
      <div class="figures">${figure("waiting", count(data.waiting))}${figure("oldest waiting", age(data.oldest))}${figure("pushed/s", rate(data.pushedRate))}
        ${figure("delivered/s", rate(data.deliveredRate))}${figure("stored", count(data.stored))}${figure("dead letters", bad(data.deadLetters))}</div>
      <div class="card">${lines({ times, series: ["pushed", "delivered", "waiting"].filter((name) => series[name]).map((name) => ({ name, values: series[name] })), title: `Messages of ${data.name}` })}</div>
      <div class="tabs" role="navigation" aria-label="Parts of this queue">${TABS.map(([name, label]) => html`<a class="badge" href="${linkTo(data.name)}?tab=${name}" ${name === tab ? html`aria-current="page"` : ""}>${label}</a>`)}</div>
      ${shown(data, context)}`;
  },
  actions: {
    ...messageTools,
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
            say(`${pushed.status}: ${pushed.transaction_id ?? pushed.transactionId ?? ""}`);
          } catch (error) { return error.message; }
          return "";
        },
      });
      if (values) refresh();
    },
    async configure(_, { params, data, say, refresh }) {
      const entries = Object.entries(data.options);
      const values = await form({
        title: `Options of ${params.queue}`, button: "Save",
        text: "Only what you change is sent.",
        fields: entries.map(([name, value]) => ({ name, label: name, value: String(value), ...(typeof value === "boolean" ? { choices: ["true", "false"] } : {}) })),
        check: async (given) => {
          const changed = entries.filter(([name, value]) => given[name] !== String(value));
          if (!changed.length) return "";
          const typed = ([name, value]) => [name, typeof value === "number" ? Number(given[name]) : typeof value === "boolean" ? given[name] === "true" : given[name]];
          try {
            await ask("PATCH", path`/api/v1/queues/${params.queue}`, { body: { options: Object.fromEntries(changed.map(typed)) } });
          } catch (error) { return error.message; }
          say(`Changed ${changed.map(([name]) => name).join(", ")}.`);
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
      await ask("DELETE", path`/api/v1/consumer-groups/${group || "__QUEUE_MODE__"}`, { query: { queue: params.queue } });
      say(`The group ${title(group)} was deleted.`);
      refresh();
    },
    async seek(element, { params, say, refresh }) {
      const { group } = element.dataset;
      const target = ({ to, time }) => (to === "time" ? { time: new Date(time).getTime() } : to);
      const url = path`/api/v1/queues/${params.queue}/groups/${group || "__QUEUE_MODE__"}/seek`;
      const values = await form({
        title: `Where should ${title(group)} go on?`, button: "Preview",
        fields: [{ name: "to", label: "To", choices: ["beginning", "end", "time"], value: "beginning" }, { name: "time", label: "Time", kind: "datetime-local", help: "only for “time”" }],
        check: ({ to, time }) => (to === "time" && !time ? "Choose a time." : ""),
      });
      if (!values) return;
      const preview = await ask("POST", `${url}/preview`, { body: { to: target(values) } });
      const text = html`<p>${plural(preview.again, "message")} will be delivered to ${title(group)} again; ${plural(preview.skipped, "message")} that it has not consumed will be skipped.</p>`;
      if (!(await confirm({ title: "Seek", text, button: `Deliver ${plural(preview.again, "message")} again`, danger: preview.skipped > 0 }))) return;
      await ask("POST", url, { body: { to: target(values) } });
      say(`${title(group)} goes on from ${values.to}.`);
      refresh();
    },
  },
};
export { duration };
