/** All topics: size, rates, groups and lag. */
import { ask, get, path } from "../api.js";
import { html } from "../html.js";
import { count, rate, size } from "../format.js";
import { sparkline } from "../components/chart.js";
import { confirm, form } from "../components/dialog.js";
import { table } from "../components/table.js";
import { bad, button, filter, pager, teach } from "./common.js";
import { linkTo } from "./records.js";

/** Shared topics have no segments; their own page shows their size. */
const shared = (t) => t.placement === "shared";

const COLUMNS = [
  {
    name: "name",
    title: "Topic",
    sort: true,
    cell: (t) =>
      html`<a href="${linkTo(t.name)}">${t.name}</a> ${shared(t) ? html`<span class="badge">shared</span>` : ""}`,
  },
  { name: "records", title: "Records", number: true, card: true, sort: true, cell: (t) => count(t.records) },
  { name: "bytes", title: "Size", number: true, sort: true, cell: (t) => (shared(t) ? "–" : size(t.bytes)) },
  { name: "rate", title: "Records/s", number: true, sort: true, cell: (t) => rate(t.rate) },
  { name: "history", title: "Trend", cell: (t) => sparkline(t.history, "produced", `records per second of ${t.name}`) },
  { name: "groups", title: "Groups", number: true, sort: true, cell: (t) => count(t.groups) },
  { name: "worstLag", title: "Largest lag", number: true, sort: true, cell: (t) => count(t.worstLag) },
  { name: "segments", title: "Segments", number: true, sort: true, cell: (t) => (shared(t) ? "–" : count(t.segments)) },
  { name: "policy", title: "Policy", cell: (t) => t.policy },
  { name: "damaged", title: "Damaged", number: true, cell: (t) => bad(t.damaged) },
];

export const topics = {
  path: "/topics",
  title: () => "Topics",
  load: (_, query, signal) =>
    get(
      "/topics",
      {
        details: true,
        filter: query.filter,
        sort: query.sort ?? "name",
        limit: query.limit ?? 50,
        offset: query.offset,
      },
      signal,
    ),
  view(data, context) {
    const { query } = context;
    return html`<h1>Topics</h1>
      <div class="tools">
        ${filter(query, "Filter by name")} ${button(context, "admin", "scrub", "Verify all segments")}
        ${button(context, "read_write", "create", "Create a topic", { primary: true })}
      </div>
      ${table({
        columns: COLUMNS,
        rows: data.topics,
        key: (t) => t.name,
        href: (t) => linkTo(t.name),
        sort: query.sort ?? "name",
        caption: "Topics",
        empty: query.filter
          ? "No topic matches."
          : teach("There is no topic yet.", "echo hello | penstock topic produce greetings"),
      })}
      ${pager(query, data.total, data.topics.length, context)}`;
  },
  actions: {
    async scrub(_, { say }) {
      if (
        !(await confirm({
          title: "Verify all segments",
          text: html`<p>
            The broker reads every sealed segment and verifies its checksums, at a limited rate. Damage is reported in
            this list and in the log.
          </p>`,
          button: "Verify now",
          danger: false,
        }))
      )
        return;
      await ask("POST", "/api/v1/scrub");
      say("Verification has started.");
    },
    async create(_, context) {
      const values = await form({
        title: "Create a topic",
        button: "Create",
        fields: [{ name: "topic", label: "Name" }],
        check: async ({ topic }) => {
          try {
            await ask("POST", path`/topics/${topic.trim()}`);
          } catch (error) {
            return error.message;
          }
          return "";
        },
      });
      if (values) context.go(linkTo(values.topic.trim()));
    },
  },
};
