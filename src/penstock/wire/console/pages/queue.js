/** One queue: its groups, partitions, messages, charts and options, in tabs whose choice stands in the address. */
import { get, path } from "../api.js";
import { html } from "../html.js";
import { clock, count, duration, plural, rate } from "../format.js";
import { sparkline } from "../components/chart.js";
import { visible } from "../components/json.js";
import { table } from "../components/table.js";
import {
  QUEUE_MODE,
  age,
  bad,
  button,
  figure,
  filter,
  groupName as title,
  named,
  pager,
  since,
  tabs,
  teach,
} from "./common.js";
import { history, loadCharts } from "./history.js";
import { loadMessages, messages } from "./messages.js";
import { actions } from "./queue_actions.js";
import { linkTo } from "./queues.js";
import { loadScheduled, scheduled } from "./scheduled.js";

/**
 * The consumers of a group: those that report, else one row for the connections that pop. One consumer of the
 * Python client has many connections, so connections are only counted where nobody reports.
 */
function consumersOf(data, group) {
  const reports = data.list.consumers.filter((one) => title(one.group) === title(group.name));
  if (reports.length || !group.consumers) return reports;
  const name = `${plural(group.consumers, "connection")} without reports`;
  return [{ id: `connections ${group.name}`, name, group: group.name, connections: group.consumers }];
}

/** How many there are, the same on both tabs. */
const consumerCount = (list) => list.reduce((sum, one) => sum + (one.connections ?? 1), 0);

function groups(data, context) {
  const columns = [
    { name: "name", title: "Group", cell: (g) => html`<b>${title(g.name)}</b>` },
    { name: "waiting", title: "Waiting", number: true, card: true, cell: (g) => count(g.waiting) },
    { name: "seconds", title: "Behind", number: true, card: true, cell: (g) => age(g.lagSeconds) },
    { name: "leased", title: "Leased", number: true, cell: (g) => count(g.leased) },
    { name: "consumers", title: "Consumers", number: true, cell: (g) => count(consumerCount(consumersOf(data, g))) },
    { name: "rate", title: "Completed/s", number: true, cell: (g) => rate(g.rate) },
    { name: "completed", title: "Completed", number: true, cell: (g) => count(g.completed) },
    { name: "failed", title: "Failed", number: true, cell: (g) => count(g.failed) },
    {
      name: "deadLetters",
      title: "Dead letters",
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
        ${button(context, "admin", "forget", "Delete", { danger: true, data: { group: g.name, waiting: g.waiting } })}`,
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

/** How long the oldest message in flight is being handled, where that is long. */
const longest = (seconds) => (seconds > 60 ? html`<br /><small class="warn">for ${duration(seconds)}</small>` : "");

const CONSUMERS = [
  { name: "name", title: "Consumer", card: true, cell: (c) => html`<b>${c.name}</b>` },
  { name: "group", title: "Group", card: true, cell: (c) => title(c.group) },
  {
    name: "hand",
    title: "In flight",
    number: true,
    card: true,
    cell: (c) =>
      c.connections ? "–" : html`${count(c.inFlight)} of ${count(c.concurrency)}${longest(c.inFlightSeconds)}`,
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
  { name: "seen", title: "Seen", number: true, cell: (c) => (c.seenAt ? since(Date.parse(c.seenAt)) : "–") },
];

function consumers(data) {
  const groups = new Set(data.groups.map((group) => title(group.name)));
  const others = data.list.consumers.filter((one) => !groups.has(title(one.group))); // they have not popped yet
  return table({
    columns: CONSUMERS,
    rows: [...data.groups.flatMap((group) => consumersOf(data, group)), ...others],
    key: (c) => c.id,
    caption: "Consumers",
    empty: teach("No consumer reads this queue now.", "penstock worker shop.consumers:client"),
  });
}

const PARTITIONS = [
  { name: "name", title: "Partition", card: true, cell: (p) => html`<b>${p.name}</b>` },
  { name: "waiting", title: "Waiting", number: true, card: true, cell: (p) => count(p.waiting) },
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

/** The group whose partitions are shown: the one that was chosen, else the one with the most waiting messages. */
const chosenGroup = (data, query) =>
  query.group ?? data.groups.toSorted((a, b) => b.waiting - a.waiting)[0]?.name ?? "";

function partitions(data, context) {
  const { query } = context;
  if (!data.groups.length)
    return html`<div class="empty">
      ${teach("Waiting messages are counted per group, and nobody has read this queue yet.", `penstock queue pop ${data.name}@billing`)}
    </div>`;
  return html`<div class="tools">
      ${filter(query, "Filter by name")}<select data-choice="group" aria-label="Group">
        ${data.groups.map(
          (g) =>
            html`<option
              value="${g.name || QUEUE_MODE}"
              .selected="${g.name === chosenGroup(data, query) || query.group === (g.name || QUEUE_MODE)}"
            >
              ${title(g.name)}
            </option>`,
        )}
      </select>
    </div>
    ${table({
      columns: PARTITIONS,
      rows: data.list.partitions,
      key: (p) => p.id,
      caption: "Partitions by waiting messages",
      href: (p) => `${linkTo(data.name)}?tab=messages&partition=${encodeURIComponent(p.name)}`,
      empty: "No partition matches.",
    })}
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

const loadConsumers = (name, _, signal) => get("/api/v1/consumers", { queue: name }, signal);

const TABS = [
  ["groups", "Groups", groups, loadConsumers],
  ["consumers", "Consumers", consumers, loadConsumers],
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
    return { ...one, tab, list: await more(name, query, signal, one) };
  },
  view(data, context) {
    const tab = tabOf(context.query);
    const letters = plural(data.deadLetters, "dead letter");
    return html`<h1>${named(data.name, data.namespace)} ${data.task ? html`<small>${data.task}</small>` : ""}</h1>
      <div class="tools">
        ${button(context, "read_write", "push", "Push a message", { primary: true })}
        ${
          data.deadLetters
            ? html`<a class="button" href="#/dead-letters?queue=${encodeURIComponent(data.name)}"
                >Requeue ${letters} …</a
              >`
            : ""
        }
        ${button(context, "admin", "clear", "Clear", { danger: true })}
        ${button(context, "admin", "delete", "Delete", { danger: true })}
      </div>
      <div class="figures">
        ${figure("waiting", count(data.waiting), sparkline(data.history ?? [], "waiting", "waiting, last minute"))}
        ${figure("oldest waiting", age(data.oldest))} ${figure("pushed/s", rate(data.pushedRate))}
        ${figure("completed/s", rate(data.completedRate))} ${figure("stored", count(data.stored))}
        ${figure("dead letters", bad(data.deadLetters))}
      </div>
      ${tabs(TABS, tab[0], (name) => `${linkTo(data.name)}?tab=${name}`, "Parts of this queue")}
      ${tab[0] === data.tab ? tab[2](data, context) : html`<p class="loading">…</p>`}`;
  },
  actions,
};
