/** All queues: depth, rates, oldest, groups, dead letters. Filter and sort by the server. */
import { ask, get } from "../api.js";
import { html } from "../html.js";
import { count, rate } from "../format.js";
import { sparkline } from "../components/chart.js";
import { form } from "../components/dialog.js";
import { table } from "../components/table.js";
import { age, bad, button, filter, named, pager, teach } from "./common.js";

export const linkTo = (queue) => `#/queues/${encodeURIComponent(queue)}`;

const COLUMNS = [
  {
    name: "name",
    title: "Queue",
    sort: true,
    cell: (q) => html`<a href="${linkTo(q.name)}">${named(q.name, q.namespace)}</a>`,
  },
  { name: "waiting", title: "Waiting", number: true, card: true, sort: true, cell: (q) => count(q.waiting) },
  { name: "leased", title: "Leased", number: true, cell: (q) => count(q.leased) },
  { name: "pushedRate", title: "Pushed/s", number: true, sort: true, cell: (q) => rate(q.pushedRate) },
  { name: "completedRate", title: "Completed/s", number: true, sort: true, cell: (q) => rate(q.completedRate) },
  { name: "history", title: "Trend", cell: (q) => sparkline(q.history ?? [], "waiting", `waiting in ${q.name}`) },
  { name: "oldest", title: "Oldest", number: true, card: true, sort: true, cell: (q) => age(q.oldest) },
  { name: "groups", title: "Groups", number: true, sort: true, cell: (q) => count(q.groups) },
  { name: "deadLetters", title: "Dead letters", number: true, sort: true, cell: (q) => bad(q.deadLetters) },
];

export const queues = {
  path: "/queues",
  title: () => "Queues",
  load: (_, query, signal) =>
    get(
      "/api/v1/queues",
      {
        filter: query.filter,
        sort: query.sort ?? "-waiting",
        limit: query.limit ?? 50,
        offset: query.offset,
        recent: true,
      },
      signal,
    ),
  view(data, context) {
    const { query } = context;
    return html`<h1>Queues</h1>
      <div class="tools">
        ${filter(query, "Filter by name")}${button(context, "read_write", "create", "Create a queue", { primary: true })}
      </div>
      ${table({
        columns: COLUMNS,
        rows: data.queues,
        key: (q) => q.name,
        href: (q) => linkTo(q.name),
        sort: query.sort ?? "-waiting",
        caption: "Queues",
        empty: query.filter
          ? html`No queue matches “${query.filter}”.`
          : teach("There is no queue yet. The first push creates one:", `penstock queue push orders '{"id": 7}'`),
      })}
      ${pager(query, data.total, data.queues.length, context)}`;
  },
  actions: {
    async create(_, context) {
      const values = await form({
        title: "Create a queue",
        button: "Create",
        fields: [
          { name: "queue", label: "Name" },
          {
            name: "leaseTime",
            label: "Lease time",
            kind: "number",
            value: "300",
            help: "seconds a consumer has before its messages are delivered again",
          },
          {
            name: "retryLimit",
            label: "Retries",
            kind: "number",
            value: "3",
            help: "failed deliveries before a message becomes a dead letter",
          },
        ],
        check: async ({ queue, leaseTime, retryLimit }) => {
          if (!queue.trim()) return "A queue needs a name.";
          try {
            await ask("POST", "/api/v1/configure", {
              body: { queue: queue.trim(), options: { leaseTime: Number(leaseTime), retryLimit: Number(retryLimit) } },
            });
          } catch (error) {
            return error.message;
          }
          return "";
        },
      });
      if (values) {
        context.say(`Queue ${values.queue.trim()} was created.`);
        context.go(linkTo(values.queue.trim()));
      }
    },
  },
};
