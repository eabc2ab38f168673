/** One queue: its groups, partitions, messages, charts and options, in tabs whose choice stands in the address. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { clock, count, duration, plural, rate } from "../format.js";
import { sparkline } from "../components/chart.js";
import { confirm, form } from "../components/dialog.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import { QUEUE_MODE, age, bad, button, figure, filter, groupName as title, pager, since, teach } from "./common.js";
import { history, loadCharts } from "./history.js";
import { loadMessages, messages } from "./messages.js";
import { linkTo } from "./queues.js";
import { actions as scheduledActions, loadScheduled, scheduled } from "./scheduled.js";

function groups(data, context) {
  const columns = [
    { name: "name", title: "Group", cell: (g) => html`<b>${title(g.name)}</b>` },
    { name: "lag", title: "Lag", number: true, card: true, cell: (g) => count(g.waiting) },
    { name: "seconds", title: "Behind", number: true, card: true, cell: (g) => age(g.lagSeconds) },
    { name: "leased", title: "Leased", number: true, cell: (g) => count(g.leased) },
    { name: "consumers", title: "Consumers", number: true, cell: (g) => count(g.consumers) },
    { name: "rate", title: "Delivered/s", number: true, cell: (g) => rate(g.rate) },
    { name: "acked", title: "Delivered", number: true, cell: (g) => count(g.completed) },
    { name: "failed", title: "Failed", number: true, cell: (g) => count(g.failed) },
    {
      name: "dead",
      title: "Dead",
      number: true,
      cell: (g) =>
        g.deadLetters
          ? html`<a href="#/dead-letters?queue=${encodeURIComponent(data.name)}&group=${encodeURIComponent(g.name)}"
              >${bad(g.deadLetters)}</a
            >`
          : "0",
    },
    {
      name: "actions",
      title: "",
      kind: "actions",
      cell: (g) =>
        html`${button(context, "read_write", "seek", "Seek", { data: { group: g.name } })}
        ${button(context, "admin", "forget", "Delete", { danger: true, data: { group: g.name, lag: g.waiting } })}`,
    },
  ];
  return table({
    columns,
    rows: data.groups,
    key: (g) => g.name,
    caption: "Groups",
    empty: teach("No consumer has read from this queue yet.", `penstock queue pop ${data.name}@billing`),
  });
}

const CONSUMERS = [
  { name: "name", title: "Consumer", card: true, cell: (c) => html`<b>${c.name}</b>` },
  { name: "group", title: "Group", card: true, cell: (c) => title(c.group) },
  {
    name: "hand",
    title: "In flight",
    number: true,
    card: true,
    cell: (c) => `${count(c.inFlight)} of ${count(c.concurrency)}`,
  },
  {
    name: "inFlightSeconds",
    title: "In flight for",
    number: true,
    cell: (c) => (c.inFlight ? duration(c.inFlightSeconds) : "–"),
  },
  { name: "handled", title: "Handled", number: true, cell: (c) => count(c.handled) },
  { name: "failed", title: "Failed", number: true, cell: (c) => bad(c.failed) },
  {
    name: "error",
    title: "Last error",
    kind: "text",
    cell: (c) => (c.lastError ? html`${visible(c.lastError)} <small>${since(Date.parse(c.lastErrorAt))}</small>` : ""),
  },
  { name: "seen", title: "Seen", number: true, cell: (c) => since(Date.parse(c.seenAt)) },
];

const consumers = (data) =>
  table({
    columns: CONSUMERS,
    rows: data.list.consumers,
    key: (c) => c.id,
    caption: "Consumers",
    empty: teach(
      "No consumer of this queue reports its status. Consumers of the Python client do.",
      "penstock worker shop.consumers:client",
    ),
  });

const PARTITIONS = [
  { name: "name", title: "Partition", card: true, cell: (p) => html`<b>${p.name}</b>` },
  { name: "lag", title: "Lag", number: true, card: true, cell: (p) => count(p.waiting) },
  { name: "oldest", title: "Behind", number: true, card: true, cell: (p) => (p.waiting ? age(p.oldest) : "") },
  { name: "stored", title: "Stored", number: true, cell: (p) => count(p.stored) },
  { name: "leased", title: "Leased", number: true, cell: (p) => count(p.leased) },
  {
    name: "lease",
    title: "Lease",
    cell: (p) => (p.lease ? html`<code>${p.lease}</code> <small>until ${clock(p.leaseEndsAt)}</small>` : ""),
  },
  {
    name: "newest",
    title: "Last push",
    number: true,
    cell: (p) => (p.newest === null ? "–" : `${duration(p.newest)} ago`),
  },
];

/** The group whose partitions are shown: the one that was chosen, else the one with the largest lag. */
const chosenGroup = (data, query) =>
  query.group ?? data.groups.toSorted((a, b) => b.waiting - a.waiting)[0]?.name ?? "";

function partitions(data, context) {
  const { query } = context;
  if (!data.groups.length)
    return html`<div class="empty">
      ${teach("Lag is counted per group, and no consumer has read from this queue yet.", `penstock queue pop ${data.name}@billing`)}
    </div>`;
  return html`<div class="tools">
      ${filter(query, "Filter by name")}<select data-choice="group" aria-label="Group">
        ${data.groups.map((g) => html`<option value="${g.name || QUEUE_MODE}" .selected="${g.name === chosenGroup(data, query) || query.group === (g.name || QUEUE_MODE)}">${title(g.name)}</option>`)}
      </select>
    </div>
    ${table({ columns: PARTITIONS, rows: data.list.partitions, key: (p) => p.id, caption: "Partitions by lag", href: (p) => `${linkTo(data.name)}?tab=messages&partition=${encodeURIComponent(p.name)}`, empty: "No partition matches." })}
    ${pager(query, data.list.total, data.list.partitions.length, context)}`;
}

function options(data, context) {
  const { about, options: values } = data.list;
  return html`<div class="tools">
      ${button(context, "read_write", "configure", "Change options", { primary: true })}
    </div>
    ${table({
      columns: [
        { name: "name", title: "Option", card: true, cell: (o) => html`<code>${o.name}</code>` },
        {
          name: "value",
          title: "Value",
          number: true,
          card: true,
          cell: (o) => (values[o.name] === o.default ? String(o.default) : html`<b>${String(values[o.name])}</b>`),
        },
        { name: "default", title: "Default", number: true, cell: (o) => String(o.default) },
        { name: "meaning", title: "Meaning", kind: "text", cell: (o) => o.meaning },
      ],
      rows: about,
      key: (o) => o.name,
      caption: "Options",
    })}`;
}

const TABS = [
  ["groups", "Groups", groups, null],
  ["consumers", "Consumers", consumers, (name, _, signal) => get("/api/v1/consumers", { queue: name }, signal)],
  [
    "partitions",
    "Partitions",
    partitions,
    (name, query, signal, one) =>
      get(
        path`/api/v1/queues/${name}/partitions`,
        { group: chosenGroup(one, query), filter: query.filter, offset: query.offset },
        signal,
      ),
  ],
  ["messages", "Messages", messages, loadMessages],
  ["scheduled", "Delayed", scheduled, loadScheduled],
  ["charts", "Charts", history, loadCharts],
  ["options", "Options", options, (name, _, signal) => get(path`/api/v1/queues/${name}/options`, {}, signal)],
];
const tabOf = (query) => TABS.find(([name]) => name === query.tab) ?? TABS[0];

export const queue = {
  path: "/queues/:queue",
  title: ({ queue: name }) => name,
  crumbs: ({ queue: name }) => html`<a href="#/queues">Queues</a> / <b>${name}</b>`,
  async load({ queue: name }, query, signal) {
    const [tab, , , more] = tabOf(query);
    const one = await get(path`/api/v1/queues/${name}`, { recent: true }, signal);
    return { ...one, tab, list: more ? await more(name, query, signal, one) : null };
  },
  view(data, context) {
    const tab = tabOf(context.query);
    return html`<h1>${data.name} <small>${data.namespace ?? ""} ${data.task ?? ""}</small></h1>
      <div class="tools">
        ${button(context, "read_write", "push", "Push a message", { primary: true })}
        ${data.deadLetters ? html`<a class="button" href="#/dead-letters?queue=${encodeURIComponent(data.name)}">Requeue ${plural(data.deadLetters, "dead letter")} …</a>` : ""}
        ${button(context, "admin", "clear", "Clear", { danger: true })}${button(context, "admin", "delete", "Delete", { danger: true })}
      </div>
      <div class="figures">
        ${figure("waiting", count(data.waiting), sparkline(data.history ?? [], "waiting", "waiting, last minute"))}${figure("oldest waiting", age(data.oldest))}${figure("pushed/s", rate(data.pushedRate))}
        ${figure("delivered/s", rate(data.deliveredRate))}${figure("stored", count(data.stored))}${figure("dead letters", bad(data.deadLetters))}
      </div>
      <div class="tabs" role="navigation" aria-label="Parts of this queue">
        ${TABS.map(([name, label]) => html`<a class="badge" href="${linkTo(data.name)}?tab=${name}" aria-current="${name === tab[0] ? "page" : null}">${label}</a>`)}
      </div>
      ${tab[0] === data.tab ? tab[2](data, context) : html`<p class="loading">…</p>`}`;
  },
  actions: {
    ...scheduledActions,
    async push(_, { params, say, refresh }) {
      const values = await form({
        title: `Push a message to ${params.queue}`,
        button: "Push",
        fields: [
          { name: "payload", label: "Payload (JSON)", kind: "json", value: "{}" },
          { name: "partition", label: "Partition", value: "Default" },
          {
            name: "transactionId",
            label: "Transaction id",
            help: "a message with the same id in the same partition is stored once",
          },
          { name: "delay", label: "Deliver in", kind: "number", value: "0", help: "seconds; 0: now" },
          { name: "headers", label: "Headers (JSON)", value: "{}", help: "an object of strings" },
        ],
        check: async ({ payload, partition, transactionId, delay, headers }) => {
          try {
            const item = { queue: params.queue, partition: partition || "Default", payload: JSON.parse(payload) };
            if (transactionId) item.transactionId = transactionId;
            if (Number(delay)) item.delay = Number(delay);
            if (Object.keys(JSON.parse(headers || "{}")).length) item.headers = JSON.parse(headers);
            const [pushed] = await ask("POST", "/api/v1/push", { body: { items: [item] } });
            say(`${pushed.status}: ${pushed.transaction_id}`);
          } catch (error) {
            return error.message;
          }
          return "";
        },
      });
      if (values) refresh();
    },
    async configure(_, { params, data, say, refresh }) {
      const { about, options: now } = data.list;
      const kind = (o) =>
        typeof o.default === "boolean"
          ? { choices: ["true", "false"] }
          : o.name === "ordering"
            ? { choices: ["partition", "none"] }
            : { kind: "number" };
      const changed = (values) =>
        Object.fromEntries(
          about
            .filter((o) => values[o.name] !== String(now[o.name]))
            .map((o) => [o.name, o.name === "ordering" ? values[o.name] : JSON.parse(values[o.name] || "null")]),
        );
      let sent = {};
      const values = await form({
        title: `Options of ${params.queue}`,
        button: "Save changes",
        text: "Options that you do not change keep their values.",
        fields: about.map((o) => ({
          name: o.name,
          label: o.name,
          value: String(now[o.name]),
          help: o.meaning,
          ...kind(o),
        })),
        check: async (given) => {
          sent = changed(given);
          if (!Object.keys(sent).length) return "Nothing has changed.";
          try {
            await ask("PATCH", path`/api/v1/queues/${params.queue}/options`, { body: sent });
          } catch (error) {
            return error.message;
          }
          return "";
        },
      });
      if (values) {
        say(
          `Changed: ${Object.entries(sent)
            .map(([name, value]) => `${name} = ${value}`)
            .join(", ")}.`,
        );
        refresh();
      }
    },
    async clear(_, { params, data, say, refresh }) {
      const text = html`<p>
        ${plural(data.stored, "message")} of ${params.queue} will be deleted for all groups; ${count(data.waiting)} of
        them are not consumed yet. This cannot be undone.
      </p>`;
      if (
        !(await confirm({
          title: "Clear the queue",
          text,
          button: `Delete ${plural(data.stored, "message")}`,
          typed: params.queue,
        }))
      )
        return;
      await ask("DELETE", path`/api/v1/queues/${params.queue}/clear`);
      say(`${params.queue} is empty.`);
      refresh();
    },
    async delete(_, { params, data, say, go }) {
      const text = html`<p>
        The queue ${params.queue}, its ${plural(data.stored, "message")}, ${plural(data.groups.length, "group")} and
        ${plural(data.deadLetters ?? 0, "dead letter")} will be deleted.
      </p>`;
      if (!(await confirm({ title: "Delete the queue", text, button: `Delete ${params.queue}`, typed: params.queue })))
        return;
      await ask("DELETE", path`/api/v1/resources/queues/${params.queue}`);
      say(`${params.queue} was deleted.`);
      go("#/queues");
    },
    async forget(element, { params, say, refresh }) {
      const { group, lag } = element.dataset;
      const text = html`<p>
        The group ${title(group)} of ${params.queue} will be deleted with its position. The ${count(Number(lag))}
        messages it has not consumed will not be delivered to it.
      </p>`;
      if (!(await confirm({ title: "Delete the group", text, button: `Delete ${title(group)}`, typed: title(group) })))
        return;
      await ask("DELETE", path`/api/v1/consumer-groups/${group || QUEUE_MODE}/queues/${params.queue}`);
      say(`The group ${title(group)} was deleted.`);
      refresh();
    },
    async seek(element, { params, say, refresh }) {
      const { group } = element.dataset;
      const url = path`/api/v1/consumer-groups/${group || QUEUE_MODE}/queues/${params.queue}/seek`;
      const values = await form({
        title: `Seek ${title(group)}`,
        button: "Preview",
        fields: [
          { name: "to", label: "To", choices: ["beginning", "end", "time"], value: "beginning" },
          { name: "time", label: "Time", kind: "datetime-local", help: "only for “time”" },
        ],
        check: ({ to, time }) => (to === "time" && !time ? "Choose a time." : ""),
      });
      if (!values) return;
      const time = values.time && new Date(values.time).toISOString();
      const body = { beginning: { toBeginning: true }, end: { toEnd: true }, time: { timestamp: time } }[values.to];
      const preview = await ask("POST", url, { body: { ...body, dryRun: true } });
      const text = html`<p>
        ${plural(preview.redelivered, "message")} will be delivered to ${title(group)} again;
        ${plural(preview.skipped, "message")} that it has not consumed will be skipped.
      </p>`;
      if (
        !(await confirm({
          title: "Seek",
          text,
          button: `Deliver ${plural(preview.redelivered, "message")} again`,
          danger: preview.skipped > 0,
        }))
      )
        return;
      await ask("POST", url, { body });
      say(`${title(group)} continues from ${values.to}.`);
      refresh();
    },
  },
};
